"""One save of one rank, in a thread.

rank 0   writes its file |  manifest, rename, retention
rank 1   writes its file |
                         ^ sizes, checksums and boxes go to rank 0
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream.checkpoint.best_checkpoint import improvements_of, newest_saved
from slipstream.checkpoint.checkpoint_folder import CheckpointFolder
from slipstream.checkpoint.manifest import Manifest, WrittenFile
from slipstream.checkpoint.snapshot import Snapshot
from slipstream.checkpoint.verified_files import FileDigest
from slipstream.errors import NonFiniteError
from slipstream.parallel import RankGroup

_POLL_SECONDS = 0.05
_SECONDS_TO_SAY = 60.0  # that a save takes
_SECONDS_TO_APPEAR = 120.0  # for a file that another rank has written, on a network's disk


class BackgroundSave:
    """A save that begins when it is made. Its ranks communicate over `group`, which nothing else may use meanwhile."""

    def __init__(
        self, folder: CheckpointFolder, step: int, facts: Mapping[str, Any], snapshot: Snapshot, group: RankGroup
    ) -> None:
        self.step, self.seconds, self.num_bytes = step, 0.0, 0
        self._problem: str | NonFiniteError = ""
        self._began, self._doing = time.monotonic(), "is being written by this rank"
        self._folder, self._facts, self._snapshot, self._group = folder, facts, snapshot, group
        self._device = _current_gpu()  # of this thread alone
        # A daemon, so that a run that fails can end although this waits for a rank that is gone.
        self._thread = threading.Thread(target=self._run, name=f"checkpoint of step {step}", daemon=True)
        self._thread.start()

    def finish(self) -> str | NonFiniteError:
        """Waits for the end; returns a warning, or "", or the error of what isn't finite. Only rank 0 knows whether all
        is well."""
        while self._thread.is_alive():
            self._thread.join(_SECONDS_TO_SAY)
            if self._thread.is_alive():
                sys.stderr.write(
                    f"rank {self._group.rank} on {socket.gethostname()} waits for the disk: the checkpoint of step "
                    f"{self.step}, begun {time.monotonic() - self._began:.0f} s ago, {self._doing}\n"
                )
        return self._problem

    def _run(self) -> None:
        rank, began = self._group.rank, time.perf_counter()
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            mine = self._write()
            self._doing = "is written by this rank; others still write"
            written = self._group.gather(mine)
            self._doing = "is written, and gets its name"
            problems = {at: result for at, result in enumerate(written) if isinstance(result, str | NonFiniteError)}
            if problems:
                texts = "; ".join(f"rank {at}: {result}" for at, result in problems.items())
                text = f"the checkpoint of step {self.step} was not saved: {texts}"
                is_poisoned = any(isinstance(result, NonFiniteError) for result in problems.values())
                self._problem = NonFiniteError(text) if is_poisoned else text
            elif rank == 0:
                self._commit([file for file in written if isinstance(file, WrittenFile)])
            self.seconds = time.perf_counter() - began
        except Exception as error:  # `finish` returns it: training continues without this checkpoint
            self._problem = f"the checkpoint of step {self.step} was not saved: rank {rank}: {describe_error(error)}"

    def _write(self) -> WrittenFile | NonFiniteError | str | None:
        """Writes this rank's file, if there is anything to write; returns what is in it, or what prevented that."""
        part = self._folder.part(self.step)
        try:
            self._folder.make_part(self.step)  # rank 0 has done it, but a network's disk may not show it yet
            return self._snapshot.write(part)
        except NonFiniteError as error:
            return error
        except Exception as error:  # all ranks get to know
            return describe_error(error)

    def _commit(self, written: Sequence[WrittenFile]) -> None:
        manifest = Manifest.of(self.step, self._facts, written)
        part = self._folder.part(self.step)
        for name, digest in manifest.files.items():
            _wait_for(part / name, digest)
        manifest.write(part)
        self.num_bytes = sum(file.stat().st_size for file in part.iterdir())
        self._folder.commit(self.step)
        try:
            best = newest_saved(self._folder, improvements_of(self._facts))
            self._folder.retire(None if best is None else best.step)
        except OSError as error:
            self._problem = f"the checkpoint of step {self.step} is saved, but no older one was removed: {error}"


def _current_gpu() -> int | None:
    """Returns the number of the GPU that this process uses; None where it uses none."""
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.current_device() if in_use else None


def _wait_for(path: Path, digest: FileDigest) -> None:
    """Waits until a file that a rank has written can be seen here."""
    deadline = time.monotonic() + _SECONDS_TO_APPEAR
    while not path.exists() or path.stat().st_size < digest.size:
        path.parent.stat()  # raises FileNotFoundError where the folder has gone
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{path} was written by its rank but hasn't appeared for rank 0 within {_SECONDS_TO_APPEAR:.0f} s; the "
                "folder must be on a disk that all ranks share"
            )
        time.sleep(_POLL_SECONDS)


def describe_error(error: BaseException) -> str:
    """Returns the message, with the type where that isn't of the system."""
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
