"""Code that Slipstream registers with transformers, and the facts that it may read about the current token slice."""

from slipstream.model.hooks.crossing_tensors import Arguments, first_output, hidden_states, with_hidden_states
from slipstream.model.hooks.length_dependent_rope import keep_frequencies, kept_frequencies
from slipstream.model.hooks.masks import MaskTables
from slipstream.model.hooks.module_calls import recorded_calls
from slipstream.model.hooks.router_loss import RouterLoss
from slipstream.model.hooks.slice_cache import CarriedState, SliceCache, cache_name
from slipstream.model.hooks.token_slice import (
    SliceContext,
    TokenParts,
    TokenSlice,
    active_forward,
    current_forward,
    note_output,
    running_alone,
    runs_alone,
)
