"""Files of strangers and of faults: whatever is in them, an error says so in one line, soon, and shows no secret."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.checkpoint import DamagedError, Manifest
from slipstream.checkpoint.files import write_record
from slipstream.cluster_plans.described_model import DescribedModel
from slipstream.cost import load_cluster, load_profile
from slipstream.errors import SlipstreamError, printable
from slipstream.extras.run_page import write_run_page
from slipstream.model import load_config as load_model_config
from slipstream.timeline import load_trace
from slipstream.train.config import load_config
from slipstream.train.data.sources import find_bad_line
from slipstream.train.folder_lock import FolderLock
from slipstream.train.run_folder import ListedFiles, RunFolder, read_lines
from support.forked import slipstream_command
from support.run_folders import make_run

DEEP = 100_000 * "[" + 100_000 * "]"
NOT_SO_DEEP = 300 * "[" + 300 * "]"
LONG = 1_000_000 * "9"
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(10 * [f'*{before}'])}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize("suffix", [".yaml", ".toml"])
@pytest.mark.parametrize("value", [DEEP, NOT_SO_DEEP, LONG])
def test_a_configuration_that_nobody_can_read(tmp_path: Path, suffix: str, value: str) -> None:
    file = tmp_path / f"config{suffix}"
    file.write_text(f"data = {value}" if suffix == ".toml" else f"data: {value}")
    with pytest.raises(SlipstreamError) as raised:
        load_config(file)
    assert len(str(raised.value)) < 2000


def settings_of(model: Path) -> object:
    """The settings of a file that describes a model."""
    return DescribedModel(model).settings


def test_aliases_that_stand_for_gigabytes(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(LAUGHS)
    for read in (load_config, load_cluster, settings_of):
        with pytest.raises(SlipstreamError, match=r"aliases \(\*name\) stand for more than 1,000,000 values"):
            read(file)
    file.write_text("a: &a [*a]")
    with pytest.raises(SlipstreamError, match="is inside of what it stands for"):
        load_config(file)
    file.write_text("data: &few {files: [a.txt]}\nagain: *few\n")  # as anybody may write
    with pytest.raises(SlipstreamError, match="again"):
        load_config(file)


def test_a_pipe_to_which_nobody_writes(tmp_path: Path) -> None:
    for name in ("config.yaml", "cluster.yaml", "profile.json", "timeline.json"):
        os.mkfifo(tmp_path / name)
    readers: dict[str, Callable[[Any], object]] = {
        "config.yaml": load_config,
        "cluster.yaml": load_cluster,
        "profile.json": load_profile,
        "timeline.json": load_trace,
    }
    for name, read in readers.items():
        with pytest.raises(SlipstreamError, match="named pipe"):
            read(tmp_path / name)


@pytest.mark.parametrize("text", [DEEP, f'{{"files": {DEEP}}}', f'{{"key": {LONG}, "step": {LONG}}}'])
def test_files_of_a_run(tmp_path: Path, text: str) -> None:
    run = make_run(tmp_path / "run")
    folder = run.path / "slipstream-run"
    folder.mkdir(exist_ok=True)
    for name in ("files.json", "owner-0001.json"):
        (folder / name).write_text(text)
    for file in (run.metrics, run.failures):
        with file.open("a") as opened:
            opened.write(text + "\n")
    with pytest.raises(SlipstreamError, match=r"files\.json isn't a list of a run's files"):
        ListedFiles(run.path).has(run.metrics)
    damaged: list[Any] = []
    assert list(read_lines(run.metrics, damaged))
    assert len(damaged) == 1
    FolderLock(run.path, lambda _: None).seems_held()
    run.config.write_text(f"data: {DEEP}")
    run.perfetto.write_text(text)
    assert "isn&#x27;t valid YAML" in write_run_page(run.path)[0].read_text()


def test_an_owner_that_is_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "slipstream-run").mkdir()
    os.mkfifo(tmp_path / "slipstream-run" / "owner-0001.json")
    said: list[str] = []
    with FolderLock(tmp_path, said.append, pytest.fail, beat_seconds=0.05, stale_seconds=0.2):
        assert "took over" in said[-1]


@pytest.mark.parametrize("value", [DEEP, LONG])
def test_a_row_of_data(tmp_path: Path, value: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"text": "a"}}\n{{"text": {value}}}\n')
    assert "line 2 isn't JSON" in find_bad_line([file])


@pytest.mark.parametrize("text", [DEEP, LONG, f'{{"format": {DEEP}}}'])
@pytest.mark.parametrize("read", [load_cluster, load_profile, load_trace, settings_of])
def test_descriptions_and_measurements(tmp_path: Path, read: Callable[[Path], object], text: str) -> None:
    file = tmp_path / "file.json"
    file.write_text(text)
    with pytest.raises(SlipstreamError) as raised:
        read(file)
    assert len(str(raised.value)) < 2000


@pytest.mark.parametrize("text", [DEEP, "[1]", "1", f'{{"model_type": "llama", "a": {DEEP}}}', f'{{"a": {LONG}}}'])
def test_a_models_configuration(tmp_path: Path, text: str) -> None:
    """Which transformers reads."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SlipstreamError) as raised:
        load_model_config(str(tmp_path))
    assert len(str(raised.value)) < 2000


TENSOR = {"dtype": "float32", "shape": [2**60], "boxes": [["rank-00000.safetensors", [[0], [2**60]]]]}
MANIFESTS = {
    "a NUL in a name": {"files": {"rank\0.safetensors": [4, "00000000"]}, "tensors": {}},
    "a name that is no text": {"files": {"rank\ud800": [4, "00000000"]}, "tensors": {}},
    "a name without a name": {"files": {"..": [4, "00000000"]}, "tensors": {}},
    "a large shape": {"files": {"rank-00000.safetensors": [4, "00000000"]}, "tensors": {"model.a": TENSOR}},
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_whose_checksum_is_right(tmp_path: Path, case: str) -> None:
    write_record(tmp_path / "manifest.json", {"format": 1, "step": 3, "facts": {}, **MANIFESTS[case]})
    with pytest.raises(DamagedError, match=r"files outside the checkpoint|which is smaller"):
        Manifest.read(tmp_path)
    text = DEEP.encode()
    body = b'"format": 1, "facts": ' + text + b"}"
    (tmp_path / "manifest.json").write_bytes(f'{{"crc32": "{zlib.crc32(body):08x}", '.encode() + body)
    with pytest.raises(DamagedError, match="isn't a JSON object"):
        Manifest.read(tmp_path)


SHOWN = {
    "s3://me:secret@host/data": "s3://me:***@host/data",
    "https:/me:secret@host": "https:/me:***@host",  # a path has one slash
    "http://host:80/a@b": "http://host:80/a@b",
    "C:\\a, me@host: 3 x/y": "C:\\a, me@host: 3 x/y",
    "\x1b]0;title\x07\x9b31m": "\\x1b]0;title\\x07\\x9b31m",
    "two\nlines\tand é": "two\nlines\tand é",
}


@pytest.mark.parametrize("text", SHOWN)
def test_what_is_shown_steers_no_terminal_and_has_no_password(text: str) -> None:
    assert printable(text) == str(SlipstreamError(text)) == SHOWN[text]


def test_the_command_line_shows_no_such_thing(tmp_path: Path) -> None:
    """A key of a configuration, the host of a run's owner, and an address with a password."""
    config = tmp_path / "config.yaml"
    config.write_text('"\\e[2Jkey": 1\nmodel: {path: "https://me:secret@host/model"}\ndata: {files: [a.txt]}\n')
    refused = slipstream_command("train", config)
    assert refused.returncode == 2
    for text in (refused.stdout, refused.stderr):
        assert "\x1b" not in text
        assert "secret" not in text
    run = RunFolder(tmp_path / "run")
    with FolderLock(run.path, print) as lock:
        (file,) = (run.path / "slipstream-run").glob("owner-*.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | {"host": "a\x1b[2Jb"}))
        assert "\x1b" not in str(lock._newest()[1])
