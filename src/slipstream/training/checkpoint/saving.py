"""One save of one rank, in the background: its file, and on rank 0 the commit once every rank's is there.

        rank 0   snapshot | writes its file | waits for the others' parts | manifest, rename, retention
        rank 1   snapshot | writes its file and its part's record |
                          ^ training goes on

No rank sends another anything meanwhile: a part's record on the shared disk says that the part is there.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.training.checkpoint.files import read_record, write_record
from slipstream.training.checkpoint.folder import CheckpointFolder
from slipstream.training.checkpoint.manifest import Manifest, Part
from slipstream.training.checkpoint.snapshot import Snapshot

_POLL_SECONDS = 0.05
_SECONDS_TO_APPEAR = 120.0  # of a file that another rank has written, on a disk of the network


class Saving:
    """Begins at once; `written` and `finish` tell how it went. `retire` removes older checkpoints after the commit."""

    def __init__(
        self,
        folder: CheckpointFolder,
        step: int,
        facts: Mapping[str, Any],
        snapshot: Snapshot,
        rank: int,
        num_ranks: int,
        retire: Callable[[], None],
    ) -> None:
        self.step = step
        self._folder, self._facts, self._snapshot = folder, facts, snapshot
        self._rank, self._num_ranks, self._retire = rank, num_ranks, retire
        self._is_written, self._is_abandoned = threading.Event(), threading.Event()
        self._is_committed = False
        self._deadline = math.inf
        self._problem = ""
        # A daemon, because a run that fails must end, though rank 0 waits here for a rank that is no more.
        self._thread = threading.Thread(target=self._run, name=f"checkpoint of step {step}", daemon=True)
        self._thread.start()

    def written(self) -> str:
        """Waits until this rank's part is on the disk. Returns what prevented that, or ""."""
        self._is_written.wait()
        return self._problem

    def finish(self, problems: Sequence[str]) -> str:
        """On rank 0, when every rank has written or told its problem: waits for the commit. Returns a warning or ""."""
        if problems:
            self._is_abandoned.set()
        self._deadline = time.monotonic() + _SECONDS_TO_APPEAR
        self._thread.join()
        told = "; ".join(problems) or self._problem
        if self._is_committed:
            return f"the checkpoint of step {self.step} is saved, but no older one was removed: {told}" if told else ""
        return f"the checkpoint of step {self.step} was not saved: {told}"

    def _run(self) -> None:
        try:
            self._write()
            self._is_written.set()
            if self._rank == 0:
                self._commit()
        except Exception as error:  # told by `written` or `finish`: training goes on without this checkpoint
            self._problem = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        finally:
            self._is_written.set()

    def _write(self) -> None:
        part = self._folder.part(self.step)
        part.mkdir(parents=True, exist_ok=True)  # rank 0 has made it, but a network's disk may not show it yet
        write_record(self._record(self._rank), self._snapshot.write(part).model_dump())

    def _commit(self) -> None:
        records = [self._record(rank) for rank in range(self._num_ranks)]
        if not self._all_appear(records):
            return
        parts = [Part.model_validate(read_record(record)) for record in records]
        Manifest.of(self.step, self._facts, parts).write(self._folder.part(self.step))
        for record in records:
            record.unlink()
        self._folder.commit(self.step)
        self._is_committed = True
        self._retire()

    def _all_appear(self, records: Sequence[Path]) -> bool:
        """Whether they did before another rank failed."""
        while missing := [record for record in records if not record.exists()]:
            if self._is_abandoned.wait(_POLL_SECONDS):
                return False
            if time.monotonic() > self._deadline:
                raise TimeoutError(
                    f"{missing[0]} was written by its rank but hasn't appeared for rank 0 within "
                    f"{_SECONDS_TO_APPEAR:.0f} s; the folder must be on a disk that all ranks share"
                )
        return True

    def _record(self, rank: int) -> Path:
        return self._folder.part(self.step) / f"{rank_name(rank)}.json"


def rank_name(rank: int) -> str:
    """The stem of a rank's files."""
    return f"rank-{rank:05d}"
