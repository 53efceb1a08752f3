"""Code that Slipstream registers with transformers, and what that code may read about the current token slice."""

from slipstream.model.hooks.length_dependent_rope import fix_length_dependent_rope
from slipstream.model.hooks.mask_tables import MaskTables
from slipstream.model.hooks.token_slice import (
    SliceContext,
    TokenSlice,
    active_forward,
    current_forward,
    current_layer,
    current_slice,
    keyed_seed,
)
