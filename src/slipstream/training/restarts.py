"""Starts the local ranks of a run again after a crash, from the last good checkpoint."""

from __future__ import annotations

import json
import time
from pathlib import Path

from slipstream.errors import RankFailedError
from slipstream.launch import ForkServer, Progress, launch_ranks
from slipstream.training.run_folder import RunFolder

_RANK = "slipstream.training.training_rank"
_LONGEST_WAIT = 60.0  # seconds between a crash and the next start


def launch_with_restarts(
    folder: RunFolder, owner: str, num_ranks: int, max_restarts: int, progress: Progress, server: ForkServer | None
) -> None:
    """Runs the ranks of the folder's `owner`, at most `max_restarts` times again after one has crashed, with a wait
    that doubles while the run gets no further.

    Raises:
        RankFailedError: if a step has failed twice, or a rank has crashed once more than it is started again.
        SlipstreamError, NonFiniteError, StoppedRunError: of a rank; another start would end likewise.
    """
    arguments, failed_step = [str(folder.config), owner], None
    without_progress = 0
    for restart in range(1, max_restarts + 2):
        before = _contents(folder.metrics)
        try:
            launch_ranks(_RANK, arguments, num_ranks, server)
            return
        except RankFailedError as error:
            after = _contents(folder.metrics)
            step = None if after == before else _last_step(after) + 1  # None: it failed before the first step
            if restart > max_restarts:
                raise
            if step is not None and step == failed_step:
                raise RankFailedError(
                    f"{error}; step {step} has failed twice, so the run is not started again"
                ) from None
            without_progress = 0 if step is not None and step > (failed_step or 0) else without_progress + 1
            failed_step, wait = step or failed_step, min(_LONGEST_WAIT, 2.0**without_progress)
            progress.warn(
                f"{error}\nrestart {restart} of {max_restarts} in {wait:.0f} s, from the last good checkpoint"
            )
            time.sleep(wait)
            arguments = [str(folder.config), owner, "--checkpoint.resume=last-good"]


def _contents(metrics: Path) -> bytes:
    return metrics.read_bytes() if metrics.exists() else b""


def _last_step(metrics: bytes) -> int:
    """Returns the last step of a metrics file, 0 before the first; its last line may be cut off."""
    lines = [line for line in metrics.splitlines(keepends=True) if line.endswith(b"}\n")]
    return max((int(json.loads(line).get("step", 0)) for line in lines), default=0)
