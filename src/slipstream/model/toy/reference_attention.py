"""The unsliced model's attention for comparisons: its own eager code, without the rounding to float32 inside."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

NAME = "slipstream_reference"


_attending: ContextVar[list[nn.Module] | None] = ContextVar("slipstream_attending", default=None)


@contextmanager
def recorded_attention() -> Iterator[list[nn.Module]]:
    """Collects the modules that attend through the interface, in order."""
    modules: list[nn.Module] = []
    token = _attending.set(modules)
    try:
        yield modules
    finally:
        _attending.reset(token)


def register() -> None:
    """Makes `attn_implementation="slipstream_reference"` known to transformers."""
    AttentionInterface.register(NAME, _reference_attention)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def _reference_attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Calls what the model's own file calls eager attention, so that it applies every switch that we might miss."""
    attending = _attending.get()
    if attending is not None:
        attending.append(module)
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", sdpa_attention_forward)
    with full_precision():
        return own(module, *args, **kwargs)  # type: ignore[no-any-return]


@contextmanager
def full_precision() -> Iterator[None]:
    """Keeps float64 where models' own code rounds to float32: softmax of attention and router, some norms.

    Rounding inside hides every difference below about 1e-7; a comparison under this context shows it.
    """
    softmax, to_float, to, matmul = nn.functional.softmax, Tensor.float, Tensor.to, Tensor.__matmul__

    def wide_softmax(tensor: Tensor, dim: int, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return softmax(tensor, dim=dim, dtype=tensor.dtype if tensor.dtype == torch.float64 else dtype)

    def wide_float(tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype == torch.float64 else to_float(tensor)

    def wide_to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tensor.dtype == torch.float64:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {key: torch.float64 if arg is torch.float32 else arg for key, arg in kwargs.items()}
        return to(tensor, *args, **kwargs)

    def wide_matmul(left: Tensor, right: Tensor) -> Tensor:
        """Multiplies rotary frequencies that stayed float64 by positions, whole numbers that became float32."""
        wide = torch.promote_types(left.dtype, right.dtype)
        return matmul(left.to(wide), right.to(wide))

    with (
        patch.object(nn.functional, "softmax", wide_softmax),
        patch.object(Tensor, "float", wide_float),
        patch.object(Tensor, "to", wide_to),
        patch.object(Tensor, "__matmul__", wide_matmul),
    ):
        yield
