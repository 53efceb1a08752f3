"""The cache that layers are given with a token slice: it says where the slice begins, and carries their states.

transformers generates text in pieces, and a piece learns from the cache how many tokens came before it. Some layers
take positions from there and not from `position_ids`: Llama 4 scales its queries by them where it has no rotary
embedding, and BART looks its position embeddings up. Keys and values are in the context store, so the cache returns
those of the slice as they come; to layers that attend by code of their own it returns those of all tokens so far. An
indexer's keys are there, too.

Others continue from what the tokens before left there: the last inputs of a convolution, or a recurrent state (Mamba 2,
the gated delta rule). These go from slice to slice, with their gradients in the other direction. Whatever else a layer
asks for is state that slices don't carry.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache

from slipstream.attention import KeyRanges, read_prefix
from slipstream.errors import SlipstreamError
from slipstream.model.hooks.token_slice import SliceContext, current_slice

CACHE_NAMES = ("past_key_values", "cache_params", "state")  # how models and their parts call the argument
_INDEXER = "an indexer's keys, which select blocks that a query sees (sparse attention)"
_STATES = {  # what a layer asks its part of the cache for -> the state that it carries from token to token
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
    """What keeps keys and values in the cache: one of a layer's attentions."""

    layer: int
    number: int  # in one forward


class CarriedState(NamedTuple):
    """What carries a state: one of a layer's convolutions or recurrences."""

    layer: int
    kind: str
    number: int  # among those of its kind


class IndexerKeys(NamedTuple):
    """What keeps keys by which queries select others: a layer's indexer."""

    layer: int


class SliceCache(Cache):  # type: ignore[misc]
    """The past of a slice that begins at token `start`.

    Unless the model attends by code of its own, the slice's tokens alone are its keys: masks are made elsewhere.
    """

    is_compileable = False
    is_sliding: tuple[bool, ...] = ()
    is_linear: tuple[bool, ...] = ()
    is_dummy: tuple[bool, ...] = ()

    def __init__(self, context: SliceContext) -> None:
        self._context = context  # without super().__init__(), which makes a list of layers
        self.start = context.token_slice.start

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
        call = CachedAttention(*context.next_call(layer_idx))
        return read_prefix(key_states, value_states, context.store, call, context.prefix_ranges)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns the last inputs (b, channels, kernel - 1) of a convolution before the slice, None at the start."""
        return self._context.state(CarriedState(layer_idx, "convolution", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Returns the slice's inputs (b, channels, T) with those of `get_conv_state` before them, and keeps the last.

        A kernel of k tokens needs k - 1 before the slice; what a sequence's first tokens lack are zeros, as in the
        convolution's own padding. Without `conv_kernel_size` the inputs are the window itself.
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
        """Keeps it after the slice."""
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
        """What raises SlipstreamError as soon as a layer asks its part of the cache for anything."""
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
