"""Data parallelism: gradient reduction, sharded parameters and optimizer state, loss scaling."""

from __future__ import annotations

from slipstream.parallel.replicas.gradient_reduction import Gradients
from slipstream.parallel.replicas.loss_scale import LossScale
from slipstream.parallel.replicas.masters import Masters
from slipstream.parallel.replicas.sharded_parameters import ShardedParameters

__all__ = [
    "Gradients",
    "LossScale",
    "Masters",
    "ShardedParameters",
]
