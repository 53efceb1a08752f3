"""A rank's tensors as they were at one moment, laid out as the safetensors file they become."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.training.checkpoint.manifest import entry_name
from slipstream.training.checkpoint.tensor_shard import Box, TensorShard
from slipstream.training.checkpoint.verified_files import FileDigest, write_file

# What the format calls them: https://github.com/huggingface/safetensors#format
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BLOCK = 2**23  # bytes written and summed at a time, while they are in the processor's cache


class SnapshotEntry(NamedTuple):
    """A box that this rank writes, of a tensor of `shape`."""

    key: str
    shape: tuple[int, ...]
    box: Box
    view: Tensor
    version: int  # of the tensor when it was taken


class Snapshot:
    """What `take` was given, until `write` has written it or `keep` has copied the rest of it.

    Contiguous tensors of the CPU are read where they are: until the optimizer's next update nothing changes them, and
    that is most of the time. Others are copied at once. The memory of copies is used again from save to save: it is
    paged in (and pinned, for tensors of a GPU) once.

    +--------+---------------------------+-----------+----+
    | header | float64 boxes             | float32   | …  |     no gaps; each box aligned to its elements
    +--------+---------------------------+-----------+----+
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._entries: list[SnapshotEntry] = []
        self._num_written = 0  # entries
        self._is_copied = False  # all that isn't written
        self._lock = threading.Lock()  # a block is read under it, by another thread
        self._header = b""
        self.file = ""

    def take(self, shards: Sequence[TensorShard], file: str) -> None:
        """The shards that are to be written; before any of them changes `keep` is to be called.

        SlipstreamError for a dtype that can't be saved, ValueError where two shards are the same elements.
        """
        self.file = file
        entries = [entry for shard in shards if shard.writes for entry in _entries(shard)]
        entries.sort(key=lambda entry: -entry.view.itemsize)
        self._header = _header(entries)
        self._entries, self._num_written, self._is_copied = entries, 0, False
        if any(entry.view.is_cuda for entry in entries):
            self.keep()

    def keep(self) -> None:
        """Copies what isn't written yet; when it returns all tensors may change."""
        with self._lock:
            if self._is_copied or self._num_written == len(self._entries):
                return
            self._reserve()
            places = list(zip(self._entries, self._places(), strict=True))
            for entry, memory in places[self._num_written :]:
                memory.view(entry.view.dtype).view(entry.view.shape).copy_(entry.view, non_blocking=True)
            for device in {entry.view.device for entry in self._entries if entry.view.is_cuda}:
                torch.cuda.synchronize(device)
            self._is_copied = True

    def state(self) -> dict[str, list[SnapshotEntry]]:
        """What `write` writes, by the tensors' names."""
        state: dict[str, list[SnapshotEntry]] = {}
        for entry in self._entries:
            state.setdefault(entry.key, []).append(entry)
        return state

    def write(self, folder: Path) -> FileDigest:
        """The file, on the disk when this returns. RuntimeError where a tensor has changed without `keep`."""
        with closing(self._blocks()) as blocks:  # where writing fails, the lock is free again at once
            return write_file(folder / self.file, blocks)

    def _reserve(self) -> None:
        size = sum(entry.view.nbytes for entry in self._entries)
        if size > len(self._memory):
            pinned = any(entry.view.is_cuda for entry in self._entries)
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)

    def _places(self) -> Iterator[Tensor]:
        """Of the entries in memory."""
        position = 0
        for entry in self._entries:
            yield self._memory[position : position + entry.view.nbytes]
            position += entry.view.nbytes

    def _blocks(self) -> Generator[bytes | memoryview]:
        yield self._header
        position = 0
        for entry in self._entries:
            for start in range(0, entry.view.nbytes, _BLOCK):
                with self._lock:
                    yield self._block(entry, position, start)
                    self._check(entry)
            position += entry.view.nbytes
            self._num_written += 1

    def _block(self, entry: SnapshotEntry, position: int, start: int) -> memoryview:
        end = min(start + _BLOCK, entry.view.nbytes)
        if self._is_copied:
            block: memoryview = self._memory.numpy().data[position + start : position + end]
            return block
        live: memoryview = entry.view.view(-1).view(torch.uint8).numpy().data[start:end]
        return live

    def _check(self, entry: SnapshotEntry) -> None:
        if not self._is_copied and entry.view._version != entry.version:
            raise RuntimeError(f"{entry.key} was changed before it was kept")


def _entries(shard: TensorShard) -> Iterator[SnapshotEntry]:
    for box, view in shard.boxes():
        elements = view.detach().contiguous()
        yield SnapshotEntry(shard.key, shard.share.shape, box, elements, elements._version)


def _header(entries: Sequence[SnapshotEntry]) -> bytes:
    """The length of the rest (8 bytes, little-endian), then JSON, padded so that the elements are aligned."""
    table: dict[str, object] = {}
    position = 0
    for key, _, box, view, _ in entries:
        name, stop = entry_name(key, box), position + view.nbytes
        if name in table:
            raise ValueError(f"two shards of this rank are the elements {name}")
        if view.dtype not in _CODES:
            raise SlipstreamError(f"{key} is of {view.dtype}, which checkpoints don't hold; use a real dtype")
        table[name] = {"dtype": _CODES[view.dtype], "shape": box.sizes, "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
