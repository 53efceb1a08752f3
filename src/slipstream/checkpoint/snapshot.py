"""The tensors of a rank as they were at one moment, laid out as a safetensors file."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.checkpoint.finite import describe_non_finite, is_finite
from slipstream.checkpoint.manifest import StoredBox, StoredTensor, WrittenFile, entry_name
from slipstream.checkpoint.tensor_shard import Box, TensorShard, dtype_name
from slipstream.checkpoint.verified_files import write_file
from slipstream.errors import NonFiniteError, SlipstreamError

# The names of dtypes in the format: https://github.com/huggingface/safetensors#format
_FLOATS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_INTEGERS = {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}
_CODES = {**_FLOATS, **_INTEGERS, torch.bool: "BOOL"}
_BLOCK = 2**23  # bytes that are written and added to the checksum at a time, while they are in the processor's cache


class SnapshotEntry(NamedTuple):
    """A box that this rank writes, of the tensor `key` of shape `shape`."""

    key: str
    shape: tuple[int, ...]
    box: Box
    view: Tensor
    version: int  # of the tensor when the snapshot was taken
    start: int  # in the bytes of all entries

    @property
    def end(self) -> int:
        return self.start + self.view.nbytes

    def stored_in(self, file: str) -> StoredTensor:
        """Returns what a manifest says of it."""
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
        self._num_written = 0  # of the entries
        self._is_copied = False  # whether all that isn't written has been copied
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
        boxes.sort(key=lambda each: -each[2].itemsize)
        starts = accumulate((view.nbytes for _, _, view in boxes), initial=0)
        entries = [
            SnapshotEntry(shard.key, shard.share.shape, box, view, view._version, start)
            for (shard, box, view), start in zip(boxes, starts, strict=False)
        ]
        self._header = _header(entries)
        self._entries, self._num_written, self._is_copied = entries, 0, False
        if any(entry.view.is_cuda for entry in entries):
            self.keep()

    def keep(self) -> None:
        """Copies what isn't written yet; when it returns, all tensors may change."""
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
        name, dtype = entry_name(entry.key, entry.box.offsets), entry.view.dtype
        if name in table:
            raise ValueError(f"two shards of this rank have the same elements {name}")
        if dtype not in _CODES:
            raise SlipstreamError(f"{entry.key} is of {dtype}, which checkpoints can't hold; use a real dtype")
        table[name] = {"dtype": _CODES[dtype], "shape": entry.box.sizes, "data_offsets": [entry.start, entry.end]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
