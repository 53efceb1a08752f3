"""Continues the real-gated linear recurrent unit, and the convolution before it (De et al. 2024, Griffin, section 2.4).

    h_t = a_t h_{t-1} + sqrt(1 - a_t²) (i_t x_t)

RecurrentGemma's own code begins with the state that it finds in an attribute of the unit, and leaves the last one
there, for generating text; training finds none. Its convolution pads the sequence's start itself: a kernel of k tokens
is given k - 1 zeros on both sides, and the first T outputs are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from slipstream.model.hooks.slice_cache import CarriedState, SliceCache
from slipstream.model.hooks.token_slice import current_slice


def continue_from_state(block: nn.Module) -> None:
    """Makes the unit and the convolution of a recurrent block begin with what the slice before left."""
    children = list(block.children())
    if any(hasattr(child, "_rnn_scan") for child in children):
        for child in children:
            if hasattr(child, "_rnn_scan"):
                _replace_forward(child, _recur)
            elif isinstance(child, nn.Conv1d):
                _replace_forward(child, _convolve)


def _replace_forward(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    module.forward = partial(forward, module, module.forward)


def _recur(unit: Any, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Runs a unit's own forward from the state (b, width) that the slice before left."""
    context = current_slice()
    if not context.carries_states:
        return forward(*args, **kwargs)
    call = CarriedState(context.layer, "recurrence", 0)
    unit.recurrent_states = context.state(call)
    output = forward(*args, **kwargs)
    context.change_state(call, unit.recurrent_states)
    unit.recurrent_states = None
    return output


def _convolve(convolution: nn.Conv1d, forward: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Returns outputs (b, channels, T + k - 1), of which the first T are those of the inputs (b, channels, T)."""
    context = current_slice()
    if not context.carries_states:
        return forward(inputs)
    kernel = convolution.kernel_size[0]
    joined = SliceCache(context).update_conv_state(inputs, context.layer, conv_kernel_size=kernel)
    return forward(joined)[..., joined.shape[-1] - inputs.shape[-1] :]
