"""Exact causal attention over token slices: one autograd function and the context store it works on."""

from slipstream.attention.attention_backend import AttentionSite
from slipstream.attention.context_store import ContextError, ContextStore, StoredSlice
from slipstream.attention.key_ranges import KeyRanges
from slipstream.attention.slice_attention import attend
