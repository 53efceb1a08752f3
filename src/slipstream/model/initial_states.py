"""Makes layers continue from the states that the slice before left, where their own code begins tokens without one.

A kind of state is an adapter in `ADAPTERS`: it says which modules it matches, and runs their own forward from the
states of the slice. Resets at documents, gradients, replays and prefilled measurements follow from `SliceContext.state`
and `change_state`, by which it reads and leaves them.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
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


class StateAdapter(ABC):
    """Makes the modules of a kind begin with the state that the slice before left."""

    @abstractmethod
    def matches(self, module: nn.Module) -> bool:
        """Returns whether a module is of this kind."""

    @abstractmethod
    def run(self, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a module's own forward from the states before the slice, and leaves those after it."""

    def install(self, module: nn.Module) -> None:
        """Changes a module's forward, under its own signature, which says whether it is given the cache."""
        module.forward = update_wrapper(partial(self._forward, module, module.forward), module.forward)

    def _forward(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not current_slice().carries_states:
            return forward(*args, **kwargs)
        return self.run(module, forward, *args, **kwargs)


class GatedRecurrence(StateAdapter):
    """Continues the real-gated linear recurrent unit (De et al. 2024, Griffin, section 2.4).

        h_t = a_t h_{t-1} + sqrt(1 - a_t²) (i_t x_t)

    RecurrentGemma's own code begins with the state (b, width) that it finds in an attribute of the unit, and leaves the
    last one there, for generating text; training finds none.
    """

    def matches(self, module: nn.Module) -> bool:
        return hasattr(module, "_rnn_scan")

    def run(self, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        context = current_slice()
        call = CarriedState(context.layer, "recurrence", 0)
        module.recurrent_states = context.state(call)
        output: Tensor = forward(*args, **kwargs)
        context.change_state(call, module.recurrent_states)
        module.recurrent_states = None
        return output


class PaddedConvolution(StateAdapter):
    """Continues the convolution before such a unit, for which its block is changed.

    It pads the sequence's start itself: a kernel of k tokens is given k - 1 zeros on both sides, and of its outputs
    (b, channels, T + k - 1) the first T are taken, those of the inputs (b, channels, T).
    """

    def matches(self, module: nn.Module) -> bool:
        return any(hasattr(child, "_rnn_scan") for child in module.children())

    def install(self, module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.Conv1d):
                super().install(child)

    def run(self, module: Any, forward: Callable[..., Any], inputs: Tensor) -> Tensor:
        context = current_slice()
        kernel = module.kernel_size[0]
        joined = SliceCache(context).update_conv_state(inputs, context.layer, conv_kernel_size=kernel)
        output: Tensor = forward(joined)
        return output[..., joined.shape[-1] - inputs.shape[-1] :]


class LightningAttention(StateAdapter):
    """Continues lightning attention in blocks, as it begins: MiniMax's own code continues token by token.

    Qin et al. 2024, Lightning Attention-2, algorithm 1. With KV_0 from the slice before and a decay of e^-s a token

        KV_t = e^-s KV_{t-1} + k_t^T v_t        o_t = q_t KV_t

    is linear in its state, so a slice runs as if it began a sequence, and KV_0's part is known without a loop:

        o_t += e^-st q_t KV_0        KV_T += e^-sT KV_0
    """

    def matches(self, module: nn.Module) -> bool:
        return hasattr(module, "slope_rate") and hasattr(module, "qkv_proj")

    def run(self, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        cache = kwargs["past_key_values"]
        initial = cache.get_linear_cache(module.layer_idx)
        if initial is None:
            return forward(*args, **kwargs)
        past = _Past(module, initial, cache)
        queries = module.qkv_proj.register_forward_hook(past.note_queries)
        with queries, module.norm.register_forward_pre_hook(past.add):
            return forward(*args, **kwargs | {"past_key_values": past})


class _Past:
    """The contribution of the tokens before a slice; in place of the cache, it claims that there are none."""

    def __init__(self, attention: Any, initial: Tensor, cache: Cache) -> None:
        self._attention = attention
        self._cache = cache
        self._initial = initial  # (b, heads, d, d)

    def note_queries(self, _projection: nn.Module, _args: Any, projected: Tensor) -> None:
        """Takes the queries from the projection's output, (b, T, heads · 3 d)."""
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


class MatrixMemory(StateAdapter):
    """Continues xLSTM's matrix memory, its normalizer and the exponent that both are divided by.

    Beck et al. 2024, xLSTM: Extended Long Short-Term Memory, equations 19 to 27 (mLSTM), with the state of equation 15.
    transformers' blocks take and return it; the cache that its model keeps them in has no gradient.
    """

    NUM_STATES = 3  # memory (b, heads, dk, dv), normalizer (b, heads, dk), exponent (b, heads, 1)

    def matches(self, module: nn.Module) -> bool:
        return hasattr(module, "mlstm_layer")

    def run(self, module: Any, forward: Callable[..., Any], x: Tensor, *_: Any, **__: Any) -> Any:
        context = current_slice()
        calls = [CarriedState(context.layer, "matrix memory", index) for index in range(self.NUM_STATES)]
        states = [state for call in calls if (state := context.state(call)) is not None]
        output, after = forward(x, tuple(states) or None)
        for call, state in zip(calls, after, strict=True):
            context.change_state(call, state)
        return output, None


_Scan = Callable[..., Any]


class SelectiveScan(StateAdapter):
    """Continues Mamba 1's selective scan, which begins at zero in all kernels and in transformers' own code.

    With a diagonal A the recurrence of Gu & Dao 2023 (Mamba, equations 2a and 2b, discretised as in algorithm 2),

        h_t = exp(Δ_t A) h_{t-1} + Δ_t B_t x_t        y_t = C_t h_t

    is linear in its state, so the part of an initial state h_0 is known without another scan:

        y_t += C_t exp((Δ_1 + ... + Δ_t) A) h_0
        h_T = exp((Δ_1 + ... + Δ_T) A) h_0 + sum of exp((Δ_{t+1} + ... + Δ_T) A) Δ_t B_t x_t over t

    The last state is computed like this too, as the kernels for GPUs have no gradient of theirs.
    """

    SCAN = "mamba_selective_scan"  # the name in the files of Mamba, Falcon-Mamba, Jamba and Zamba

    def matches(self, module: nn.Module) -> bool:
        return hasattr(sys.modules[type(module).__module__], self.SCAN) and hasattr(module, "A_log")

    def run(self, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        cache = kwargs["cache_params"]
        file = sys.modules[type(module).__module__]
        states = _states_of_scans(cache.get_recurrent_state(module.layer_idx))
        own: _Scan = getattr(file, self.SCAN)

        def scan(*inputs: Any, return_last_state: bool, **settings: Any) -> tuple[Tensor, Tensor]:
            return scan_from(next(states), own, *inputs, **settings)

        with patch.object(file, self.SCAN, scan):
            output: Tensor = forward(*args, **kwargs | {"cache_params": _ForScans(cache)})
        return output


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
    # Summed from the end, where it matters most, so that small sums are exact.
    after = delta.flip(-1).cumsum(-1).flip(-1) - delta
    last = torch.einsum("bdtn,bdt,bnt->bdn", _decay(A, after), delta * x.float(), B.float())
    if initial is None:
        return output, last
    decay = _decay(A, delta.cumsum(-1))
    added = torch.einsum("bdtn,bdn,bnt->bdt", decay, initial, C.to(initial.dtype))
    return output + (added * silu(z)).to(output.dtype), last + decay[:, :, -1] * initial


def _decay(A: Tensor, delta: Tensor) -> Tensor:
    return torch.exp(delta[..., None] * A[None, :, None])


class TokenShift(StateAdapter):
    """Continues RWKV 4: the token before, which is mixed into each token, and the sums of its attention.

    Peng et al. 2023, RWKV: Reinventing RNNs for the Transformer Era, equations 11 to 18, and the stable form of the
    sums in appendix D: numerator, denominator and the exponent that both are divided by.

    transformers' blocks take such a state for several tokens, but keep all layers' states in five tensors that they
    change in place. Here a block is given five of its own.
    """

    # The kernel for GPUs has no gradient of the state.
    ATTENTION = "rwkv_linear_attention"
    NUM_SHIFTS = 2  # the token before, as seen by the feed-forward and by the attention
    NUM_STATES, EXPONENT = 5, 4  # further numerator, denominator and exponent of the attention's sums
    EMPTY_EXPONENT = -1e38

    def matches(self, module: nn.Module) -> bool:
        is_block = hasattr(getattr(module, "attention", None), "time_decay") and hasattr(module, "feed_forward")
        return is_block or hasattr(module, "layers_are_rescaled")

    def install(self, module: nn.Module) -> None:
        if hasattr(module, "layers_are_rescaled"):
            _keep_scale(module)
        else:
            super().install(module)
            _halve_in_evaluations(module)

    def run(self, module: Any, forward: Callable[..., Any], hidden: Tensor, *_: Any, **__: Any) -> Any:
        context = current_slice()
        calls = [CarriedState(context.layer, "token shift", index) for index in range(self.NUM_STATES)]
        is_lone = hidden.shape[1] == 1
        states = [
            _OwnState(self._state(module, hidden, context, call), is_token=is_lone and call.number < self.NUM_SHIFTS)
            for call in calls
        ]
        file = sys.modules[type(module).__module__]
        with patch.object(file, self.ATTENTION, getattr(file, f"{self.ATTENTION}_cpu")):
            output, *_ = forward(hidden, state=states)
        for call, state in zip(calls, states, strict=True):
            context.change_state(call, state.value)
        return output, None, None

    def _state(self, block: Any, hidden: Tensor, context: SliceContext, call: CarriedState) -> Tensor:
        """Returns a state (b, width), that of a sequence's start where there is none."""
        is_shift = call.number < self.NUM_SHIFTS
        empty = self.EMPTY_EXPONENT if call.number == self.EXPONENT else 0.0
        left = context.state(call, empty)
        if left is not None:
            return left
        width = hidden.shape[-1] if is_shift else block.attention.attention_hidden_size
        dtype = hidden.dtype if is_shift else torch.promote_types(hidden.dtype, torch.float32)
        return hidden.new_full((len(hidden), width), empty, dtype=dtype)


def _keep_scale(model: Any) -> None:
    """Keeps the model from halving its weights where it evaluates: gradients and exports would be those of others."""
    if model.layers_are_rescaled and len(model.blocks) > model.config.rescale_every > 0:
        raise SlipstreamError(
            f"the model has run in evaluation mode, for which it halves weights every {model.config.rescale_every} "
            "layers: load it again, or set rescale_every=0 in its configuration."
        )
    # RWKV compares this with model.training: None is equal to neither value, so it rescales every time.
    model.layers_are_rescaled = None


def _halve_in_evaluations(block: Any) -> None:
    """Halves the tensors that the model halves in evaluations, the hidden states after every few layers and all that is
    added to them afterwards: norms have an epsilon, so the loss is another one. A power of two rounds nothing."""
    every = block.config.rescale_every
    if every > 0:
        power = 2 ** (block.layer_id // every)
        for projection in (block.attention.output, block.feed_forward.value) if power > 1 else ():
            projection.register_forward_hook(partial(_divided, power))
        if (block.layer_id + 1) % every == 0:
            block.register_forward_hook(partial(_divided, 2))


def _divided(power: int, module: nn.Module, _args: Any, output: Any) -> Any:
    return None if module.training else with_first_output(output, first_output(output) / power)


class _OwnState:
    """A block's own column of a state (b, width, layers): (b, width), or (b, 1, width) in place of a lone token."""

    def __init__(self, value: Tensor, is_token: bool) -> None:
        self.value = value
        self._is_token = is_token

    def __getitem__(self, layers: tuple[slice, slice, int]) -> Tensor:
        return self.value[:, None] if self._is_token else self.value

    def __setitem__(self, layers: tuple[slice, slice, int], value: Tensor) -> None:
        self.value = value


ADAPTERS: list[StateAdapter] = [
    SelectiveScan(),
    GatedRecurrence(),
    PaddedConvolution(),
    LightningAttention(),
    TokenShift(),
    MatrixMemory(),
]


def give_initial_states(model: nn.Module) -> None:
    """Makes a model's layers continue, from now on, from the state that the slice before left, where they wouldn't."""
    computing = [module for module in model.modules() if not isinstance(module, Placeholder)]
    for module in computing:
        for adapter in ADAPTERS:
            if adapter.matches(module):
                adapter.install(module)
