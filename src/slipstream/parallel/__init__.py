"""Tensor and data parallelism within the pipeline: the mesh, its groups, and which rank holds what."""

from __future__ import annotations

from slipstream.parallel.group import Group, ends_in_order
from slipstream.parallel.mesh import Axes, make_mesh
from slipstream.parallel.shares import Share

__all__ = [
    "Axes",
    "Group",
    "Share",
    "ends_in_order",
    "make_mesh",
]
