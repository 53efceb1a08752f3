"""Controls what autograd saves of a forward (kept, recomputed or offloaded) and when weight gradients are computed."""

from slipstream.model.saving.recomputation import RecomputePolicy, SliceReplay, take_differing_layers
from slipstream.model.saving.saved_tensors import SavedTensors
from slipstream.model.saving.weight_gradients import (
    WeightGradient,
    compiled_modules,
    defer_weight_gradients,
    factors_of,
)
