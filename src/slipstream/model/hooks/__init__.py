"""Code that Slipstream registers with transformers, and the facts that it may read about the current token slice."""

from slipstream.model.hooks.length_dependent_rope import kept_frequencies
from slipstream.model.hooks.router_loss import RouterLoss
from slipstream.model.hooks.token_slice import TokenSlice, note_output, running_alone, runs_alone
