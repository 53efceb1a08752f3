"""Tensor parallelism: which weights are split over ranks, and the collectives around them."""

from slipstream.parallel.tensor.plan import TensorPlan, adapted_plan, find_tensor_plan
from slipstream.parallel.tensor.tensor_parallel import (
    TensorParallel,
    gather_vocabulary,
    vocabulary_cross_entropy,
    vocabulary_token_losses,
)
