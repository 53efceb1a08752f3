"""Tensor parallelism: which weights are split over ranks, and the collectives around them."""

from slipstream.parallel.tensor.adapted_plan import adapted_plan
from slipstream.parallel.tensor.tensor_parallel import TensorParallel
from slipstream.parallel.tensor.tensor_plan import TensorPlan, find_tensor_plan
from slipstream.parallel.tensor.vocabulary_parallel import (
    gather_vocabulary,
    vocabulary_cross_entropy,
    vocabulary_token_losses,
)
