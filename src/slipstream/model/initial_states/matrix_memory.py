"""Continues xLSTM's matrix memory, its normalizer and the exponent that both are divided by.

Beck et al. 2024, xLSTM: Extended Long Short-Term Memory, equations 19 to 27 (mLSTM), with the state of equation 15.
transformers' blocks take and return it; the cache that its model keeps them in has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

from torch import Tensor, nn

from slipstream.model.hooks.slice_cache import CarriedState
from slipstream.model.hooks.token_slice import current_slice

_NUM_STATES = 3  # memory (b, heads, dk, dv), normalizer (b, heads, dk), exponent (b, heads, 1)


def continue_from_state(block: nn.Module) -> None:
    """Makes an xLSTM block begin with the state that the slice before left."""
    if hasattr(block, "mlstm_layer"):
        block.forward = update_wrapper(partial(_run, block.forward), block.forward)


def _run(forward: Callable[..., Any], x: Tensor, *_: Any, **__: Any) -> Any:
    context = current_slice()
    if not context.carries_states:
        return forward(x)
    calls = [CarriedState(context.layer, "matrix memory", number) for number in range(_NUM_STATES)]
    states = [state for call in calls if (state := context.state(call)) is not None]
    output, after = forward(x, tuple(states) or None)
    for call, state in zip(calls, after, strict=True):
        context.change_state(call, state)
    return output, None
