r"""The fused attention kernels of a GPU, on a slice with a regular mask: FlashAttention in one call, cuDNN's in two.

Both return the log-sum-exp, so that parts can be merged, and take that of the merged parts in backward. FlashAttention
aligns causal masks and windows lower-right, as a slice needs them. cuDNN's kernel, as PyTorch offers it, aligns them
upper-left; so a slice is its past, which every query sees whole, and its own keys, a causal square:

             first     start     end
               |---------|----|----|
               |         | \       |     F: two outputs, merged by their log-sum-exps
               |  past   |    \    |     B: each part with the merged output and log-sum-exp
               |         |       \ |
               |---------|---------|
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream.attention.backend import QueryState
from slipstream.attention.kernel_passes import KeyGradients, merged
from slipstream.attention.masks import RegularMask

_log = logging.getLogger(__name__)
_aten = torch.ops.aten


class FusedKernel(Protocol):
    """Attention under a regular mask, of whose keys it is given all; tensors are (B, heads, tokens, D)."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: RegularMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Returns the output, in the query's dtype, and the log-sum-exp (B,H,T), float32."""
        ...

    def backward(
        self, queries: QueryState, key: Tensor, value: Tensor, mask: RegularMask, scale: float
    ) -> tuple[Tensor, list[KeyGradients]]:
        """Returns the query's gradient, in its dtype, and those of the keys and values, in parts."""
        ...


def _tokens_first(*tensors: Tensor) -> list[Tensor]:
    return [tensor.transpose(1, 2) for tensor in tensors]


def _heads_first(grad_query: Tensor, grad_key: Tensor, grad_value: Tensor) -> tuple[Tensor, list[KeyGradients]]:
    return grad_query.transpose(1, 2), [KeyGradients(0, grad_key.transpose(1, 2), grad_value.transpose(1, 2))]


class FlashKernel:
    """FlashAttention as PyTorch has it: version 2, unless another one was activated."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: RegularMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `FusedKernel`."""
        settings = self._settings(query, key, mask, scale)
        inputs = _tokens_first(query, key, value)
        output, logsumexp, *_ = _aten._flash_attention_forward(*inputs, return_debug_mask=False, **settings)
        return output.transpose(1, 2), logsumexp

    def backward(
        self, queries: QueryState, key: Tensor, value: Tensor, mask: RegularMask, scale: float
    ) -> tuple[Tensor, list[KeyGradients]]:
        """See `FusedKernel`."""
        query, output, logsumexp, grad_output = queries
        no_dropout = query.new_empty(0)  # instead of its random state
        tensors = *_tokens_first(grad_output, query, key, value, output), logsumexp.contiguous()
        settings = self._settings(query, key, mask, scale) | {"rng_state": no_dropout, "unused": no_dropout}
        return _heads_first(*_aten._flash_attention_backward(*tensors, **settings))

    def _settings(self, query: Tensor, key: Tensor, mask: RegularMask, scale: float) -> dict[str, Any]:
        """Returns the keyword arguments that the forward and the backward kernel have in common."""
        return {
            "cum_seq_q": None,
            "cum_seq_k": None,
            "max_q": query.shape[2],
            "max_k": key.shape[2],
            "dropout_p": 0.0,
            "is_causal": mask.has_own,
            "scale": scale,
            "window_size_left": None if mask.window is None else mask.window - 1,
            "window_size_right": 0 if mask.has_own else None,
        }


class CudnnKernel:
    """cuDNN's fused attention: causal masks without a window, of heads of up to 128 numbers."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: RegularMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `FusedKernel`."""
        if not mask.has_own:
            return self._part(query, key, value, False, scale)
        output, logsumexp = self._part(query, key[:, :, mask.past :], value[:, :, mask.past :], True, scale)
        if not mask.past:
            return output, logsumexp
        past, past_logsumexp = self._part(query, key[:, :, : mask.past], value[:, :, : mask.past], False, scale)
        return merged(output, logsumexp, past, past_logsumexp)

    def backward(
        self, queries: QueryState, key: Tensor, value: Tensor, mask: RegularMask, scale: float
    ) -> tuple[Tensor, list[KeyGradients]]:
        """See `FusedKernel`."""
        if not mask.has_own:
            grad_query, gradients = self._part_backward(queries, key, value, slice(0, None), False, scale)
            return grad_query, [gradients]
        grad_query, slice_gradients = self._part_backward(queries, key, value, slice(mask.past, None), True, scale)
        if not mask.past:
            return grad_query, [slice_gradients]
        more, past = self._part_backward(queries, key, value, slice(0, mask.past), False, scale)
        return grad_query.add_(more), [slice_gradients, past]

    def _part(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        output, logsumexp, *_ = _aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, is_causal, False, scale=scale
        )
        return output, logsumexp.squeeze(-1)

    def _part_backward(
        self, queries: QueryState, key: Tensor, value: Tensor, keys: slice, is_causal: bool, scale: float
    ) -> tuple[Tensor, KeyGradients]:
        query, out, lse, grad_out = queries
        key, value = key[:, :, keys], value[:, :, keys]
        no_dropout = torch.empty((), dtype=torch.int64, device=query.device)  # instead of its random state
        lengths = None, None, query.shape[2], key.shape[2]
        grad_query, grad_key, grad_value = _aten._scaled_dot_product_cudnn_attention_backward(
            grad_out,
            query,
            key,
            value,
            out,
            lse.contiguous()[..., None],
            no_dropout,
            no_dropout,
            None,
            *lengths,
            0.0,
            is_causal,
            scale=scale,
        )
        return grad_query, KeyGradients(keys.start, grad_key, grad_value)


class HeadsApart:
    """A kernel whose gradients of keys are those of each query head by itself, of one sequence.

    Where several query heads share a key head, a kernel rounds the gradient of each, and again their sum. Here the
    heads of a group are rows of a batch that see the same keys, and `add_gradients` sums them before it rounds.
    """

    def __init__(self, kernel: FusedKernel) -> None:
        self.kernel = kernel
        self.forward = kernel.forward

    def backward(
        self, queries: QueryState, key: Tensor, value: Tensor, mask: RegularMask, scale: float
    ) -> tuple[Tensor, list[KeyGradients]]:
        """See `FusedKernel`."""
        (rows, heads, length, width) = queries.query.shape
        key_heads = key.shape[1]
        if rows > 1:
            return self.kernel.backward(queries, key, value, mask, scale)
        # (G,Hkv,T,..): query head h reads key head h // G
        apart = (tensor.view(key_heads, -1, *tensor.shape[2:]).transpose(0, 1) for tensor in queries)
        key, value = (tensor.expand(heads // key_heads, -1, -1, -1) for tensor in (key, value))
        grad_query, parts = self.kernel.backward(QueryState(*apart), key, value, mask, scale)
        return grad_query.permute(2, 1, 0, 3).reshape(rows, length, heads, width).transpose(1, 2), parts


class Flash3Kernel:
    """FlashAttention-3 for Hopper, by the operators that the package flash_attn_interface registers."""

    def __init__(self, package: Any) -> None:
        # Importing the package has registered these operators.
        self._ops = torch.ops.flash_attn_3
        if not hasattr(self._ops, "fwd") or not hasattr(self._ops, "bwd"):
            raise ImportError(f"{package.__name__} has no operators flash_attn_3.fwd and bwd")

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: RegularMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `FusedKernel`."""
        output, logsumexp, *_ = self._ops.fwd(*_tokens_first(query, key, value), **self._settings(mask, scale))
        return output.transpose(1, 2), logsumexp

    def backward(
        self, queries: QueryState, key: Tensor, value: Tensor, mask: RegularMask, scale: float
    ) -> tuple[Tensor, list[KeyGradients]]:
        """See `FusedKernel`."""
        query, output, logsumexp, grad_output = queries
        inputs = _tokens_first(query, key, value)
        gradients = [torch.empty_like(tensor) for tensor in inputs]
        self._ops.bwd(
            *_tokens_first(grad_output),
            *inputs,
            *_tokens_first(output),
            logsumexp.contiguous(),
            **dict(zip(("dq", "dk", "dv"), gradients, strict=True)),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._settings(mask, scale),
        )
        return _heads_first(*gradients)

    def _settings(self, mask: RegularMask, scale: float) -> dict[str, Any]:
        left = -1 if mask.window is None else mask.window - 1
        right = 0 if mask.has_own else -1
        return {
            "softmax_scale": scale,
            "is_causal": mask.has_own,
            "window_size_left": left,
            "window_size_right": right,
        }


class Flash4Kernel:
    """FlashAttention-4 for Hopper and Blackwell, by the functions of its module; compiled when it first runs."""

    def __init__(self, package: Any) -> None:
        self._forward: Callable[..., tuple[Tensor, Tensor]] = package._flash_attn_fwd
        self._backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = package._flash_attn_bwd

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: RegularMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `FusedKernel`."""
        inputs = _tokens_first(query, key, value)
        output, logsumexp = self._forward(*inputs, return_lse=True, **self._settings(mask, scale))
        return output.transpose(1, 2), logsumexp

    def backward(
        self, queries: QueryState, key: Tensor, value: Tensor, mask: RegularMask, scale: float
    ) -> tuple[Tensor, list[KeyGradients]]:
        """See `FusedKernel`."""
        query, output, logsumexp, grad_output = queries
        tensors = _tokens_first(query, key, value, output, grad_output)
        return _heads_first(*self._backward(*tensors, logsumexp.contiguous(), **self._settings(mask, scale)))

    def _settings(self, mask: RegularMask, scale: float) -> dict[str, Any]:
        window = {} if mask.window is None else {"window_size_left": mask.window - 1, "window_size_right": 0}
        return {"softmax_scale": scale, "causal": mask.has_own, **window}


class _Package(NamedTuple):
    """An installed module, and the major compute capabilities for which it has kernels."""

    module: str
    capabilities: tuple[int, ...]
    kernel: Callable[[Any], FusedKernel]
    is_deterministic: bool


_PACKAGES: Mapping[str, _Package] = {
    "flash 3": _Package("flash_attn_interface", (9,), Flash3Kernel, is_deterministic=True),
    "flash 4": _Package("flash_attn.cute.interface", (9, 10), Flash4Kernel, is_deterministic=False),
}


def package_kernels(capability: int) -> dict[str, FusedKernel]:
    """Returns, by name, the kernels of installed packages that a GPU of this major compute capability can run now."""
    must_repeat = torch.are_deterministic_algorithms_enabled()
    usable = {
        name: _installed(name)
        for name, package in _PACKAGES.items()
        if capability in package.capabilities and (package.is_deterministic or not must_repeat)
    }
    return {name: kernel for name, kernel in usable.items() if kernel is not None}


@cache
def _installed(name: str) -> FusedKernel | None:
    """Returns a package's kernel, or None where it isn't installed or can't be imported."""
    package = _PACKAGES[name]
    try:
        if find_spec(package.module.partition(".")[0]) is None:
            return None
        return package.kernel(importlib.import_module(package.module))
    # A package may raise anything.
    except Exception as error:
        _log.info("FlashAttention of %s isn't used: %s: %s", package.module, type(error).__name__, error)
        return None
