"""Exact causal attention over token slices: one autograd function and the context store it works on."""

from slipstream.attention.backend import AttentionSite, TokenExchange
from slipstream.attention.kernel_choice import chosen_kernels
from slipstream.attention.key_blocks import HostContext, context_on_host
from slipstream.attention.masks import KeyRanges
from slipstream.attention.slice_attention import attend, read_prefix
from slipstream.attention.store import CarriedStates, ContextError, ContextStore, StoredSlice, begin_with
