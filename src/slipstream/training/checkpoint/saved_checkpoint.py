"""A checkpoint that has been verified: its facts, and its tensors, which any mesh can load."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.parallel import RankGroup
from slipstream.training.checkpoint.checkpoint_reader import CheckpointReader, load_boxes
from slipstream.training.checkpoint.manifest import Manifest
from slipstream.training.checkpoint.tensor_shard import Box, TensorShard, dtype_name

_MOST_LISTED = 5  # differences in one message


@dataclass(frozen=True)
class SavedCheckpoint:
    """A verified checkpoint."""

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return self.manifest.step

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that were saved next to the tensors."""
        return self.manifest.facts

    def check_model(self, model: Mapping[str, Any]) -> None:
        """Raises SlipstreamError, with the names of the fields, where `facts["model"]` differs from `model`."""
        here = json.loads(json.dumps(model))
        differences = list(_differences("", self.facts.get("model", {}), here))
        if differences:
            raise self.unfit(f"is a checkpoint of another model: {_some(differences)}")

    def unfit(self, why: str) -> SlipstreamError:
        """Returns the error of a checkpoint that can't be used here."""
        return SlipstreamError(
            f"{self.folder} {why}. Start with the settings it was saved with, or train in another folder."
        )

    def describe_misfits(self, shards: Sequence[TensorShard]) -> str:
        """Returns which shards can't be filled from this checkpoint and why; "" where all can."""
        return _some([f"{shard.key} {why}" for shard in shards for why in self._misfit(shard)])

    def load(self, shards: Sequence[TensorShard], world: RankGroup) -> None:
        """Fills the tensors of the shards in place. Collective.

        Raises:
            CheckpointException: on all ranks, if one of them can't read its files.
        """
        boxes: dict[str, list[tuple[Box, Tensor]]] = {}
        for shard in shards:
            boxes.setdefault(shard.key, []).extend(shard.boxes())
        load_boxes(boxes, CheckpointReader(self.folder, self.manifest), world)

    def _misfit(self, shard: TensorShard) -> Iterator[str]:
        tensor = self.manifest.tensors.get(shard.key)
        if tensor is None:
            if prod(shard.share.shape):  # a tensor without elements is not saved
                yield "isn't in it"
        elif tensor.shape != shard.share.shape:
            yield f"has shape {tensor.shape} in it and {shard.share.shape} here"
        elif tensor.dtype != (dtype := dtype_name(shard.tensor)):
            yield f"is {tensor.dtype} in it and {dtype} here"
        elif sum(prod(box.sizes) for box, _ in shard.boxes() if box.is_inside(tensor.shape)) != shard.tensor.numel():
            yield "isn't all in it"


def _differences(name: str, saved: Any, here: Any) -> Iterator[str]:
    if isinstance(saved, dict) and isinstance(here, dict):
        for key in sorted({*saved, *here}):
            yield from _differences(f"{name}.{key}" if name else key, saved.get(key), here.get(key))
    elif saved != here:
        yield f"{name} is {json.dumps(saved)} in it and {json.dumps(here)} here"


def _some(reasons: Sequence[str]) -> str:
    more = len(reasons) - _MOST_LISTED
    return "; ".join(reasons[:_MOST_LISTED]) + (f"; and {more} more" if more > 0 else "")
