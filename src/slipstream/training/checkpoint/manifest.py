"""The manifest of a checkpoint: its files, which part of which tensor is in each, and the facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from slipstream.errors import SlipstreamError
from slipstream.training.checkpoint.tensor_shard import Box, dtype_name
from slipstream.training.checkpoint.verified_files import DamagedError, FileDigest, read_record, write_record

_NAME = "manifest.json"
_FORMAT = 1


class StoredBox(NamedTuple):
    """A rectangle of a tensor, and the file that holds it."""

    file: str
    box: Box


class StoredTensor(BaseModel):
    """A whole tensor: the name of its dtype in torch, its shape, and the boxes that cover it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]


class StoredFile(NamedTuple):
    """The name and the digest of a file that a rank has written."""

    name: str
    digest: FileDigest


class Manifest(BaseModel):
    """All of a checkpoint but the elements of its tensors."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: int
    step: int
    facts: dict[str, Any]
    files: dict[str, FileDigest]
    tensors: dict[str, StoredTensor]

    @classmethod
    def of(
        cls, step: int, facts: Mapping[str, Any], metadata: Metadata, results: Sequence[Sequence[WriteResult]]
    ) -> Manifest:
        """Returns the manifest of what was planned and of what each rank has written, as `StoredFile`."""
        done = [result for of_rank in results for result in of_rank]
        places = {(result.index.fqn, result.index.offset): result.storage_data.name for result in done}
        return cls(
            format=_FORMAT,
            step=step,
            facts=dict(facts),
            files=dict(result.storage_data for result in done),
            tensors={key: _stored(key, tensor, places) for key, tensor in metadata.state_dict_metadata.items()},
        )

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Returns whether a folder has a manifest."""
        return (folder / _NAME).is_file()

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads the manifest in a folder.

        Raises:
            DamagedError: if it isn't what was written.
            SlipstreamError: if this version can't read its format.
        """
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

    def metadata(self) -> Metadata:
        """Returns it as `torch.distributed.checkpoint` describes a checkpoint; storage data are file names by box."""
        tensors: dict[str, STORAGE_TYPES] = {key: _metadata(tensor) for key, tensor in self.tensors.items()}
        places = {
            MetadataIndex(key, stored.box.offsets): stored.file
            for key, tensor in self.tensors.items()
            for stored in tensor.boxes
        }
        return Metadata(tensors, storage_data=places)

    def write(self, folder: Path) -> None:
        """Writes it as a file that appears complete, and is on the disk when this returns."""
        write_record(folder / _NAME, self.model_dump())


def entry_name(key: str, box: Box) -> str:
    """Returns the name of a box in its file, such as `lm_head.weight@4096,0`."""
    return f"{key}@{','.join(map(str, box.offsets))}"


def _stored(key: str, tensor: STORAGE_TYPES, places: Mapping[tuple[str, torch.Size | None], str]) -> StoredTensor:
    assert isinstance(tensor, TensorStorageMetadata)
    boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks]
    stored = tuple(StoredBox(places[key, torch.Size(box.offsets)], box) for box in boxes)
    return StoredTensor(dtype=dtype_name(tensor.properties.dtype), shape=tuple(tensor.size), boxes=stored)


def _metadata(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [stored.box.as_chunk() for stored in tensor.boxes]
    return TensorStorageMetadata(TensorProperties(getattr(torch, tensor.dtype)), torch.Size(tensor.shape), chunks)
