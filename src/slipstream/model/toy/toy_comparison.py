"""Runs whole toys by their own eager code, without the rounding to float32 inside, and measures others' errors."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._device import _device_constructors
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from slipstream.model.hooks.attention_interface import POSITION_BIAS

REFERENCE_ATTENTION = "slipstream_reference"
_attending: ContextVar[list[nn.Module] | None] = ContextVar("slipstream_attending", default=None)


@contextmanager
def recorded_attention() -> Iterator[list[nn.Module]]:
    """Collects the modules that attend through the interface with what attention here knows, in order."""
    modules: list[nn.Module] = []
    token = _attending.set(modules)
    try:
        yield modules
    finally:
        _attending.reset(token)


def attends_itself(
    model: PreTrainedModel, layers: Sequence[nn.Module], tokens: Tensor, attended: list[nn.Module]
) -> bool:
    """Returns whether some layer keeps keys and values in the cache that it doesn't attend to through the interface.

    `attended` are the modules that do, in a forward without a cache.
    """
    through_interface = {index for index, layer in enumerate(layers) if set(layer.modules()) & set(attended)}
    if len(through_interface) == len(layers):
        return False
    cache = _NotedUpdates(config=model.config)
    try:
        with torch.no_grad(), full_precision():
            model(input_ids=tokens, past_key_values=cache, use_cache=True)
    except Exception:  # the model's own code, which may have another cache or none
        return False
    return not cache.updated <= through_interface


class _NotedUpdates(DynamicCache):  # type: ignore[misc]
    """transformers' cache, which notes what layers add keys and values."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.updated: set[int] = set()

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.updated.add(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _reference_attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Calls what the model's own file calls eager attention, so that it applies every switch that we might miss."""
    attending = _attending.get()
    if attending is not None and kwargs.get(POSITION_BIAS) is None:
        attending.append(module)
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", sdpa_attention_forward)
    with full_precision():
        return own(module, *args, **kwargs)  # type: ignore[no-any-return]


AttentionInterface.register(REFERENCE_ATTENTION, _reference_attention)
AttentionMaskInterface.register(REFERENCE_ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


@contextmanager
def full_precision() -> Iterator[None]:
    """Keeps float64 where models' own code rounds to float32: softmax of attention and router, some norms.

    Rounding inside hides every difference below about 1e-7; a comparison under this context shows it.
    """
    _device_constructors()  # PyTorch remembers those that it finds first, which must be its own, not these below
    softmax, matmul = nn.functional.softmax, Tensor.__matmul__
    total, zeros_like, full = torch.sum, torch.zeros_like, torch.full
    to_float, to, to_type = Tensor.float, Tensor.to, Tensor.type

    def wide_softmax(tensor: Tensor, dim: int, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return softmax(tensor, dim=dim, dtype=tensor.dtype if tensor.dtype == torch.float64 else dtype)

    def wide_float(tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype == torch.float64 else to_float(tensor)

    def wide_to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tensor.dtype == torch.float64:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {key: torch.float64 if arg is torch.float32 else arg for key, arg in kwargs.items()}
        return to(tensor, *args, **kwargs)

    def wide_type(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_rounding = tensor.dtype == torch.float64 and torch.float32 in (*args, *kwargs.values())
        return tensor if is_rounding else to_type(tensor, *args, **kwargs)

    def wide_sum(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tensor.dtype == torch.float64:
            kwargs = {key: torch.float64 if arg is torch.float32 else arg for key, arg in kwargs.items()}
        return total(tensor, *args, **kwargs)

    def wide_zeros_like(tensor: Tensor, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        """Makes what sums of float64 are added to in experts."""
        kept = tensor.dtype if tensor.dtype == torch.float64 and dtype == torch.float32 else dtype
        return zeros_like(tensor, dtype=kept, **kwargs)

    def wide_full(size: Any, fill_value: Any, **kwargs: Any) -> Tensor:
        """Makes a tensor of the smallest float64, by which models mask scores, although it isn't asked for float64."""
        wide = {"dtype": torch.float64} if fill_value == torch.finfo(torch.float64).min else {}
        return full(size, fill_value, **kwargs | wide)

    def wide_matmul(left: Tensor, right: Tensor) -> Tensor:
        """Multiplies rotary frequencies that stayed float64 by positions, whole numbers that became float32."""
        wide = torch.promote_types(left.dtype, right.dtype)
        return matmul(left.to(wide), right.to(wide))

    methods = patch.multiple(Tensor, float=wide_float, to=wide_to, type=wide_type, __matmul__=wide_matmul)
    functions = patch.multiple(torch, sum=wide_sum, zeros_like=wide_zeros_like, full=wide_full)
    with methods, functions, patch.object(nn.functional, "softmax", wide_softmax):
        yield


def output_weights(output: Tensor) -> Tensor:
    """Returns fixed random weights of a toy's output, so that each of its numbers counts in the gradients."""
    return torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1))


def relative_errors(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], floor: float = 0.0
) -> dict[str, float]:
    """Returns each tensor's largest error over its largest number, or over `floor` of the largest number of all."""
    largest = {name: each.abs().max() for name, each in expected.items()}
    least = floor * max(largest.values())
    return {n: float((found[n] - each).abs().max() / max(largest[n], least)) for n, each in expected.items()}
