"""A run folder that came from elsewhere, with a link at any name: nothing behind it is touched, and it is named."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from slipstream.checkpoint import CheckpointFolder
from slipstream.errors import SlipstreamError
from slipstream.extras.run_page import write_run_page
from slipstream.own_files import OwnFolder
from slipstream.train.config import Config
from slipstream.train.config.config_values import parse_config
from slipstream.train.elastic_mesh import LocalPlaces
from slipstream.train.folder_lock import FolderLock
from slipstream.train.preflight.folder_check import check_run_folder
from slipstream.train.run_checkpoints import FailureLog
from slipstream.train.run_folder import RunFolder
from support.run_folders import make_run
from support.tiny_training import run_training, tiny_training, with_settings

KEY = 32 * "a"
OWNER = f"slipstream-run/owner-{KEY}.part"

NAMES = {
    # each name that can be a link, and whether a run refuses to begin; others are moved, or removed, as links
    "slipstream-run": True,
    "slipstream-run/lost": True,
    "slipstream-run/output.log": True,
    "slipstream-run/files.json": False,
    OWNER: False,
    f"slipstream-run/.owner-{KEY}.part": False,
    f"{OWNER}/step-00000004.part": False,
    "slipstream-run/owner-0001.part": False,
    "slipstream-run/owner-0007.part": False,
    "checkpoints": True,
    "checkpoints/step-00000002": False,
    "checkpoints/step-00000004.part": False,
    "checkpoints/step-00000001.aside": False,
    "checkpoints/trial.part": False,
    "config.yaml": False,
    "metrics.jsonl": False,
    "failures.jsonl": True,
    "tensorboard": True,
    "inputs": False,
    "model": False,
    "listed": True,
    "listed/deeper": True,
}


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """All names in a folder, with what is in the files."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def somebodys(folder: Path) -> dict[str, bytes | None]:
    """Makes files of somebody else, with the names that a run's folder has."""
    files = ("0", "deeper/file", "file", "manifest.json", "step-00000004.part/a", "slipstream-run/files.json", "lost/1")
    for name in (*files, f"owner-{KEY}.part/file", "files.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"files": ["file"]}')
    (folder / "empty").mkdir()
    return snapshot(folder)


def config_of(output: Path, **settings: object) -> Config:
    changes = {"training.output": str(output), "data.files": ["text.txt"], **settings}
    return parse_config(yaml.safe_load(yaml.safe_dump(with_settings(tiny_training(2, 1), changes))))


def put_link(folder: Path, name: str, target: Path) -> None:
    link = folder / name
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.symlink_to(target)


def run_folder_of_a_stranger(folder: Path) -> None:
    """Makes a folder in which a run seems to have ended without a word, with a list of its files."""
    (folder / "slipstream-run").mkdir(parents=True)
    listed = ["config.yaml", "metrics.jsonl", "inputs/", "model/", "checkpoints/", "tensorboard/", "failures.jsonl"]
    files = json.dumps({"files": [*listed, "listed/deeper/file"]})
    (folder / "slipstream-run" / "files.json").write_text(files)
    for step in (1, 2, 3):
        (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)


def do_all_that_changes_files(folder: Path) -> None:
    """Does what a run does to files, from its first look to its last word; what can't be done is left out."""
    run = RunFolder(folder)
    with FolderLock(folder, lambda _: None, pytest.fail, beat_seconds=1000):
        places = LocalPlaces(run, 4)
        places.lose([0, 1], "gone")
        places.forget()
        checkpoints = CheckpointFolder(run.checkpoints, keep=1, work=run.work)
        for act in (
            checkpoints.prepare,
            lambda: checkpoints.begin(1),
            lambda: checkpoints.commit(1),
            checkpoints.retire,
            lambda: FailureLog(run.failures).add(1, 0),
            run.listed.remove,
        ):
            with suppress(OSError):
                act()
        with run.replaced(run.config) as part:
            part.write_text("mine")


@pytest.mark.parametrize("kind", ["folder", "file"])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_behind_a_link_is_touched(tmp_path: Path, name: str, kind: str) -> None:
    before, folder = somebodys(tmp_path / "others"), tmp_path / "run"
    run_folder_of_a_stranger(folder)
    put_link(folder, name, tmp_path / "others" if kind == "folder" else tmp_path / "others" / "file")
    if NAMES[name]:
        with pytest.raises(SlipstreamError, match=f"{name} is a link, and nothing is moved, removed or written behind"):
            check_run_folder(config_of(folder, **{"training.overwrite": True}))
    with suppress(SlipstreamError):
        do_all_that_changes_files(folder)
    assert snapshot(tmp_path / "others") == before


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    run_folder_of_a_stranger(tmp_path / "run")
    check_run_folder(config_of(tmp_path / "run", **{"training.overwrite": True}))
    do_all_that_changes_files(tmp_path / "run")
    assert (tmp_path / "disk" / "config.yaml").read_text() == "mine"


def test_a_link_that_comes_between_a_look_and_the_change(tmp_path: Path) -> None:
    """A move that was about to happen ends in the folder that it had found, wherever that is by now."""
    for name in ("run/checkpoints/step-00000001", "others"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").touch()
    own = OwnFolder(tmp_path / "run")
    with own._parent(tmp_path / "run" / "checkpoints" / "step-00000001") as (folder, name):
        (tmp_path / "run" / "checkpoints").rename(tmp_path / "run" / "elsewhere")
        (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "others")
        shutil.rmtree(name, dir_fd=folder)
    assert os.listdir(tmp_path / "others") == ["file"]
    assert os.listdir(tmp_path / "run" / "elsewhere") == []
    for act in (own.remove, own.remove_empty, lambda path: own.open(path, "w"), lambda path: own.move(path, path)):
        with pytest.raises(OSError, match="checkpoints is a link, and nothing is moved"):
            act(tmp_path / "run" / "checkpoints" / "file")
        with pytest.raises(OSError, match="may lead out of"):
            act(tmp_path / "run" / ".." / "others" / "file")
    assert os.listdir(tmp_path / "others") == ["file"]


def test_the_page_of_a_run_is_not_written_behind_a_link(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    put_link(run.path, "run.html", tmp_path / "others")  # where nothing is yet
    with pytest.raises(SlipstreamError, match="is a link, and nothing is moved, removed or written behind one"):
        write_run_page(run.path)
    assert not (tmp_path / "others").exists()


def test_a_start_names_the_link(tmp_path: Path) -> None:
    before = somebodys(tmp_path / "others")
    run_folder_of_a_stranger(tmp_path / "run")
    put_link(tmp_path / "run", "slipstream-run/lost", tmp_path / "others")
    (tmp_path / "text.txt").write_text("text")
    settings = with_settings(tiny_training(2, 1), {"data.files": [str(tmp_path / "text.txt")]})
    refused = run_training(1, tmp_path / "run", settings, "--training.overwrite=true", "--pp=1", code=2)
    assert f"{tmp_path / 'run' / 'slipstream-run' / 'lost'} is a link" in refused.stderr
    assert snapshot(tmp_path / "others") == before
