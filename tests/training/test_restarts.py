"""A run is started again as often as it may be, and its export is whole wherever it is killed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import RankFailedError
from slipstream.launch import Progress, RegroupedError
from slipstream.train import run_results, start_training
from slipstream.train.comparison import compare, steps_of
from slipstream.train.config import Config, parse_config
from slipstream.train.folder_lock import FolderLock
from slipstream.train.run_folder import RunFolder
from workers.training.lost_folder import Tokenizer, export


def config_of(output: Path, **settings: object) -> Config:
    values = {
        "model": {"config": {"model_type": "llama"}},
        "data": {"corpus": "python-stdlib", "vocab_size": 300},
        "parallel": {"data": 2},
        "training": {"output": str(output), "seq_len": 64, "batch_size": 4, "steps": 99, **settings},
    }
    return parse_config(values)


def launch(config: Config, reason: str, wait: Callable[[float], None]) -> None:
    """Starts a run as often as it may be; it ends by an error where there is a reason."""
    with pytest.raises(RankFailedError, match=reason) if reason else nullcontext():
        lock = FolderLock(config.training.output, pytest.fail)
        start_training.launch_with_restarts(config, lock, Progress(None), None, wait)


@pytest.mark.parametrize(
    ("last_steps", "max_restarts", "waits", "reason"),
    [
        ([4, 4], 5, [1], "step 5 has failed twice"),
        # None is a crash before the first step, which says nothing about a step.
        ([4, None, 4], 5, [1, 2], "step 5 has failed twice"),
        ([4, 6, 8], 2, [1, 1], "crash 3"),
        ([4], 0, [], "crash 1"),
        ([4, 9, "ends"], 2, [1, 1], ""),
    ],
)
def test_when_it_gives_up(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    last_steps: Sequence[object],
    max_restarts: int,
    waits: list[float],
    reason: str,
) -> None:
    config, commands, waited = config_of(tmp_path, max_restarts=max_restarts), list[list[str]](), list[float]()
    folder = config.folder

    def crash(_module: str, arguments: list[str], places: Sequence[int], *_: object) -> None:
        assert [*places] == [0, 1, 2, 3]
        last = last_steps[len(commands)]
        commands.append(arguments)
        if last == "ends":
            return
        if last is not None:
            lines = "".join(f'{{"step": {step}}}\n' for step in range(1, int(str(last)) + 1))
            folder.metrics.write_text(f'{{"start": {len(commands)}}}\n{lines}{{"step": 99')
        raise RankFailedError(f"crash {len(commands)}", lost=(1,))

    monkeypatch.setattr(start_training, "launch_ranks", crash)
    launch(config, reason, waited.append)
    assert waited == waits
    assert ["--checkpoint.resume=last-good" in command for command in commands] == [False, *[True] * len(waits)]
    assert not folder.lost.exists()


LOSSES: dict[str, tuple[list[object], list[list[int]], str]] = {
    # what becomes of each start: ranks that are lost, files that somebody removes meanwhile, or nothing
    "one, and it is back": ([(1,), "rm 1", None], [[0, 1, 2, 3], [0, 2], [0, 1, 2, 3]], ""),
    "one after the other": ([(1,), (1,), None], [[0, 1, 2, 3], [0, 2], [0, 3]], ""),
    "two at once": ([(0, 3), None], [[0, 1, 2, 3], [1, 2]], ""),
    "a crash of another kind": ([(), (2,), None], [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1]], ""),
    "too many": ([(0, 1, 2)], [[0, 1, 2, 3]], "1 of 4 processes is left, fewer than training.min_ranks=2"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_it_goes_on_with_those_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    fates, wanted, reason = LOSSES[case]
    config, used, settings = config_of(tmp_path, min_ranks=2, max_restarts=1), list[list[int]](), list[list[str]]()

    def meet(
        _module: str, arguments: list[str], places: Sequence[int], _server: None, regroups: Callable[[], bool]
    ) -> None:
        fate = fates[len(used)]
        used.append([*places])
        settings.append([each for each in arguments if each.startswith("--dp")])
        assert not regroups()
        if isinstance(fate, tuple):
            config.folder.metrics.write_text(f'{{"step": {len(used)}}}\n')
            raise RankFailedError(f"crash {len(used)}", lost=fate)
        if isinstance(fate, str):
            (config.folder.lost / fate.split()[1]).unlink()
            assert regroups()
            raise RegroupedError

    monkeypatch.setattr(start_training, "launch_ranks", meet)
    launch(config, reason, lambda _: None)
    assert used == wanted
    assert settings == [[] if len(places) == 4 else ["--dp=1"] for places in used]
    assert config.folder.lost.exists() == bool(reason)


class KilledError(BaseException):
    pass


@pytest.mark.parametrize("moment", ["train.run_results.load_tokenizer", "own_files.OwnFolder.remove"])
def test_wherever_it_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    monkeypatch.setattr(run_results, "load_tokenizer", lambda *_: Tokenizer())
    run, lock = RunFolder(tmp_path), FolderLock(tmp_path, pytest.fail)
    lock.take()
    run.inputs.mkdir(parents=True)  # where the tokenizer is
    export(run, "first")
    assert run.listed.is_itemised(run.model)

    def kill(*given: Any, **_: Any) -> None:
        if moment.endswith("load_tokenizer") or (run.model.exists() and given[1].exists()):
            raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(f"slipstream.{moment}", kill)
        with pytest.raises(KilledError):
            export(run, "second")
    assert (run.model / "config.json").read_text() in ("first", "second")
    lock.release()
    assert run.find_unlisted(adopts_checkpoints=False) is None
    with FolderLock(tmp_path, pytest.fail):
        export(run, "third")
    assert (run.model / "config.json").read_text() == "third"
    assert run.exports() == [run.model]
    assert run.listed.is_itemised(run.model)


def start(num_ranks: int, seconds: float, num_steps: int = 5) -> str:
    step = {"step_seconds": seconds, "peak_memory": [1] * num_ranks}
    lines = [{"num_parameters": 7}, *[step] * num_steps, {"validation_loss": 1.0}]
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_a_run_that_was_gone_on_with_counts_its_own_steps_only(tmp_path: Path) -> None:
    output = RunFolder(tmp_path)
    output.metrics.write_text(start(4, 3.0) + start(2, 0.5))
    output.comparison.write_text(json.dumps({"unsliced": 0.75, "sliced": 1.0}))
    assert compare(output) == (
        "2 ranks: 500 ms per step; one process: unsliced 750 ms, sliced 1.00 s\n"
        "1.50x the best single process (unsliced)"
    )
    assert json.loads(output.comparison.read_text())["num_ranks"] == 2


def test_steps_in_which_auto_tried_count_where_there_are_no_others(tmp_path: Path) -> None:
    output = RunFolder(tmp_path)
    trials = [{"step_seconds": 9.0, "peak_memory": [1], "trial": True}] * 3
    begin = "".join(json.dumps(line) + "\n" for line in [{"num_parameters": 7}, *trials])
    output.metrics.write_text(begin)
    assert steps_of(output) == trials
    output.metrics.write_text(begin + json.dumps({"step_seconds": 0.5, "peak_memory": [1]}) + "\n")
    assert [step["step_seconds"] for step in steps_of(output)] == [0.5]


def test_a_run_that_had_come_to_its_end_has_no_steps(tmp_path: Path) -> None:
    output = RunFolder(tmp_path)
    output.metrics.write_text(start(2, 0.5) + start(2, 0.0, num_steps=0))
    assert steps_of(output) == []
