"""One save of one rank, in a thread: the tensors as they were at one moment, laid out as a safetensors file.

rank 0   writes its file |  manifest, rename, retention
rank 1   writes its file |
                         ^ sizes, checksums and boxes go to rank 0
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.checkpoint.files import FileDigest, describe_non_finite, is_finite, write_file
from slipstream.checkpoint.folder import CheckpointFolder, improvements_of, newest_saved
from slipstream.checkpoint.manifest import (
    Box,
    Manifest,
    StoredBox,
    StoredTensor,
    TensorShard,
    WrittenFile,
    dtype_name,
    entry_name,
)
from slipstream.errors import NonFiniteError, SlipstreamError
from slipstream.model import torch_dtype
from slipstream.number_format import FORMATS
from slipstream.parallel import RankGroup

_POLL_SECONDS = 0.05
_SECONDS_TO_SAY = 60.0  # seconds of a save before it is reported
_SECONDS_TO_APPEAR = 120.0  # time for another rank's file to appear on a network's disk


class BackgroundSave:
    """A running save, which begins when the object is made. Its ranks communicate over `group`, which nothing else may
    use meanwhile."""

    def __init__(
        self, folder: CheckpointFolder, step: int, facts: Mapping[str, Any], snapshot: Snapshot, group: RankGroup
    ) -> None:
        self.step = step
        self.seconds = 0.0
        self.num_bytes = 0
        self._problem: str | NonFiniteError = ""
        self._began = time.monotonic()
        self._doing = "is being written by this rank"
        self._folder = folder
        self._facts = facts
        self._snapshot = snapshot
        self._group = group
        self._device = _current_gpu()  # this thread's GPU only
        # A daemon, so that a run that fails can end although this waits for a rank that is gone.
        self._thread = threading.Thread(target=self._run, name=f"checkpoint of step {step}", daemon=True)
        self._thread.start()

    def finish(self) -> str | NonFiniteError:
        """Waits for the end; returns a warning, or "", or the error that a tensor isn't finite. Only rank 0 knows
        whether all is well."""
        while self._thread.is_alive():
            self._thread.join(_SECONDS_TO_SAY)
            if self._thread.is_alive():
                sys.stderr.write(
                    f"rank {self._group.rank} on {socket.gethostname()} waits for the disk: the checkpoint of step "
                    f"{self.step}, begun {time.monotonic() - self._began:.0f} s ago, {self._doing}\n"
                )
        return self._problem

    def _run(self) -> None:
        rank = self._group.rank
        began = time.perf_counter()
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
        """Writes this rank's file, if there is anything to write; returns its list of tensors, or the problem."""
        part = self._folder.part(self.step)
        try:
            # Rank 0 has made the folder, but a network's disk may not show it yet.
            self._folder.make_part(self.step)
            return self._snapshot.write(part)
        except NonFiniteError as error:
            return error
        # All ranks get to know of any failure.
        except Exception as error:
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
        # Raises FileNotFoundError if the folder has gone.
        path.parent.stat()
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{path} was written by its rank but hasn't appeared for rank 0 within {_SECONDS_TO_APPEAR:.0f} s; the "
                "folder must be on a disk that all ranks share"
            )
        time.sleep(_POLL_SECONDS)


def describe_error(error: BaseException) -> str:
    """Returns the message, with the type where that isn't of the system."""
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


# The names of dtypes in the format: https://github.com/huggingface/safetensors#format
_FLOATS = {torch_dtype(each.name): each.code for each in FORMATS.values()}
_INTEGERS = {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}
_CODES = {**_FLOATS, **_INTEGERS, torch.bool: "BOOL"}
# A block is written and added to the checksum while it is in the processor's cache.
_BLOCK = 2**23


class SnapshotEntry(NamedTuple):
    """A box that this rank writes, of the tensor `key` of shape `shape`."""

    key: str
    shape: tuple[int, ...]
    box: Box
    view: Tensor
    version: int  # version of the tensor at the time of the snapshot
    start: int  # offset in the bytes of all entries

    @property
    def end(self) -> int:
        return self.start + self.view.nbytes

    def stored_in(self, file: str) -> StoredTensor:
        """Returns its entry in a manifest."""
        return StoredTensor(dtype=dtype_name(self.view), shape=self.shape, boxes=(StoredBox(file, self.box),))


class Snapshot:
    """The shards that `take` was given, until `write` has written them or `keep` has copied the rest.

    Contiguous tensors of the CPU are read in place: nothing changes them until the optimizer's next update, which is
    most of the time. Others are copied when the snapshot is taken. The memory of the copies is reused from save to
    save: it is paged in (and pinned, for tensors of a GPU) once.

    +--------+---------------------------+-----------+----+
    | header | float64 boxes             | float32   | …  |     no gaps; each box aligned to its elements
    +--------+---------------------------+-----------+----+
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._entries: list[SnapshotEntry] = []
        self._num_written = 0  # number of entries written
        self._is_copied = False  # True once everything unwritten has been copied
        self._lock = threading.Lock()  # held by the writing thread while it reads a block
        self._header = b""
        self._file = ""

    def take(self, shards: Sequence[TensorShard], file: str) -> None:
        """Takes the shards that are to be written to `file`. Call `keep` before any of them changes.

        Raises:
            SlipstreamError: for a dtype that can't be saved.
            ValueError: if two shards have the same elements.
        """
        self._file = file
        boxes = [(shard, box, view.contiguous()) for shard in shards if shard.writes for box, view in shard.boxes()]
        boxes.sort(key=lambda box: -box[2].itemsize)
        starts = accumulate((view.nbytes for _, _, view in boxes), initial=0)
        entries = [
            SnapshotEntry(shard.key, shard.share.shape, box, view, view._version, start)
            for (shard, box, view), start in zip(boxes, starts, strict=False)
        ]
        self._header = _header(entries)
        self._entries = entries
        self._num_written = 0
        self._is_copied = False
        if any(entry.view.is_cuda for entry in entries):
            self.keep()

    def keep(self) -> None:
        """Copies the tensors that aren't written yet; when it returns, all tensors may change."""
        with self._lock:
            if self._is_copied or self._num_written == len(self._entries):
                return
            size = self._entries[-1].end
            if size > len(self._memory):
                pinned = any(entry.view.is_cuda for entry in self._entries)
                self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            for entry in self._entries[self._num_written :]:
                memory = self._memory[entry.start : entry.end]
                memory.view(entry.view.dtype).view(entry.view.shape).copy_(entry.view, non_blocking=True)
            for device in {entry.view.device for entry in self._entries if entry.view.is_cuda}:
                torch.cuda.synchronize(device)
            self._is_copied = True

    def write(self, folder: Path) -> WrittenFile | None:
        """Writes the file, which is on the disk when this returns; None, and no file, where there is nothing to write.

        Raises:
            NonFiniteError: if a tensor isn't finite.
            RuntimeError: if a tensor was changed without `keep`.
        """
        if not self._entries:
            return None
        with closing(self._blocks()) as blocks:  # releases the lock where writing fails
            digest = write_file(folder / self._file, blocks)
        return WrittenFile(self._file, digest, [(entry.key, entry.stored_in(self._file)) for entry in self._entries])

    def _blocks(self) -> Generator[bytes | memoryview]:
        yield self._header
        for entry in self._entries:
            for start in range(0, entry.view.nbytes, _BLOCK):
                with self._lock:
                    live = entry.view.view(-1).view(torch.uint8)
                    elements = self._memory[entry.start : entry.end] if self._is_copied else live
                    block = elements[start : start + _BLOCK]
                    if not is_finite(block.view(entry.view.dtype)):
                        raise NonFiniteError(describe_non_finite(entry.key))
                    yield block.numpy().data
                    if not self._is_copied and entry.view._version != entry.version:
                        raise RuntimeError(f"{entry.key} was changed before it was kept")
            self._num_written += 1


def _header(entries: Sequence[SnapshotEntry]) -> bytes:
    """Returns the length of the rest (8 bytes, little-endian), then JSON, padded so that the elements are aligned."""
    table: dict[str, object] = {}
    for entry in entries:
        name = entry_name(entry.key, entry.box.offsets)
        dtype = entry.view.dtype
        if name in table:
            raise ValueError(f"two shards of this rank have the same elements {name}")
        if dtype not in _CODES:
            raise SlipstreamError(f"{entry.key} is of {dtype}, which checkpoints can't hold; use a real dtype")
        table[name] = {"dtype": _CODES[dtype], "shape": entry.box.sizes, "data_offsets": [entry.start, entry.end]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
