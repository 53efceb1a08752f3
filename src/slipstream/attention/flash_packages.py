"""FlashAttention-3 and -4 of installed packages: a slice takes one call, as they align masks lower-right."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.attention.attention_backend import QueryState
from slipstream.attention.cuda_kernels import FusedKernel, KeyGradients
from slipstream.attention.key_ranges import RegularMask

_log = logging.getLogger(__name__)


class Flash3Kernel:
    """FlashAttention-3 for Hopper, by the operators that the package flash_attn_interface registers."""

    def __init__(self, package: Any) -> None:
        self._ops = torch.ops.flash_attn_3  # there since the package was imported
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
        found = [torch.empty_like(each) for each in inputs]
        self._ops.bwd(
            *_tokens_first(grad_output),
            *inputs,
            *_tokens_first(output),
            logsumexp.contiguous(),
            **dict(zip(("dq", "dk", "dv"), found, strict=True)),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._settings(mask, scale),
        )
        return _heads_first(*found)

    def _settings(self, mask: RegularMask, scale: float) -> dict[str, Any]:
        left = -1 if mask.window is None else mask.window - 1
        return {"softmax_scale": scale, "is_causal": True, "window_size_left": left, "window_size_right": 0}


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
        return {"softmax_scale": scale, "causal": True, **window}


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
    except Exception as error:  # of a package that may do anything
        _log.info("FlashAttention of %s isn't used: %s: %s", package.module, type(error).__name__, error)
        return None


def _tokens_first(*tensors: Tensor) -> list[Tensor]:
    """Returns (B,T,H,D) of (B,H,T,D)."""
    return [each.transpose(1, 2) for each in tensors]


def _heads_first(grad_query: Tensor, grad_key: Tensor, grad_value: Tensor) -> tuple[Tensor, list[KeyGradients]]:
    """Returns the gradients as a `FusedKernel` does."""
    return grad_query.transpose(1, 2), [KeyGradients(0, grad_key.transpose(1, 2), grad_value.transpose(1, 2))]
