"""Exact causal attention over token slices: one autograd function and the context store it works on."""

from slipstream.attention.attention_backend import AttentionSite
from slipstream.attention.carried_states import CarriedStates
from slipstream.attention.context_error import ContextError
from slipstream.attention.context_store import ContextStore, StoredSlice
from slipstream.attention.kernel_choice import chosen_kernels
from slipstream.attention.key_ranges import KeyRanges
from slipstream.attention.prefix import read_prefix
from slipstream.attention.slice_attention import attend
