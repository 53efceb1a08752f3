"""Continues RWKV 4: the token before, which is mixed into each token, and the sums of its attention.

Peng et al. 2023, RWKV: Reinventing RNNs for the Transformer Era, equations 11 to 18, and the stable form of the sums in
appendix D: numerator, denominator and the exponent that both are divided by.

transformers' blocks take such a state for several tokens, but keep all layers' states in five tensors that they change
in place. Here a block is given five of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from slipstream.errors import SlipstreamError
from slipstream.model.hooks.layer_arguments import first_output, with_first_output
from slipstream.model.hooks.slice_cache import CarriedState
from slipstream.model.hooks.token_slice import SliceContext, current_slice

_ATTENTION = "rwkv_linear_attention"  # on a GPU its kernel has no gradient of the state
_NUM_SHIFTS = 2  # the token before, as the feed-forward and as the attention saw it
_NUM_STATES, _EXPONENT = 5, 4  # further numerator, denominator and exponent of the attention's sums
_EMPTY_EXPONENT = -1e38


def continue_from_state(module: nn.Module) -> None:
    """Makes an RWKV block begin with the state that the slice before left."""
    if hasattr(getattr(module, "attention", None), "time_decay") and hasattr(module, "feed_forward"):
        module.forward = update_wrapper(partial(_run, module, module.forward), module.forward)
        _halve_in_evaluations(module)
    if hasattr(module, "layers_are_rescaled"):
        _keep_scale(module)


def _keep_scale(model: Any) -> None:
    """Keeps the model from halving its weights where it evaluates: gradients and exports would be those of others."""
    if model.layers_are_rescaled and len(model.blocks) > model.config.rescale_every > 0:
        raise SlipstreamError(
            f"the model has run in evaluation mode, for which it halves weights every {model.config.rescale_every} "
            "layers: load it again, or set rescale_every=0 in its configuration."
        )
    model.layers_are_rescaled = None  # neither True nor False, which it compares with model.training


def _halve_in_evaluations(block: Any) -> None:
    """Halves what the model halves in evaluations, the hidden states after every few layers and all that is added to
    them afterwards: norms have an epsilon, so the loss is another one. A power of two rounds nothing."""
    every = block.config.rescale_every
    if every > 0:
        power = 2 ** (block.layer_id // every)
        for each in (block.attention.output, block.feed_forward.value) if power > 1 else ():
            each.register_forward_hook(partial(_divided, power))
        if (block.layer_id + 1) % every == 0:
            block.register_forward_hook(partial(_divided, 2))


def _divided(power: int, module: nn.Module, _args: Any, output: Any) -> Any:
    return None if module.training else with_first_output(output, first_output(output) / power)


class _OwnState:
    """A block's own column of a state (b, width, layers): (b, width), or (b, 1, width) in place of a lone token."""

    def __init__(self, value: Tensor, is_token: bool) -> None:
        self.value, self._is_token = value, is_token

    def __getitem__(self, layers: tuple[slice, slice, int]) -> Tensor:
        return self.value[:, None] if self._is_token else self.value

    def __setitem__(self, layers: tuple[slice, slice, int], value: Tensor) -> None:
        self.value = value


def _run(block: Any, forward: Callable[..., Any], hidden: Tensor, *_: Any, **__: Any) -> Any:
    context = current_slice()
    if not context.carries_states:
        return forward(hidden)
    calls = [CarriedState(context.layer, "token shift", number) for number in range(_NUM_STATES)]
    states = [
        _OwnState(_state(block, hidden, context, call), is_token=call.number < _NUM_SHIFTS and hidden.shape[1] == 1)
        for call in calls
    ]
    file = sys.modules[type(block).__module__]
    with patch.object(file, _ATTENTION, getattr(file, f"{_ATTENTION}_cpu")):
        output, *_ = forward(hidden, state=states)
    for call, state in zip(calls, states, strict=True):
        context.change_state(call, state.value)
    return output, None, None


def _state(block: Any, hidden: Tensor, context: SliceContext, call: CarriedState) -> Tensor:
    """Returns a state (b, width), that of a sequence's start where there is none."""
    is_shift = call.number < _NUM_SHIFTS
    width = hidden.shape[-1] if is_shift else block.attention.attention_hidden_size
    empty = _EMPTY_EXPONENT if call.number == _EXPONENT else 0.0
    left = context.state(call)
    if left is None:
        dtype = hidden.dtype if is_shift else torch.promote_types(hidden.dtype, torch.float32)
        return hidden.new_full((len(hidden), width), empty, dtype=dtype)
    rows = context.fresh_rows
    return left if rows is None or not empty else left.masked_fill(rows[:, None], empty)
