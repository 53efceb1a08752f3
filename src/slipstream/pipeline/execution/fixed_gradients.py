"""Gradients that graphs add to, at addresses that stay from step to step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class FixedGradients:
    """Keeps gradients at fixed addresses, where graphs add to them."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._trained: set[int] = set()  # the identities of parameters that get gradients
        self._buffers: dict[int, Tensor] = {}  # by identity
        self._addresses: set[int] = set()  # of their storages

    def holds(self, tensor: Tensor) -> bool:
        """Returns whether a tensor lies where the next step writes."""
        return tensor.untyped_storage().data_ptr() in self._addresses

    def note(self) -> None:
        """Notes which parameters have gradients now; call it before they are reduced."""
        self._trained |= {id(parameter) for parameter in self._parameters if parameter.grad is not None}

    def begin(self) -> None:
        """Puts the gradients of earlier steps, or zeros, where they are added to."""
        for parameter in self._parameters:
            if id(parameter) in self._trained:
                parameter.grad = self._filled(parameter)

    def _filled(self, parameter: nn.Parameter) -> Tensor:
        """Returns the parameter's buffer, with its gradient."""
        gradient, buffer = parameter.grad, self._buffers.get(id(parameter))
        if buffer is None:
            wide = parameter.grad_dtype or parameter.dtype
            buffer = torch.zeros_like(parameter, dtype=wide, requires_grad=False) if gradient is None else gradient
            self._buffers[id(parameter)] = buffer
            self._addresses.add(buffer.untyped_storage().data_ptr())
        elif gradient is None:
            buffer.zero_()
        elif gradient is not buffer:
            buffer.copy_(gradient)
        return buffer
