"""One save of one rank, in a thread, by `torch.distributed.checkpoint`."""

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
    """A save that begins when it is made. Its ranks communicate over `group`, which nothing else may use meanwhile."""

    def __init__(self, writer: SnapshotWriter, snapshot: Snapshot, group: RankGroup) -> None:
        self._writer, self._snapshot, self._group = writer, snapshot, group
        self.step, self._problem = writer.step, ""
        # A daemon, so that a run that fails can end although this waits for a rank that is gone.
        self._thread = threading.Thread(target=self._run, name=f"checkpoint of step {self.step}", daemon=True)
        self._thread.start()

    def finish(self) -> str:
        """Waits for the end; returns a warning or "". Only rank 0 knows what wasn't retired."""
        self._thread.join()
        if self._problem:
            return f"the checkpoint of step {self.step} was not saved: {self._problem}"
        if left := self._writer.not_retired:
            return f"the checkpoint of step {self.step} is saved, but no older one was removed: {left}"
        return ""

    def _run(self) -> None:
        try:
            ignore_lone_process_warning()
            save(
                self._snapshot.state(),
                storage_writer=self._writer,
                planner=BoxSavePlanner(),
                process_group=self._group.process_group,
                no_dist=self._group.size == 1,
            )
        except CheckpointException as error:  # some ranks failed, and all get to know
            self._problem = describe_failures(error)
        except Exception as error:  # `finish` returns it: training continues without this checkpoint
            self._problem = _describe(error)


def describe_failures(error: CheckpointException) -> str:
    """Returns which ranks failed, and why."""
    return "; ".join(f"rank {rank}: {_describe(cause)}" for rank, (cause, _) in sorted(error.failures.items()))


def ignore_lone_process_warning() -> None:
    """Silences PyTorch's warning about a process that saves or loads alone, for good: threads share their filters."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
