"""The cache that carries layers' states from slice to slice, their resets at documents, and slices of one token.

transformers generates text in pieces, and a piece learns from the cache how many tokens came before it. Some layers
take positions from there and not from `position_ids`: Llama 4 scales its queries by them where it has no rotary
embedding, and BART looks its position embeddings up. Keys and values are in the context store, so the cache returns
those of the slice as they come; to layers that attend by code of their own it returns those of all tokens so far. An
indexer's keys are there, too.

Others continue from what the tokens before left there: the last inputs of a convolution, or a recurrent state (Mamba 2,
the gated delta rule). These go from slice to slice, with their gradients in the other direction. Whatever else a layer
asks for is state that slices don't carry.

States are reset where a document begins. transformers' own code keeps packed documents apart only with kernels for
GPUs, so a slice is cut where a document of some row begins, and the carrier of the state runs on each part; everything
else in a layer runs on the whole slice.

Generating text computes one token with a past, and transformers has other code for it: it changes the state in place,
its kernels for GPUs have no backward, and where time steps have limits (Nemotron-H) it ignores them. Such a token takes
the code of several tokens here (`as_several_tokens`).
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple, NoReturn
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import Cache

from slipstream.attention import KeyRanges, read_prefix
from slipstream.errors import SlipstreamError
from slipstream.model.hooks.crossing_tensors import hidden_states
from slipstream.model.hooks.token_slice import SliceContext, TokenSlice, current_slice

CACHE_NAMES = ("past_key_values", "cache_params", "state")  # models' names for the cache's argument
_INDEXER = "an indexer's keys, which select blocks that a query sees (sparse attention)"
_STATES = {  # attribute of a layer's part of the cache -> its state, carried from token to token
    "conv_states": "the window of a convolution",
    "recurrent_states": "a recurrent state",
    "update_index": _INDEXER,
    "indexer_keys": _INDEXER,
    "update_compressor": "compressed keys and values",
}


def cache_name(model: nn.Module) -> str:
    """Returns how the model's forward calls the cache."""
    parameters = inspect.signature(type(model).forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), CACHE_NAMES[0])


class CachedAttention(NamedTuple):
    """The owner of keys and values in the cache: one of a layer's attentions."""

    layer: int
    number: int  # number of the call within one forward


class CarriedState(NamedTuple):
    """The carrier of a state: one of a layer's convolutions or recurrences."""

    layer: int
    kind: str
    number: int  # among those of its kind


class IndexerKeys(NamedTuple):
    """The owner of keys by which queries select others: a layer's indexer."""

    layer: int


class SliceCache(Cache):  # type: ignore[misc]
    """The past of a slice whose first token here is `start`.

    Unless the model attends by code of its own, the slice's tokens alone are its keys: masks are made elsewhere.
    """

    is_compileable = False
    is_sliding: tuple[bool, ...] = ()
    is_linear: tuple[bool, ...] = ()
    is_dummy: tuple[bool, ...] = ()

    def __init__(self, context: SliceContext) -> None:
        # super().__init__() isn't called, as it makes a list of layers.
        self._context = context
        self.start = context.token_slice.first

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of tokens before the slice."""
        return self.start

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[Any, int]:
        """Returns the number of keys and the first one's offset, of a mask that `sliced_mask` otherwise replaces."""
        return (self.start + query_length if self._context.reads_prefixes else query_length), 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Returns the first query's offset within these keys."""
        return self.start if self._context.reads_prefixes else 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns the slice's keys and values (b, heads, T, d), which `sliced_attention` adds to the store.

        Where layers attend by code of their own, it adds them, and returns those of all tokens up to the slice's end.
        """
        context = self._context
        if not context.reads_prefixes:
            return key_states, value_states
        context.refuse_shared("keys and values that its own code attends to")
        call = CachedAttention(*context.next_call(layer_idx))
        return read_prefix(key_states, value_states, context.store, call, context.prefix_ranges)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns the last inputs (b, channels, kernel - 1) of a convolution before the slice, None at the start."""
        return self._context.state(CarriedState(layer_idx, "convolution", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Returns the slice's inputs (b, channels, T) with those of `get_conv_state` before them, and keeps the last.

        A kernel of k tokens needs k - 1 before the slice; a sequence's first tokens get zeros, as in the convolution's
        own padding. Without `conv_kernel_size` the inputs are the window itself.
        """
        call = CarriedState(layer_idx, "convolution", state_idx)
        if conv_kernel_size is None:
            self._context.change_state(call, conv_states)
            return conv_states
        window = self._context.state(call)
        inputs = conv_states if window is None else torch.cat([window, conv_states], dim=-1)
        missing = max(0, conv_kernel_size - 1 - inputs.shape[-1])
        padded = pad(inputs, (missing, 0)) if missing else inputs
        self._context.change_state(call, padded[..., padded.shape[-1] - (conv_kernel_size - 1) :])
        return inputs

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns the state after the slice before, None at the start of a sequence."""
        return self._context.state(CarriedState(layer_idx, "recurrence", state_idx))

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Keeps the state after the slice."""
        self._context.change_state(CarriedState(layer_idx, "recurrence", state_idx), recurrent_states)
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Returns MiniMax's sum of keys times values after the slice before, None at the start of a sequence."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Keeps the state of linear attention after the slice."""
        self.update_recurrent_state(linear_cache, layer_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Returns whether there are tokens before the slice."""
        return self.start > 0

    def is_recording_past(self, layer_idx: int) -> bool:
        """Returns True: a slice of one token, too, keeps a new window and changes none in place."""
        return True

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Adds a slice's keys (b, T, d) to those by which an indexer selects; returns them, (b, length, d).

        They have no gradient. Like a static cache's they are as many as the sequence has tokens, and a mask hides those
        that aren't there yet: among equal scores it depends on their number which are selected.
        """
        context = self._context
        context.refuse_shared(_INDEXER)
        tokens, keys = context.token_slice, indexer_key_states.detach()[:, None]  # (b, 1, T, d)
        ranges = KeyRanges.causal(tokens.start, tokens.end)
        buffer, _ = context.store.write(IndexerKeys(layer_idx), keys, keys[..., :0], ranges)
        return buffer[:, 0]

    @property
    def rnn_state(self) -> defaultdict[int, tuple[Any, ...]]:
        """Returns xLSTM's states of each layer: none, as its blocks are given theirs by `initial_states`."""
        return defaultdict(tuple)

    @property
    def layers(self) -> _NoLayers:
        """An object that raises SlipstreamError as soon as a layer asks its part of the cache for anything."""
        return _NoLayers()


class _NoLayers:
    def __getitem__(self, layer: int) -> _NoLayer:
        return _NoLayer()

    def __len__(self) -> int:
        return 0


class _NoLayer:
    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse_state(_STATES.get(name, f"{name!r}, which transformers caches for it"))


def refuse_state(state: str) -> NoReturn:
    """Raises SlipstreamError that says which layer carries `state` from token to token."""
    raise SlipstreamError(f"layer {current_slice().layer} carries {state} from token to token, which slices don't")


@contextmanager
def recorded_carriers(layers: Iterable[nn.Module]) -> Iterator[list[nn.Module]]:
    """Collects the modules that carry states in a forward: the innermost ones that are given the cache."""
    carriers: list[nn.Module] = []
    noted: set[Hashable] = set()

    def note(module: nn.Module, *_: Any) -> None:
        if new := current_slice().changed_states - noted:
            carriers.append(module)
            noted.update(new)

    with ExitStack() as hooks:
        for module in (module for layer in layers for module in layer.modules()):
            if not inspect.signature(module.forward).parameters.keys().isdisjoint(CACHE_NAMES):
                hooks.enter_context(module.register_forward_hook(note))
        yield carriers


def by_document(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward that runs another one document by document."""
    return partial(_by_document, forward)


def _by_document(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    context = current_slice()
    begins = document_begins(context.token_slice)
    if begins is None:
        return forward(*args, **kwargs)
    length = hidden_states(args, kwargs).shape[1]
    outputs = []
    cuts = _document_cuts(begins, length)
    for a, b in pairwise(cuts):
        context.fresh_rows = begins[:, a]
        own_args, own_kwargs = tree_map(partial(_tokens, a, b, length), (args, kwargs))
        outputs.append(forward(*own_args, **own_kwargs))
    context.fresh_rows = None
    return _joined(outputs, [b - a for a, b in pairwise(cuts)])


def _joined(outputs: Sequence[Any], lengths: Sequence[int]) -> Any:
    """Returns a module's outputs for several parts joined into one, along the tokens of each tensor.

    It returns hidden states, or queries, keys and values in a tuple; values that aren't of tokens stay as after the
    last part.
    """
    last = outputs[-1]
    if isinstance(last, (tuple, list)):
        return type(last)(_joined(items, lengths) for items in zip(*outputs, strict=True))
    is_per_token = all(isinstance(output, Tensor) and output.dim() > 1 for output in outputs)
    if is_per_token and [output.shape[1] for output in outputs] == [*lengths]:
        return torch.cat([*outputs], dim=1)
    return last


def document_begins(tokens: TokenSlice) -> Tensor | None:
    """Returns which tokens (b, T) begin a document; None where none does."""
    if tokens.document_start is None:
        return None
    positions = torch.arange(tokens.start, tokens.end, device=tokens.document_start.device)
    begins = tokens.document_start == positions
    return begins if begins.any() else None


def _document_cuts(begins: Tensor | None, length: int) -> list[int]:
    """Returns the slice's start, where documents of some row begin inside of it, and its end."""
    inner = [] if begins is None else begins.any(0).nonzero().flatten().tolist()
    return sorted({0, *inner, length})


def _tokens(begin: int, end: int, length: int, value: Any) -> Any:
    """Returns these tokens of a tensor (b, T, ...), and anything else as it is."""
    is_per_token = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length
    return value[:, begin:end] if is_per_token else value


_FOR_SEVERAL = {  # transformers' function for one token -> for several, with the same arguments
    "torch_recurrent_gated_delta_rule": "torch_chunk_gated_delta_rule",
    "recurrent_kimi_delta_attention": "chunk_kimi_delta_attention",
}
_STATE_SPACE_STEP, _STATE_SPACE_SCAN = "mamba2_selective_state_update", "mamba2_chunk_scan"


def has_lone_tokens(tokens: TokenSlice) -> bool:
    """Returns whether a layer that carries a state computes some token alone: in its slice, or between documents."""
    cuts = _document_cuts(document_begins(tokens), tokens.input_ids.shape[1])
    return any(b - a == 1 for a, b in pairwise(cuts))


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
    dt: Tensor,  # (b, heads, d), equal along d; A, D and dt_bias are equal along all but heads
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
