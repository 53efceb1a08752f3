"""One save of one rank, in the background, by `torch.distributed.checkpoint`."""

from __future__ import annotations

import threading
import warnings

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from slipstream.parallel import RankGroup
from slipstream.training.checkpoint.dcp_planners import BoxSavePlanner
from slipstream.training.checkpoint.dcp_storage import SnapshotWriter
from slipstream.training.checkpoint.snapshot import Snapshot


class BackgroundSave:
    """Begins at once. Its ranks talk over `group`, which nothing else uses meanwhile: training goes on beside it."""

    def __init__(self, writer: SnapshotWriter, snapshot: Snapshot, group: RankGroup) -> None:
        self._writer, self._snapshot, self._group = writer, snapshot, group
        self._problem = ""
        # A daemon, because a run that fails must end, though this waits for a rank that is no more.
        self._thread = threading.Thread(target=self._run, name=f"checkpoint of step {writer.step}", daemon=True)
        self._thread.start()

    @property
    def step(self) -> int:
        """Of training."""
        return self._writer.step

    def finish(self) -> str:
        """Waits for the end.  Returns a warning or ""; only rank 0 knows what wasn't retired."""
        self._thread.join()
        if self._problem:
            return f"the checkpoint of step {self.step} was not saved: {self._problem}"
        if left := self._writer.not_retired:
            return f"the checkpoint of step {self.step} is saved, but no older one was removed: {left}"
        return ""

    def _run(self) -> None:
        try:
            alone_is_fine()
            save(
                self._snapshot.state(),
                storage_writer=self._writer,
                planner=BoxSavePlanner(),
                process_group=self._group.process_group,
                no_dist=self._group.size == 1,
            )
        except CheckpointException as error:  # of some ranks, told to all
            self._problem = what_failed(error)
        except Exception as error:  # told by `finish`: training goes on without this checkpoint
            self._problem = _told(error)


def what_failed(error: CheckpointException) -> str:
    """On which ranks, and why."""
    return "; ".join(f"rank {rank}: {_told(cause)}" for rank, (cause, _) in sorted(error.failures.items()))


def alone_is_fine() -> None:
    """PyTorch warns of a process that saves or loads alone. Told once and for all, as threads share their filters."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
