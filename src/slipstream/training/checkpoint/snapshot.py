"""A rank's tensors as they were at one moment, in host memory and laid out as the safetensors file they become."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.training.checkpoint.box import Box
from slipstream.training.checkpoint.files import write
from slipstream.training.checkpoint.manifest import Part, StoredBox, StoredTensor, entry_name
from slipstream.training.checkpoint.piece import Piece

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


class _Entry(NamedTuple):
    key: str
    box: Box
    view: Tensor


class Snapshot:
    """Memory that is used again from save to save: it is paged in (and pinned, for tensors of a GPU) once.

    +--------+---------------------------+-----------+----+
    | header | float64 boxes             | float32   | …  |     no gaps; each box aligned to its elements
    +--------+---------------------------+-----------+----+
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._size = 0
        self._header = b""
        self._tensors: dict[str, StoredTensor] = {}
        self._file = ""

    def take(self, pieces: Sequence[Piece], file: str) -> None:
        """Copies the pieces that are to be written; when it returns they may change.

        SlipstreamError for a dtype that can't be saved, ValueError where two pieces are the same elements.
        """
        self._file = file
        pieces = [piece for piece in pieces if piece.writes]
        entries = [_Entry(piece.key, box, view) for piece in pieces for box, view in piece.boxes()]
        entries.sort(key=lambda entry: -entry.view.itemsize)
        self._header = _header(entries)
        self._tensors = _tensors(pieces, entries, file)
        self._reserve(entries)
        position = 0
        for entry in entries:
            memory = self._memory[position : position + entry.view.nbytes]
            memory.view(entry.view.dtype).view(entry.view.shape).copy_(entry.view, non_blocking=True)
            position += entry.view.nbytes
        for device in {entry.view.device for entry in entries if entry.view.is_cuda}:
            torch.cuda.synchronize(device)

    def write(self, folder: Path) -> Part:
        """The file, on the disk when this returns."""
        return Part(file=self._file, written=write(folder / self._file, self._blocks()), tensors=self._tensors)

    def _reserve(self, entries: Sequence[_Entry]) -> None:
        self._size = sum(entry.view.nbytes for entry in entries)
        if self._size > len(self._memory):
            pinned = any(entry.view.is_cuda for entry in entries)
            self._memory = torch.empty(self._size, dtype=torch.uint8, pin_memory=pinned)

    def _blocks(self) -> Iterator[bytes | memoryview]:
        yield self._header
        elements = self._memory.numpy().data[: self._size]
        for start in range(0, self._size, _BLOCK):
            yield elements[start : start + _BLOCK]


def _header(entries: Sequence[_Entry]) -> bytes:
    """The length of the rest (8 bytes, little-endian), then JSON, padded so that the elements are aligned."""
    table: dict[str, object] = {}
    position = 0
    for key, box, view in entries:
        name, stop = entry_name(key, box), position + view.nbytes
        if name in table:
            raise ValueError(f"two pieces of this rank are the elements {name}")
        if view.dtype not in _CODES:
            raise SlipstreamError(f"{key} is of {view.dtype}, which checkpoints don't hold; use a real dtype")
        table[name] = {"dtype": _CODES[view.dtype], "shape": box.sizes, "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _tensors(pieces: Sequence[Piece], entries: Sequence[_Entry], file: str) -> dict[str, StoredTensor]:
    boxes: dict[str, list[StoredBox]] = {piece.key: [] for piece in pieces}  # also of those without elements
    for key, box, _ in entries:
        boxes[key].append(StoredBox(file, box))
    return {
        piece.key: StoredTensor(dtype=piece.dtype, shape=piece.share.shape, boxes=tuple(boxes[piece.key]))
        for piece in pieces
    }
