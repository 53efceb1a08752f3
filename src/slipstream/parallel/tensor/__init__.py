"""Tensor parallelism: which weights are split over ranks, and the collectives around them."""

from __future__ import annotations

from slipstream.parallel.tensor.parameter_cut import bounds
from slipstream.parallel.tensor.tensor_parallel import TensorParallel
from slipstream.parallel.tensor.tensor_plan import TensorPlan, find_tensor_plan
from slipstream.parallel.tensor.vocabulary import vocabulary_cross_entropy

__all__ = [
    "TensorParallel",
    "TensorPlan",
    "bounds",
    "find_tensor_plan",
    "vocabulary_cross_entropy",
]
