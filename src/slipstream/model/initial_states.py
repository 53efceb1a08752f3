"""Gives recurrences an initial state where their own code begins several tokens without one.

Continues the real-gated linear recurrent unit, and the convolution before it (De et al. 2024, Griffin, section 2.4).

    h_t = a_t h_{t-1} + sqrt(1 - a_t²) (i_t x_t)

RecurrentGemma's own code begins with the state that it finds in an attribute of the unit, and leaves the last one
there, for generating text; training finds none. Its convolution pads the sequence's start itself: a kernel of k tokens
is given k - 1 zeros on both sides, and the first T outputs are taken.

Continues lightning attention in blocks, as it begins: MiniMax's own code continues from a state token by token.

Qin et al. 2024, Lightning Attention-2, algorithm 1. With KV_0 from the slice before and a decay of e^-s for each token

    KV_t = e^-s KV_{t-1} + k_t^T v_t        o_t = q_t KV_t

is linear in its state, so a slice runs as if it began a sequence, and what KV_0 adds is known without a loop:

    o_t += e^-st q_t KV_0        KV_T += e^-sT KV_0

Continues xLSTM's matrix memory, its normalizer and the exponent that both are divided by.

Beck et al. 2024, xLSTM: Extended Long Short-Term Memory, equations 19 to 27 (mLSTM), with the state of equation 15.
transformers' blocks take and return it; the cache that its model keeps them in has no gradient.

Continues Mamba 1's selective scan, which begins at zero in all kernels and in transformers' own code.

With a diagonal A the recurrence of Gu & Dao 2023 (Mamba, equations 2a and 2b, discretised as in algorithm 2),

    h_t = exp(Δ_t A) h_{t-1} + Δ_t B_t x_t        y_t = C_t h_t

is linear in its state, so what an initial state h_0 adds is known without another scan:

    y_t += C_t exp((Δ_1 + ... + Δ_t) A) h_0
    h_T = exp((Δ_1 + ... + Δ_T) A) h_0 + sum of exp((Δ_{t+1} + ... + Δ_T) A) Δ_t B_t x_t over t

The last state is computed like this too, as the kernels for GPUs have no gradient of theirs.

Continues RWKV 4: the token before, which is mixed into each token, and the sums of its attention.

Peng et al. 2023, RWKV: Reinventing RNNs for the Transformer Era, equations 11 to 18, and the stable form of the sums in
appendix D: numerator, denominator and the exponent that both are divided by.

transformers' blocks take such a state for several tokens, but keep all layers' states in five tensors that they change
in place. Here a block is given five of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial, update_wrapper
from itertools import repeat
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus
from transformers import Cache

from slipstream.errors import SlipstreamError
from slipstream.model.cutting import Placeholder
from slipstream.model.hooks.crossing_tensors import first_output, with_first_output
from slipstream.model.hooks.slice_cache import CarriedState, SliceCache
from slipstream.model.hooks.token_slice import SliceContext, current_slice


def continue_gated_recurrence(block: nn.Module) -> None:
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


def continue_lightning_attention(module: nn.Module) -> None:
    """Makes a lightning attention begin in blocks where it has a state."""
    if hasattr(module, "slope_rate") and hasattr(module, "qkv_proj"):
        module.forward = update_wrapper(partial(_run_lightning_attention, module, module.forward), module.forward)


def _run_lightning_attention(attention: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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


_NUM_MEMORY_STATES = 3  # memory (b, heads, dk, dv), normalizer (b, heads, dk), exponent (b, heads, 1)


def continue_matrix_memory(block: nn.Module) -> None:
    """Makes an xLSTM block begin with the state that the slice before left."""
    if hasattr(block, "mlstm_layer"):
        block.forward = update_wrapper(partial(_run_matrix_memory, block.forward), block.forward)


def _run_matrix_memory(forward: Callable[..., Any], x: Tensor, *_: Any, **__: Any) -> Any:
    context = current_slice()
    if not context.carries_states:
        return forward(x)
    calls = [CarriedState(context.layer, "matrix memory", number) for number in range(_NUM_MEMORY_STATES)]
    states = [state for call in calls if (state := context.state(call)) is not None]
    output, after = forward(x, tuple(states) or None)
    for call, state in zip(calls, after, strict=True):
        context.change_state(call, state)
    return output, None


_SCAN = "mamba_selective_scan"  # in the files of Mamba, Falcon-Mamba, Jamba and Zamba
_Scan = Callable[..., Any]


def continue_selective_scan(module: nn.Module) -> None:
    """Makes a mixer that calls the scan begin with the state in its cache."""
    if hasattr(sys.modules[type(module).__module__], _SCAN) and hasattr(module, "A_log"):
        scanning = partial(_scan_from_cache, module, module.forward)
        # under its own signature, which says that it is given the cache
        module.forward = update_wrapper(scanning, module.forward)


def _scan_from_cache(mixer: Any, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    cache = kwargs.get("cache_params")
    if cache is None:
        return forward(*args, **kwargs)  # a whole sequence
    file, states = sys.modules[type(mixer).__module__], _states_of_scans(cache.get_recurrent_state(mixer.layer_idx))
    own: _Scan = getattr(file, _SCAN)

    def scan(*inputs: Any, return_last_state: bool, **settings: Any) -> tuple[Tensor, Tensor]:
        return scan_from(next(states), own, *inputs, **settings)

    with patch.object(file, _SCAN, scan):
        return forward(*args, **kwargs | {"cache_params": _ForScans(cache)})


class _ForScans:
    """A cache that keeps its recurrent states to itself, so that a token alone is scanned as well."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _states_of_scans(state: Tensor | None) -> Iterator[Tensor | None]:
    """Yields the state (b, d, n) of each scan of a mixer: Zamba's has one for each of its heads, (b, heads, d, n)."""
    if state is None:
        return repeat(None)
    return iter([state] if state.dim() == 3 else state.unbind(1))


def scan_from(
    initial: Tensor | None,  # (b, d, n)
    own: _Scan,
    x: Tensor,  # (b, d, T)
    dt: Tensor,  # (b, d, T)
    A: Tensor,  # (d, n)
    B: Tensor,  # (b, n, T)
    C: Tensor,  # (b, n, T)
    *,
    z: Tensor,  # (b, d, T), of the gate
    delta_bias: Tensor | None,
    delta_softplus: bool,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """Returns a scan's output (b, d, T) and last state (b, d, n), given the state before it."""
    biases = {"delta_bias": delta_bias, "delta_softplus": delta_softplus}
    output: Tensor = own(x, dt, A, B, C, z=z, return_last_state=False, **biases, **settings)
    biased = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    delta = (softplus(biased) if delta_softplus else biased).float()
    after = delta.flip(-1).cumsum(-1).flip(-1) - delta  # from the end, where it counts, so that small sums are exact
    last = torch.einsum("bdtn,bdt,bnt->bdn", _decay(A, after), delta * x.float(), B.float())
    if initial is None:
        return output, last
    decay = _decay(A, delta.cumsum(-1))
    added = torch.einsum("bdtn,bdn,bnt->bdt", decay, initial, C.to(initial.dtype))
    return output + (added * silu(z)).to(output.dtype), last + decay[:, :, -1] * initial


def _decay(A: Tensor, delta: Tensor) -> Tensor:
    """Returns exp(ΔA), (b, d, T, n)."""
    return torch.exp(delta[..., None] * A[None, :, None])


_ATTENTION = "rwkv_linear_attention"  # on a GPU its kernel has no gradient of the state
_NUM_SHIFTS = 2  # the token before, as the feed-forward and as the attention saw it
_NUM_SHIFT_STATES, _EXPONENT = 5, 4  # further numerator, denominator and exponent of the attention's sums
_EMPTY_EXPONENT = -1e38


def continue_token_shift(module: nn.Module) -> None:
    """Makes an RWKV block begin with the state that the slice before left."""
    if hasattr(getattr(module, "attention", None), "time_decay") and hasattr(module, "feed_forward"):
        module.forward = update_wrapper(partial(_run_token_shift, module, module.forward), module.forward)
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


def _run_token_shift(block: Any, forward: Callable[..., Any], hidden: Tensor, *_: Any, **__: Any) -> Any:
    context = current_slice()
    if not context.carries_states:
        return forward(hidden)
    calls = [CarriedState(context.layer, "token shift", number) for number in range(_NUM_SHIFT_STATES)]
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


_FEATURES = (
    continue_selective_scan,
    continue_gated_recurrence,
    continue_lightning_attention,
    continue_token_shift,
    continue_matrix_memory,
)


def give_initial_states(model: nn.Module) -> None:
    """Makes a model's layers continue, from now on, from what the slice before left, where their own code wouldn't."""
    computing = (module for module in model.modules() if not isinstance(module, Placeholder))
    for module in computing:
        for continue_from_state in _FEATURES:
            continue_from_state(module)
