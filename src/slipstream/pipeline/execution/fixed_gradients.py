"""Gradients that graphs add to, at addresses that stay from step to step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class FixedGradients:
    """Keeps gradients at fixed addresses, where graphs add to them."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._buffers: dict[int, Tensor] = {}  # by the parameter's identity; those that get gradients

    @property
    def storages(self) -> set[int]:
        """The addresses of the storages that the next step writes."""
        return {buffer.untyped_storage().data_ptr() for buffer in self._buffers.values()}

    def note(self) -> None:
        """Fixes where the gradients lie that the parameters have now; call it before they are reduced."""
        for parameter in self._parameters:
            if parameter.grad is not None and id(parameter) not in self._buffers:
                self._buffers[id(parameter)] = parameter.grad

    def begin(self) -> None:
        """Puts the gradients of earlier steps, or zeros, where they are added to."""
        for parameter in self._parameters:
            buffer = self._buffers.get(id(parameter))
            if buffer is None or parameter.grad is buffer:
                continue
            if parameter.grad is None:
                buffer.zero_()
            else:
                buffer.copy_(parameter.grad)
            parameter.grad = buffer
