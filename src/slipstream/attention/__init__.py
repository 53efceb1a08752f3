"""Exact causal attention over token slices: one autograd function and the context store it works on."""

from __future__ import annotations

from slipstream.attention.function import attend
from slipstream.attention.ranges import KeyRanges
from slipstream.attention.store import ContextError, ContextStore, _Slice

__all__ = [
    "ContextError",
    "ContextStore",
    "KeyRanges",
    "_Slice",
    "attend",
]
