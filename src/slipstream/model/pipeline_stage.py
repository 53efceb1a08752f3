"""The protocol of a pipeline's stage, whatever the family of its model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from slipstream.attention import ContextStore
from slipstream.model.tensors import Tensors, TensorSpec
from slipstream.model.vocabulary import HeadRows, TiedWeight
from slipstream.schedule import Op


class SpreadExperts(Protocol):
    """The experts of a model that are spread over ranks."""

    def has(self, name: str) -> bool:
        """Returns whether a parameter is one of experts."""
        ...

    def share(self, name: str, parameter: Tensor) -> Any:
        """Returns which of them this rank has: a `parallel.ParameterShare`."""
        ...

    def install(self, model: nn.Module) -> None:
        """Makes tokens go to the ranks of their experts."""
        ...


class PipelineStage(Protocol):
    """Some consecutive layers of a model, which run on one piece of a batch at a time: a microbatch, or a slice of it.

    Pieces are of the family's own type. Parameters and states have the names of the unsplit model.
    """

    model: nn.Module
    layers: Sequence[nn.Module]
    layers_here: range  # their numbers in the model
    is_first: bool
    is_last: bool
    has_loss: bool
    has_skips: bool  # tensors that skip stages
    tied: list[TiedWeight]
    vocabulary: HeadRows | None  # this rank's rows of a spread head
    experts: SpreadExperts | None = None

    @property
    def graph_obstacle(self) -> str | None:
        """Why its steps can't be recorded as CUDA graphs; None where they can."""
        ...

    def receives(self, piece: Any) -> tuple[TensorSpec, ...]:
        """Returns the tensors that come from other stages, in order."""
        ...

    def sends(self, piece: Any) -> tuple[TensorSpec, ...]:
        """Returns the tensors that go to other stages, in order."""
        ...

    def rows_messages(self, op: Op, piece: Any, has_backward: bool) -> list[TensorSpec]:
        """Returns the tensors in a message of a spread vocabulary, the result of an op. Only causal LMs have any."""
        raise TypeError(f"{type(self).__name__} has no vocabulary")

    def check_measurable(self) -> None:
        """Raises SlipstreamError where its memory can't be measured without the stages before."""
        return

    def compute(self, piece: Any, inputs: Tensors, store: ContextStore) -> Any:
        """Runs the layers' forward; returns the message, or on the last stage the loss's input."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters, each once."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Returns the stage's part of the unsplit model's state dict."""
        ...


@contextmanager
def in_evaluation(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Sets evaluation mode; in the end each part of the modules has its own mode again."""
    parts = [part for module in modules for part in module.modules()]
    modes = [part.training for part in parts]
    for part in parts:
        part.training = False
    try:
        yield
    finally:
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode
