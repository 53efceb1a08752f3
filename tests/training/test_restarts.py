"""A run that crashes is started again, until one step has failed twice or often enough; with fewer ranks where some are
lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from slipstream.errors import RankFailedError
from slipstream.launch import Progress, RegroupedError
from slipstream.train import start_training
from slipstream.train.config import Config, parse_config


def config_of(output: Path, **settings: object) -> Config:
    values = {
        "model": {"config": {"model_type": "llama"}},
        "data": {"corpus": "python-stdlib", "vocab_size": 300},
        "parallel": {"data": 2},
        "training": {"output": str(output), "seq_len": 64, "batch_size": 4, "steps": 99, **settings},
    }
    return parse_config(values)


@pytest.mark.parametrize(
    ("last_steps", "max_restarts", "waits", "reason"),
    [
        ([4, 4], 5, [1], "step 5 has failed twice"),
        # None is a crash before the first step, which says nothing about a step.
        ([4, None, 4], 5, [1, 2], "step 5 has failed twice"),
        ([4, 6, 8], 2, [1, 1], "crash 3"),
        ([4], 0, [], "crash 1"),
        ([4, 9, "ends"], 2, [1, 1], None),
    ],
)
def test_when_it_gives_up(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    last_steps: Sequence[object],
    max_restarts: int,
    waits: list[float],
    reason: str | None,
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
    if reason is None:
        start_training.launch_with_restarts(config, "owner", Progress(None), None, waited.append)
    else:
        with pytest.raises(RankFailedError, match=reason):
            start_training.launch_with_restarts(config, "owner", Progress(None), None, waited.append)
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
    if reason:
        with pytest.raises(RankFailedError, match=reason):
            start_training.launch_with_restarts(config, "owner", Progress(None), None, lambda seconds: None)
    else:
        start_training.launch_with_restarts(config, "owner", Progress(None), None, lambda seconds: None)
    assert used == wanted
    assert settings == [[] if len(places) == 4 else ["--dp=1"] for places in used]
    assert config.folder.lost.exists() == bool(reason)
