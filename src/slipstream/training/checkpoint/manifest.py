"""What a checkpoint's manifest says: which files there are, which part of which tensor is in each, and the facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from slipstream.errors import SlipstreamError
from slipstream.training.checkpoint.box import Box
from slipstream.training.checkpoint.files import DamagedError, Written, read_record, write_record

_NAME = "manifest.json"
_FORMAT = 1


class StoredBox(NamedTuple):
    """A rectangle of a tensor, and the file it is in."""

    file: str
    box: Box


class StoredTensor(BaseModel):
    """A tensor as a whole: its dtype as torch calls it, its shape, and the boxes that together are all of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]


class Part(BaseModel):
    """What one rank has written."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    file: str
    written: Written
    tensors: dict[str, StoredTensor]


class Manifest(BaseModel):
    """All of a checkpoint but the tensors' elements."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: int
    step: int
    facts: dict[str, Any]
    files: dict[str, Written]
    tensors: dict[str, StoredTensor]

    @classmethod
    def of(cls, step: int, facts: Mapping[str, Any], parts: Sequence[Part]) -> Manifest:
        """Of what the ranks have written. ValueError where the parts of a tensor aren't all of it, each once."""
        files = {part.file: part.written for part in parts}
        return cls(format=_FORMAT, step=step, facts=dict(facts), files=files, tensors=_join(parts))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises DamagedError where it isn't what was written, SlipstreamError where this version can't read it."""
        record = read_record(folder / _NAME)
        if record.get("format") != _FORMAT:
            raise SlipstreamError(
                f"{folder} is a checkpoint of format {record.get('format')}; this version of slipstream reads format "
                f"{_FORMAT}. Install the version that wrote it."
            )
        try:
            manifest = cls.model_validate(record)
        except ValidationError as error:
            raise DamagedError(f"{_NAME} isn't a manifest: {error.errors()[0]['msg']}") from None
        used = {stored.file for tensor in manifest.tensors.values() for stored in tensor.boxes}
        if used - manifest.files.keys() or any(Path(name).name != name for name in manifest.files):
            raise DamagedError(f"{_NAME} names files outside the checkpoint")
        return manifest

    def write(self, folder: Path) -> None:
        """It appears whole, and is on the disk when this returns."""
        write_record(folder / _NAME, self.model_dump())


def entry_name(key: str, box: Box) -> str:
    """What a box is called in its file: `lm_head.weight@4096,0`."""
    return f"{key}@{','.join(map(str, box.offsets))}"


def _join(parts: Sequence[Part]) -> dict[str, StoredTensor]:
    boxes: dict[str, list[StoredBox]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for part in parts:
        for key, tensor in part.tensors.items():
            boxes.setdefault(key, []).extend(tensor.boxes)
            if kinds.setdefault(key, (tensor.dtype, tensor.shape)) != (tensor.dtype, tensor.shape):
                raise ValueError(f"{key} is {kinds[key]} on one rank and {(tensor.dtype, tensor.shape)} on another")
    for key, (_, shape) in kinds.items():
        _check_all_there(key, shape, [stored.box for stored in boxes[key]])
    return {key: StoredTensor(dtype=kinds[key][0], shape=kinds[key][1], boxes=tuple(boxes[key])) for key in kinds}


def _check_all_there(key: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    if len({box.offsets for box in boxes}) < len(boxes):
        raise ValueError(f"several ranks write the same elements of {key}")
    found = sum(box.num_elements for box in boxes)
    if found != prod(shape):
        raise ValueError(f"the ranks write {found:,} elements of {key}, which has {prod(shape):,}")
