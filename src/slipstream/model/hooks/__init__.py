"""What Slipstream registers with transformers, and what that code may ask about the current token slice."""

from __future__ import annotations

from slipstream.model.hooks.masks import MaskTables
from slipstream.model.hooks.rope import fix_length_dependent_rope
from slipstream.model.hooks.token_slice import (
    SliceContext,
    TokenSlice,
    active_slice,
    keyed_random_state,
    keyed_seed,
    running,
    running_layer,
)

__all__ = [
    "MaskTables",
    "SliceContext",
    "TokenSlice",
    "active_slice",
    "fix_length_dependent_rope",
    "keyed_random_state",
    "keyed_seed",
    "running",
    "running_layer",
]
