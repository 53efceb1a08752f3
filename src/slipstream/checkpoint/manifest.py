"""The manifest of a checkpoint: its files, which part of which tensor is in each, and the facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint.metadata as dcp
from pydantic import BaseModel, ValidationError

from slipstream.checkpoint.tensor_shard import Box
from slipstream.checkpoint.verified_files import DamagedError, FileDigest, OtherFormatError, read_record, write_record

MANIFEST = "manifest.json"
_FORMAT = 1


class StoredBox(NamedTuple):
    """A rectangle of a tensor, and the file that holds it."""

    file: str
    box: Box


class StoredTensor(BaseModel, extra="forbid", frozen=True):
    """A whole tensor, or what one rank writes of it: its dtype's name in torch, its shape, and where its boxes are."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]


class WrittenFile(NamedTuple):
    """The file that a rank has written, and what it holds of which tensor; a tensor has an entry for each box."""

    name: str
    digest: FileDigest
    entries: Sequence[tuple[str, StoredTensor]]


class Manifest(BaseModel, extra="forbid", frozen=True):
    """All of a checkpoint but the elements of its tensors."""

    format: int
    step: int
    facts: dict[str, Any]
    files: dict[str, FileDigest]
    tensors: dict[str, StoredTensor]

    @classmethod
    def of(cls, step: int, facts: Mapping[str, Any], written: Sequence[WrittenFile]) -> Manifest:
        """Returns the manifest of what the ranks have written.

        Raises:
            ValueError: if that isn't each element of each tensor exactly once.
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
            DamagedError: if it isn't what was written, or this version can't read its format.
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
        if used - manifest.files.keys() or any(Path(name).name != name for name in manifest.files):
            raise DamagedError(f"{MANIFEST} names files outside the checkpoint")
        try:
            for key, tensor in manifest.tensors.items():
                _check_boxes(key, tensor.shape, tensor.boxes)
        except ValueError as error:
            raise DamagedError(f"{MANIFEST} isn't of a whole checkpoint: {error}") from None
        dtypes = {each.dtype for each in manifest.tensors.values()}
        if unknown := {name for name in dtypes if not isinstance(getattr(torch, name, None), torch.dtype)}:
            raise DamagedError(f"{MANIFEST} has a tensor of {min(unknown)!r}, which is no dtype")
        return manifest

    def metadata(self) -> dcp.Metadata:
        """Returns it as `torch.distributed.checkpoint` describes a checkpoint; storage data are file names by box."""
        tensors: dict[str, dcp.STORAGE_TYPES] = {}
        places: dict[dcp.MetadataIndex, str] = {}
        for key, tensor in self.tensors.items():
            chunks = [stored.box.as_chunk() for stored in tensor.boxes]
            properties = dcp.TensorProperties(getattr(torch, tensor.dtype))
            tensors[key] = dcp.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
            places |= {dcp.MetadataIndex(key, stored.box.offsets): stored.file for stored in tensor.boxes}
        return dcp.Metadata(tensors, storage_data=places)

    def write(self, folder: Path) -> None:
        """Writes it as a file that appears complete, and is on the disk when this returns."""
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
    written, size = sum(prod(stored.box.sizes) for stored in boxes), prod(shape)
    if written != size:
        raise ValueError(f"the ranks write {written:,} elements of {key}, which has {size:,}")
