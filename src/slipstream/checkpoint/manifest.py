"""The manifest of a checkpoint: its files, which part of which tensor is in each, and the facts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint.metadata as dcp
from pydantic import BaseModel, ValidationError
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from slipstream.checkpoint.files import DamagedError, FileDigest, OtherFormatError, read_record, write_record
from slipstream.parallel import ParameterShare


class Box(NamedTuple):
    """A rectangle of a tensor: its start and its length along each dim; () and () for a scalar."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def is_inside(self, shape: tuple[int, ...]) -> bool:
        """Returns whether the box lies inside a tensor of this shape."""
        along_dims = zip(self.offsets, self.sizes, shape, strict=True)
        return all(0 <= start <= start + size <= end for start, size, end in along_dims)

    def as_chunk(self) -> ChunkStorageMetadata:
        """Returns the box as `torch.distributed.checkpoint` describes one."""
        return ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))


@dataclass(frozen=True)
class TensorShard:
    """Rows `first_row` to `first_row + len(tensor)` of this rank's share of a tensor.

    Attributes:
        key: the name of the tensor, the same on every rank and every mesh: `model.layers.0.mlp.up_proj.weight`,
            `optimizer.exp_avg.model.layers.0.mlp.up_proj.weight`.
        share: which part of the whole tensor this rank has.
        tensor: the rows.
        first_row: where they begin in the share.
        writes: False where another rank saves the same elements; it makes no difference for loading.
    """

    key: str
    share: ParameterShare
    tensor: Tensor
    first_row: int = 0
    writes: bool = True

    def boxes(self) -> Iterator[tuple[Box, Tensor]]:
        """Yields its rectangles of the whole tensor, none empty, each with a view of the memory of `tensor`."""
        for offsets, view in self.share.boxes(self.tensor.detach(), self.first_row):
            if view.numel():
                yield Box(offsets, tuple(view.shape)), view


def dtype_name(tensor: Tensor) -> str:
    """Returns the name of a tensor's dtype in torch, such as `float32`."""
    return str(tensor.dtype).removeprefix("torch.")


MANIFEST = "manifest.json"
_FORMAT = 1
# A name that can be opened, and that doesn't lead elsewhere.
_FILE_NAME = re.compile(r"\w[\w.-]*", re.ASCII)


class StoredBox(NamedTuple):
    """A rectangle of a tensor, and the file that holds it."""

    file: str
    box: Box


class StoredTensor(BaseModel, extra="forbid", frozen=True):
    """A whole tensor, or the part that one rank writes: its dtype's name in torch, its shape, and its boxes."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]


class WrittenFile(NamedTuple):
    """The file that a rank has written, and its parts of tensors; a tensor has an entry for each box."""

    name: str
    digest: FileDigest
    entries: Sequence[tuple[str, StoredTensor]]


class Manifest(BaseModel, extra="forbid", frozen=True):
    """The description of a checkpoint: everything but the elements of its tensors."""

    format: int
    step: int
    facts: dict[str, Any]
    files: dict[str, FileDigest]
    tensors: dict[str, StoredTensor]

    @classmethod
    def of(cls, step: int, facts: Mapping[str, Any], written: Sequence[WrittenFile]) -> Manifest:
        """Returns the manifest of the ranks' files.

        Raises:
            ValueError: if they don't have each element of each tensor exactly once.
        """
        parts: dict[str, list[StoredTensor]] = {}
        for key, part in (entry for file in written for entry in file.entries):
            parts.setdefault(key, []).append(part)
        return cls(
            format=_FORMAT,
            step=step,
            facts=dict(facts),
            files={file.name: file.digest for file in written},
            tensors={key: _join(key, of_key) for key, of_key in parts.items()},
        )

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads the manifest in a folder.

        Raises:
            DamagedError: if it differs from the one written, or this version can't read its format.
        """
        record = read_record(folder / MANIFEST)
        if not isinstance(record.get("format"), int):
            raise DamagedError(f"{MANIFEST} doesn't say its format")
        if record["format"] != _FORMAT:
            raise OtherFormatError(
                f"{MANIFEST} is of format {record['format']}; this version of slipstream reads format {_FORMAT}: "
                "install the version that wrote it"
            )
        try:
            manifest = cls.model_validate(record)
        except ValidationError as error:
            raise DamagedError(f"{MANIFEST} isn't a manifest: {error.errors()[0]['msg']}") from None
        used = {stored.file for tensor in manifest.tensors.values() for stored in tensor.boxes}
        if used - manifest.files.keys() or not all(map(_FILE_NAME.fullmatch, manifest.files)):
            raise DamagedError(f"{MANIFEST} names files outside the checkpoint")
        try:
            for key, tensor in manifest.tensors.items():
                _check_boxes(key, tensor.shape, tensor.boxes)
        except ValueError as error:
            raise DamagedError(f"{MANIFEST} isn't of a whole checkpoint: {error}") from None
        dtypes = {tensor.dtype for tensor in manifest.tensors.values()}
        if unknown := {name for name in dtypes if not isinstance(getattr(torch, name, None), torch.dtype)}:
            raise DamagedError(f"{MANIFEST} has a tensor of {min(unknown)!r}, which isn't a dtype")
        needed = Counter[str]()
        for tensor in manifest.tensors.values():
            for stored in tensor.boxes:
                needed[stored.file] += prod(stored.box.sizes) * getattr(torch, tensor.dtype).itemsize
        for name, num_bytes in needed.items():
            if num_bytes > manifest.files[name].size:
                raise DamagedError(f"{MANIFEST} has {num_bytes:,} bytes of tensors in {name}, which is smaller")
        return manifest

    def metadata(self) -> dcp.Metadata:
        """Returns the manifest as `torch.distributed.checkpoint` describes a checkpoint; storage data are file names by
        box."""
        tensors: dict[str, dcp.STORAGE_TYPES] = {}
        places: dict[dcp.MetadataIndex, str] = {}
        for key, tensor in self.tensors.items():
            chunks = [stored.box.as_chunk() for stored in tensor.boxes]
            properties = dcp.TensorProperties(getattr(torch, tensor.dtype))
            tensors[key] = dcp.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
            places |= {dcp.MetadataIndex(key, stored.box.offsets): stored.file for stored in tensor.boxes}
        return dcp.Metadata(tensors, storage_data=places)

    def write(self, folder: Path) -> None:
        """Writes the manifest as a file that appears complete, and is on the disk when this returns."""
        write_record(folder / MANIFEST, self.model_dump())


def entry_name(key: str, offsets: Sequence[int]) -> str:
    """Returns the name, in its file, of the box that begins at `offsets`, such as `lm_head.weight@4096,0`."""
    return f"{key}@{','.join(map(str, offsets))}"


def _join(key: str, parts: Sequence[StoredTensor]) -> StoredTensor:
    kinds = dict.fromkeys((part.dtype, part.shape) for part in parts)
    if len(kinds) > 1:
        raise ValueError(f"{key} is {' on one rank and '.join(map(str, kinds))} on another")
    boxes = tuple(stored for part in parts for stored in part.boxes)
    _check_boxes(key, parts[0].shape, boxes)
    return parts[0].model_copy(update={"boxes": boxes})


def _check_boxes(key: str, shape: tuple[int, ...], boxes: Sequence[StoredBox]) -> None:
    """Raises ValueError where the boxes aren't each element of a tensor of this shape once."""
    outside = [
        box for _, box in boxes if not len(box.offsets) == len(box.sizes) == len(shape) or not box.is_inside(shape)
    ]
    if outside:
        raise ValueError(f"{key} of shape {shape} has elements at {outside[0].offsets}, outside of it")
    if len({stored.box.offsets for stored in boxes}) < len(boxes):
        raise ValueError(f"several ranks write the same elements of {key}")
    written = sum(prod(stored.box.sizes) for stored in boxes)
    size = prod(shape)
    if written != size:
        raise ValueError(f"the ranks write {written:,} elements of {key}, which has {size:,}")
