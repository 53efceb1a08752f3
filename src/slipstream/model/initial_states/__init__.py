"""Gives recurrences an initial state where their own code begins several tokens without one, a module per feature."""

from __future__ import annotations

from torch import nn

from slipstream.model.initial_states import (
    gated_recurrence,
    lightning_attention,
    matrix_memory,
    selective_scan,
    token_shift,
)
from slipstream.model.model_cutting import Placeholder

_FEATURES = (selective_scan, gated_recurrence, lightning_attention, token_shift, matrix_memory)


def give_initial_states(model: nn.Module) -> None:
    """Makes a model's layers continue, from now on, from what the slice before left, where their own code wouldn't."""
    computing = (module for module in model.modules() if not isinstance(module, Placeholder))
    for module in computing:
        for feature in _FEATURES:
            feature.continue_from_state(module)
