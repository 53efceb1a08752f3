"""Continues lightning attention in blocks, as it begins: MiniMax's own code continues from a state token by token.

Qin et al. 2024, Lightning Attention-2, algorithm 1. With KV_0 from the slice before and a decay of e^-s for each token

    KV_t = e^-s KV_{t-1} + k_t^T v_t        o_t = q_t KV_t

is linear in its state, so a slice runs as if it began a sequence, and what KV_0 adds is known without a loop:

    o_t += e^-st q_t KV_0        KV_T += e^-sT KV_0
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache


def continue_from_state(module: nn.Module) -> None:
    """Makes a lightning attention begin in blocks where it has a state."""
    if hasattr(module, "slope_rate") and hasattr(module, "qkv_proj"):
        module.forward = update_wrapper(partial(_run, module, module.forward), module.forward)


def _run(attention: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    cache = kwargs.get("past_key_values")
    initial = None if cache is None else cache.get_linear_cache(attention.layer_idx)
    if initial is None:
        return forward(*args, **kwargs)
    past = _Past(attention, initial, cache)
    hooks = [
        attention.qkv_proj.register_forward_hook(past.note_queries),
        attention.norm.register_forward_pre_hook(past.add),
    ]
    try:
        return forward(*args, **kwargs | {"past_key_values": past})
    finally:
        for hook in hooks:
            hook.remove()


class _Past:
    """What the tokens before a slice add to it; in place of the cache, it claims that there are none."""

    def __init__(self, attention: Any, initial: Tensor, cache: Cache) -> None:
        self._attention, self._cache = attention, cache
        self._initial = initial  # (b, heads, d, d)

    def note_queries(self, _projection: nn.Module, _args: Any, projected: Tensor) -> None:
        """Takes the queries from what is projected, (b, T, heads · 3 d)."""
        heads = self._attention.act_fn(projected).unflatten(-1, (self._attention.num_attention_heads, -1))
        self._queries = heads[..., : self._attention.head_dim].transpose(1, 2)  # (b, heads, T, d)

    def add(self, _norm: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        """Adds the queries' part of the past to the slice's output (b, T, heads · d), just before its norm."""
        tokens = torch.arange(1, self._queries.shape[2] + 1, device=self._queries.device)
        decayed = self._queries * self._decay(tokens[:, None])
        return (args[0] + (decayed @ self._initial).transpose(1, 2).flatten(2),)

    def get_linear_cache(self, _layer: int) -> None:
        return None

    def set_linear_cache(self, layer: int, state: Tensor) -> None:
        self._cache.set_linear_cache(layer, state + self._decay(self._queries.shape[2]) * self._initial)

    def _decay(self, num_tokens: Tensor | int) -> Tensor:
        """Returns the decay over a number of tokens, (heads, 1, 1), or over several, (heads, T, 1)."""
        decay: Tensor = torch.exp(-self._attention.slope_rate * num_tokens)
        return decay.to(self._initial.dtype)
