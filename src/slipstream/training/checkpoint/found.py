"""A checkpoint that was found whole: what it says about itself, and its tensors read into any pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_loader import load

from slipstream.errors import SlipstreamError
from slipstream.parallel import Group
from slipstream.training.checkpoint.manifest import Manifest
from slipstream.training.checkpoint.piece import Piece
from slipstream.training.checkpoint.planners import PieceLoadPlanner, by_key
from slipstream.training.checkpoint.saving import alone_is_fine
from slipstream.training.checkpoint.storage import CheckpointReader

_MOST_TOLD = 5  # differences in one message


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

    def load(self, pieces: Sequence[Piece], world: Group) -> None:
        """Fills the pieces' tensors in place. CheckpointException, on all ranks, where one can't read its files."""
        alone_is_fine()
        load(
            by_key(pieces),
            storage_reader=CheckpointReader(self.folder, self.manifest),
            planner=PieceLoadPlanner(),
            process_group=world.process_group,
            no_dist=world.size == 1,
        )

    def _misfit(self, piece: Piece) -> Iterator[str]:
        tensor = self.manifest.tensors.get(piece.key)
        if tensor is None:
            if prod(piece.share.shape):  # of what has no elements nothing is saved
                yield "isn't in it"
        elif tensor.shape != piece.share.shape:
            yield f"has shape {tensor.shape} in it and {piece.share.shape} here"
        elif tensor.dtype != piece.dtype:
            yield f"is {tensor.dtype} in it and {piece.dtype} here"
        elif sum(prod(box.sizes) for box, _ in piece.boxes() if box.is_inside(tensor.shape)) != piece.tensor.numel():
            yield "isn't all in it"


def _differences(name: str, saved: Any, here: Any) -> Iterator[str]:
    if isinstance(saved, dict) and isinstance(here, dict):
        for key in sorted({*saved, *here}):
            yield from _differences(f"{name}.{key}" if name else key, saved.get(key), here.get(key))
    elif saved != here:
        yield f"{name} is {json.dumps(saved)} in it and {json.dumps(here)} here"


def _some(reasons: Sequence[str]) -> str:
    more = len(reasons) - _MOST_TOLD
    return "; ".join(reasons[:_MOST_TOLD]) + (f"; and {more} more" if more > 0 else "")
