"""The cache that layers are given with a token slice: it says where the slice begins, and stores nothing.

transformers generates text in pieces, and a piece learns from the cache how many tokens came before it. Some layers
take positions from there and not from `position_ids`: Llama 4 scales its queries by them where it has no rotary
embedding, and BART looks its position embeddings up. Keys and values are in the context store, so the cache returns
those of the slice as they come. Whatever else a layer asks it for is state that slices don't carry.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor
from transformers import Cache

from slipstream.errors import SlipstreamError
from slipstream.model.hooks.token_slice import current_slice

_CONVOLUTION = "the window of a convolution"
_RECURRENCE = "a recurrent state"
_INDEXER = "an indexer's keys, which select what a query sees (sparse attention)"
_STATES = {  # what a layer asks its part of the cache for -> the state that it carries from token to token
    "conv_states": _CONVOLUTION,
    "recurrent_states": _RECURRENCE,
    "update_indexer": _INDEXER,
    "update_index": _INDEXER,
    "indexer_keys": _INDEXER,
    "update_compressor": "compressed keys and values",
}


class SliceCache(Cache):  # type: ignore[misc]
    """The past of a slice that begins at token `start`. Its tokens alone are its keys: masks are made elsewhere."""

    is_compileable = False
    is_sliding: tuple[bool, ...] = ()
    is_linear: tuple[bool, ...] = ()
    is_dummy: tuple[bool, ...] = ()

    def __init__(self, start: int) -> None:
        self.start = start  # without super().__init__(), which makes a list of layers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of tokens before the slice."""
        return self.start

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[Any, int]:
        """Returns the number of keys and the first one's offset, of the mask that `sliced_mask` then replaces."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Returns the first query's offset within these keys."""
        return 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Returns the slice's keys and values (b, heads, T, d), which `sliced_attention` adds to the store."""
        return key_states, value_states

    def get_conv_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises SlipstreamError: a slice's first tokens would need the last ones before it."""
        refuse_state(_CONVOLUTION)

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises SlipstreamError: a slice would need the state after the one before it."""
        refuse_state(_RECURRENCE)

    def update_indexer(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises SlipstreamError: a slice's queries would choose among its own keys."""
        refuse_state(_INDEXER)

    update_conv_state = get_conv_state
    update_recurrent_state = has_previous_state = get_recurrent_state

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
