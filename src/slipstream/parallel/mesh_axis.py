"""The axes of a mesh, by what the ranks along each have in common; groups follow from these roles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MeshAxis:
    """One axis of the mesh.

    Ranks along an axis that `shares_weights` hold the same parameters and see other tokens, by rows or by parts of
    rows: their gradients, losses and counts are summed, and their optimizer state may be sharded. Along one that
    `shares_batch` all are given the same rows.
    """

    name: str  # as `make_mesh` and a DeviceMesh call it
    shares_weights: bool
    shares_batch: bool
    part_of: Callable[[Any, int, int], Any] | None = None
    """Where ranks that share a batch work on parts of its tokens: returns a rank's part of a split batch, from that,
    the rank's number and their number. Neither the batch's number of targets nor its seed changes."""

    @property
    def splits_tokens(self) -> bool:
        """Whether each rank works on some tokens of every slice."""
        return self.part_of is not None


PIPELINE = MeshAxis("pp", shares_weights=False, shares_batch=True)  # each rank has other layers
DATA = MeshAxis("dp", shares_weights=True, shares_batch=False)
TENSOR = MeshAxis("tp", shares_weights=False, shares_batch=True)  # each rank has a share of every layer

_axes = {axis.name: axis for axis in (PIPELINE, DATA, TENSOR)}


def known_axes() -> tuple[MeshAxis, ...]:
    """Returns the axes in the order of ranks: those along tp are neighbours."""
    return tuple(_axes.values())


def add_axis(axis: MeshAxis) -> None:
    """Makes an axis known to meshes, between dp and tp: what it exchanges lies between theirs."""
    tensor = _axes.pop(TENSOR.name)
    _axes[axis.name] = axis
    _axes[TENSOR.name] = tensor
