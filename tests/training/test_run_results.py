"""An export that ends half-way leaves nothing that the next run would take for somebody else's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.train import run_results
from slipstream.train.folder_lock import FolderLock
from slipstream.train.run_folder import RunFolder


class Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


class KilledError(BaseException):
    pass


def write_export(run: RunFolder, text: str) -> None:
    """What `export` does on the leader, where the pipeline writes one file."""
    part, before = run.work / "model.part", run.work / "model.before.part"
    run_results._clear(part, before)
    part.mkdir()
    (part / "config.json").write_text(text)
    run_results._complete(run, part, before, run.model, trusts_code=False)


@pytest.mark.parametrize("moment", ["load_tokenizer", "shutil.rmtree"])
def test_wherever_it_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    monkeypatch.setattr(run_results, "load_tokenizer", lambda *_: Tokenizer())
    run, lock = RunFolder(tmp_path), FolderLock(tmp_path, pytest.fail)
    lock.take()
    run.inputs.mkdir(parents=True)  # where the tokenizer is
    write_export(run, "first")
    assert run.listed.is_itemised(run.model)

    def kill(*given: Any, **_: Any) -> None:
        if moment == "load_tokenizer" or (run.model.exists() and Path(given[0]).exists()):
            raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(f"slipstream.train.run_results.{moment}", kill)
        with pytest.raises(KilledError):
            write_export(run, "second")
    assert (run.model / "config.json").read_text() in ("first", "second")
    lock.release()
    assert run.find_unlisted(adopts_checkpoints=False) is None
    with FolderLock(tmp_path, pytest.fail):
        write_export(run, "third")
    assert (run.model / "config.json").read_text() == "third"
    assert run.exports() == [run.model]
    assert run.listed.is_itemised(run.model)
