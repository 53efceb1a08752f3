"""The ranks that share every layer of a stage, as a stage sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import nn


class TensorParallelLayers(Protocol):
    """The ranks that share every layer of a stage; `parallel.TensorParallel` implements it."""

    sequence: bool  # whether they also split the tokens between the parts of a layer

    @property
    def rank(self) -> int: ...

    def install(
        self, model: nn.Module, enter: Callable[[], None], leave: Callable[[], None], is_first: bool = True
    ) -> None:
        """Installs the exchange between the ranks in the model.

        `enter` is called where computing becomes different on each rank, `leave` where it is the same on all again.
        """

    def begin(self, length: int) -> None:
        """Announces a slice of `length` tokens."""

    def local_length(self, length: int) -> int:
        """Returns how many of the slice's tokens are on this rank between the parts of a layer."""
        ...
