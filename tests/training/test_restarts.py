"""A run that crashes is started again, until one step has failed twice or often enough."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from slipstream.errors import RankFailedError
from slipstream.launch import Progress
from slipstream.train import start_training
from slipstream.train.run_folder import RunFolder


@pytest.mark.parametrize(
    ("last_steps", "max_restarts", "num_starts", "reason"),
    [
        ([4, 4], 5, 2, "step 5 has failed twice"),
        ([4, None, 4], 5, 3, "step 5 has failed twice"),  # None: before the first step, which says nothing about it
        ([4, 6, 8], 2, 3, "crash 3"),
        ([4], 0, 1, "crash 1"),
        ([4, 9, "ends"], 2, 3, None),
    ],
)
def test_when_it_gives_up(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    last_steps: Sequence[object],
    max_restarts: int,
    num_starts: int,
    reason: str | None,
) -> None:
    folder, commands = RunFolder(tmp_path), list[list[str]]()

    def crash(_module: str, arguments: list[str], _num_ranks: int, _server: None) -> None:
        last = last_steps[len(commands)]
        commands.append(arguments)
        if last == "ends":
            return
        if last is not None:
            lines = "".join(f'{{"step": {step}}}\n' for step in range(1, int(str(last)) + 1))
            folder.metrics.write_text(f'{{"start": {len(commands)}}}\n{lines}{{"step": 99')
        raise RankFailedError(f"crash {len(commands)}")

    monkeypatch.setattr(start_training, "launch_ranks", crash)
    monkeypatch.setattr(start_training, "_LONGEST_WAIT", 0.0)
    if reason is None:
        start_training.launch_with_restarts(folder, "owner", 2, max_restarts, Progress(None), None)
    else:
        with pytest.raises(RankFailedError, match=reason):
            start_training.launch_with_restarts(folder, "owner", 2, max_restarts, Progress(None), None)
    assert len(commands) == num_starts
    assert ["--checkpoint.resume=last-good" in command for command in commands] == [False, *[True] * (num_starts - 1)]
