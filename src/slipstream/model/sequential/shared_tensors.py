"""Tensors that all token slices of a microbatch read on a stage, and their gradients until slice 0's backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.attention import ContextError
from slipstream.model.tensor_spec import Tensors


class SharedTensors:
    """Tensors of which each slice reads its tokens (dim 1), if they are cut, or the whole.

        forward    slice 0 brings them        slices 1, 2, ... read them
        backward   slices ..., 2, 1 leave gradients        slice 0 takes the sums, and its backward continues with them

    Sums are in float32, or in the tensors' dtype where that is wider.
    """

    def __init__(self, tensors: Tensors, is_cut: Sequence[bool]) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self._is_cut = is_cut
        self._numbers = [number for number, tensor in enumerate(tensors) if tensor.requires_grad]
        self._gradients: dict[int, Tensor] = {}

    def read(self, tokens: range, brought: Tensors | None = None) -> Tensors:
        """Returns what a slice reads: slice 0's is connected to the graph of the tensors that it brings, and a later
        one's graph begins here."""
        views = [self._view(number, tokens) for number in range(len(self._tensors))]
        if self._numbers and torch.is_grad_enabled():
            begin = (torch.empty(0, requires_grad=True),)
            ends = begin if brought is None else tuple(brought[number] for number in self._numbers)
            found: Tensors = _Reading.apply(self, tokens, brought is not None, *ends)  # type: ignore[no-untyped-call]
            for number, tensor in zip(self._numbers, found, strict=True):
                views[number] = tensor
        return tuple(views)

    def close(self) -> None:
        """Raises ContextError where gradients were never taken, because slice 0's backward didn't come here."""
        if self._gradients:
            raise ContextError(
                "token slices left gradients for what the first of them brought, but its own loss depends on none of "
                "it. loss_fn must return a sum that depends on the outputs, even where no target counts."
            )

    def differentiable(self, tokens: range) -> Tensors:
        """Returns the tensors that have a gradient, as a slice reads them."""
        return tuple(self._view(number, tokens) for number in self._numbers)

    def add(self, gradients: Sequence[Tensor | None], tokens: range) -> None:
        """Adds a slice's gradients to the sums."""
        for number, gradient in zip(self._numbers, gradients, strict=True):
            if gradient is not None:
                like = self._tensors[number]
                if number not in self._gradients:
                    wide = torch.promote_types(like.dtype, torch.float32)
                    self._gradients[number] = torch.zeros_like(like, dtype=wide)
                self._part(self._gradients[number], number, tokens).add_(gradient)

    def take(self) -> list[Tensor | None]:
        """Returns the complete sums and forgets them."""
        sums = [(self._gradients.pop(number, None), self._tensors[number].dtype) for number in self._numbers]
        return [None if total is None else total.to(dtype) for total, dtype in sums]

    def _view(self, number: int, tokens: range) -> Tensor:
        """Returns a slice's view, contiguous where it is cut, as if it came in a message: layers may `view` it."""
        part = self._part(self._tensors[number], number, tokens)
        return part.contiguous() if self._is_cut[number] else part

    def _part(self, tensor: Tensor, number: int, tokens: range) -> Tensor:
        return tensor[:, tokens.start : tokens.stop] if self._is_cut[number] else tensor.view_as(tensor)


class _Reading(torch.autograd.Function):
    """Connects all tensors at the same time, so that every sum is taken if slice 0's loss depends on any of them."""

    @staticmethod
    def forward(ctx: Any, shared: SharedTensors, tokens: range, is_first: bool, *ends: Tensor) -> Tensors:
        ctx.shared, ctx.tokens, ctx.is_first = shared, tokens, is_first
        ctx.set_materialize_grads(False)
        return shared.differentiable(tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.shared.add(gradients, ctx.tokens)
        return None, None, None, *(ctx.shared.take() if ctx.is_first else [None])
