"""A checkpoint that was found whole: what it says about itself, and its tensors read into any pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.training.checkpoint.box import Box
from slipstream.training.checkpoint.manifest import Manifest, StoredBox, StoredTensor, entry_name
from slipstream.training.checkpoint.piece import Piece

_MOST_TOLD = 5  # differences in one message


class _Read(NamedTuple):
    """Part of one stored box, and where it goes."""

    key: str
    stored: StoredBox
    box: Box
    target: Tensor


@dataclass(frozen=True)
class Found:
    """A verified checkpoint."""

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """After which it was saved."""
        return self.manifest.step

    @property
    def facts(self) -> dict[str, Any]:
        """What was saved beside the tensors."""
        return self.manifest.facts

    def check_model(self, model: Mapping[str, Any]) -> None:
        """Raises SlipstreamError that names the fields in which `facts["model"]` is another than `model`."""
        here = json.loads(json.dumps(model))
        differences = list(_differences("", self.facts.get("model", {}), here))
        if differences:
            raise SlipstreamError(
                f"{self.folder} is a checkpoint of another model: {_some(differences)}. Start with the settings it was "
                "saved with, or train in another folder."
            )

    def misfits(self, pieces: Sequence[Piece]) -> str:
        """What can't be filled from this checkpoint, in words; "" where all can."""
        return _some([f"{piece.key} {why}" for piece in pieces for why in self._misfit(piece)])

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Reads all the pieces' elements into their tensors; each file is opened once, and only read where needed."""
        with ExitStack() as stack:
            files: dict[str, Any] = {}
            for piece in pieces:
                for read in self._reads(piece):
                    name = read.stored.file
                    if name not in files:
                        files[name] = stack.enter_context(safe_open(self.folder / name, framework="pt"))
                    read.target.copy_(_elements(files[name], read))

    def _misfit(self, piece: Piece) -> Iterator[str]:
        tensor = self.manifest.tensors.get(piece.key)
        if tensor is None:
            yield "isn't in it"
        elif tensor.shape != piece.share.shape:
            yield f"has shape {tensor.shape} in it and {piece.share.shape} here"
        elif tensor.dtype != piece.dtype:
            yield f"is {tensor.dtype} in it and {piece.dtype} here"
        elif sum(read.box.num_elements for read in self._reads(piece)) != piece.tensor.numel():
            yield "isn't all in it"

    def _reads(self, piece: Piece) -> Iterator[_Read]:
        tensor: StoredTensor = self.manifest.tensors[piece.key]
        for box, view in piece.boxes():
            for stored in tensor.boxes:
                common = box.overlap(stored.box)
                if common is not None:
                    yield _Read(piece.key, stored, common, view[common.inside(box)])


def _elements(file: Any, read: _Read) -> Tensor:
    name = entry_name(read.key, read.stored.box)
    if read.box == read.stored.box:
        whole: Tensor = file.get_tensor(name)
        return whole
    part: Tensor = file.get_slice(name)[read.box.inside(read.stored.box)]
    return part


def _differences(name: str, saved: Any, here: Any) -> Iterator[str]:
    if isinstance(saved, dict) and isinstance(here, dict):
        for key in sorted({*saved, *here}):
            yield from _differences(f"{name}.{key}" if name else key, saved.get(key), here.get(key))
    elif saved != here:
        yield f"{name} is {json.dumps(saved)} in it and {json.dumps(here)} here"


def _some(reasons: Sequence[str]) -> str:
    more = len(reasons) - _MOST_TOLD
    return "; ".join(reasons[:_MOST_TOLD]) + (f"; and {more} more" if more > 0 else "")
