"""Only what a run has listed is ever removed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.errors import SlipstreamError
from slipstream.train.run_folder import ListedFiles


def test_what_is_listed_is_removed_and_nothing_else(tmp_path: Path) -> None:
    listed = ListedFiles(tmp_path)
    for name in ("config.yaml", "inputs/deep/tokens", "model/config.json", "model/.hidden", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    listed.add(tmp_path / "config.yaml")
    listed.add_folder(tmp_path / "inputs")
    listed.add_folder(tmp_path / "model")
    assert listed.find_unlisted(tmp_path / "model") is None
    listed.itemise(tmp_path / "model")
    (tmp_path / "model" / "own.gguf").touch()  # somebody puts it there
    assert listed.find_unlisted(tmp_path / "model") == tmp_path / "model" / "own.gguf"
    assert listed.find_unlisted(tmp_path / "notes.txt") == tmp_path / "notes.txt"
    assert listed.find_unlisted(tmp_path / "inputs") is None
    assert listed.find_unlisted(tmp_path / "nowhere") is None
    listed.remove()
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"notes.txt", "model/own.gguf", "slipstream-run/files.json"}
    assert not (tmp_path / "inputs").exists()
    assert not listed.has(tmp_path / "config.yaml")


@pytest.mark.parametrize("text", ['{"files": ["../mine"]}', '{"files": ["/mine"]}', "{}", "", '{"files": [1]}'])
def test_a_list_that_leads_elsewhere_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "slipstream-run").mkdir()
    (tmp_path / "slipstream-run" / "files.json").write_text(text)
    with pytest.raises(SlipstreamError, match=r"files\.json isn't a list of a run's files"):
        ListedFiles(tmp_path).remove()


def test_a_link_is_removed_and_not_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "far" / "kept").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "inputs").symlink_to(tmp_path / "far")
    listed = ListedFiles(tmp_path / "run")
    listed.add_folder(tmp_path / "run" / "inputs")
    listed.remove()
    assert (tmp_path / "far" / "kept").exists()
    assert not (tmp_path / "run" / "inputs").is_symlink()
    assert json.loads((tmp_path / "run" / "slipstream-run" / "files.json").read_text()) == {"files": []}
