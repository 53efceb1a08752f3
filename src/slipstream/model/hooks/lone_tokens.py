"""Lets a token that a layer computes alone take the code of several tokens, which has a gradient.

One token with a past is what generating text computes, and transformers has other code for it: it changes the state in
place, its kernels for GPUs have no backward, and where time steps have limits (Nemotron-H) it ignores them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from torch.nn.functional import silu
from torch.overrides import TorchFunctionMode

from slipstream.model.hooks.document_resets import document_begins
from slipstream.model.hooks.token_slice import SliceContext, TokenSlice, current_slice

_FOR_SEVERAL = {  # what transformers calls for one token -> for several, with the same arguments
    "torch_recurrent_gated_delta_rule": "torch_chunk_gated_delta_rule",
    "recurrent_kimi_delta_attention": "chunk_kimi_delta_attention",
}
_STATE_SPACE_STEP, _STATE_SPACE_SCAN = "mamba2_selective_state_update", "mamba2_chunk_scan"


def has_lone_tokens(tokens: TokenSlice) -> bool:
    """Returns whether a layer that carries a state computes some token alone: in its slice, or between documents."""
    begins = document_begins(tokens)
    cuts = [] if begins is None else begins.any(0).nonzero().flatten().tolist()
    places = sorted({0, *cuts, tokens.input_ids.shape[1]})
    return any(b - a == 1 for a, b in pairwise(places))


@contextmanager
def as_several_tokens(context: SliceContext, layers: Mapping[int, nn.Module]) -> Iterator[None]:
    """Makes the layers, by their numbers, compute lone tokens as they compute several, for one forward."""
    files = {sys.modules[type(module).__module__] for layer in layers.values() for module in layer.modules()}
    with ExitStack() as stack:
        for file in files:
            for name, general in _FOR_SEVERAL.items():
                if hasattr(file, name):
                    stack.enter_context(patch.object(file, name, getattr(file, general)))
            if hasattr(file, _STATE_SPACE_STEP):
                stack.enter_context(patch.object(file, _STATE_SPACE_STEP, partial(_scan_one_token, file, layers)))
        stack.enter_context(_AssignedStates(context))
        yield


def _scan_one_token(
    file: ModuleType,
    layers: Mapping[int, nn.Module],
    state: Tensor,  # (b, heads, d, n)
    hidden_states: Tensor,  # (b, heads, d)
    dt: Tensor,  # (b, heads, d), equal along d, as are A, D and dt_bias along all but heads
    A: Tensor,  # (heads, d, n)
    B: Tensor,  # (b, groups, n)
    C: Tensor,  # (b, groups, n)
    D: Tensor,  # (heads, d)
    *,
    dt_bias: Tensor,  # (heads, d)
    z: Tensor | None = None,  # (b, heads, d), of the gate
    **_: Any,
) -> Tensor:
    """Computes Mamba 2's step for one token as a scan over one token (Dao & Gu 2024, section 6): (b, heads, d)."""
    layer = layers[current_slice().layer]
    mixer: Any = next(module for module in layer.modules() if hasattr(module, "time_step_limit"))
    scan: Callable[..., tuple[Tensor, Tensor]] = getattr(file, _STATE_SPACE_SCAN)
    output, after = scan(
        hidden_states[:, None],
        dt[:, None, :, 0],
        A[:, 0, 0],
        B[:, None],
        C[:, None],
        chunk_size=mixer.chunk_size,
        D=D[:, 0],
        z=None,
        return_final_states=True,
        dt_bias=dt_bias[:, 0],
        dt_softplus=True,
        initial_states=state,
        dt_limit=mixer.time_step_limit,
    )
    state.copy_(after)
    return output[:, 0] if z is None else output[:, 0] * silu(z)


class _AssignedStates(TorchFunctionMode):
    """Takes `state.copy_(next)` as an assignment: the graph still needs the state before."""

    def __init__(self, context: SliceContext) -> None:
        super().__init__()
        self._context = context

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            for call, state in self._context.states.items():
                if args[0] is state:
                    self._context.change_state(call, args[1])
                    return state
        return func(*args, **(kwargs or {}))
