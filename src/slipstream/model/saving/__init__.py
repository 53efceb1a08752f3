"""What autograd saves of a forward: kept, recomputed or offloaded, and weight gradients that wait for W."""

from __future__ import annotations

from slipstream.model.saving.recompute import Recompute, Replay
from slipstream.model.saving.saved_tensors import SavedTensors
from slipstream.model.saving.weight_gradients import (
    WeightGradient,
    add_weight_gradients_in_place,
    compiled_modules,
    deferring,
    is_compiled,
)

__all__ = [
    "Recompute",
    "Replay",
    "SavedTensors",
    "WeightGradient",
    "add_weight_gradients_in_place",
    "compiled_modules",
    "deferring",
    "is_compiled",
]
