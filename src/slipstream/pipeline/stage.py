"""The interface of a stage, whatever kind of model it is a part of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from slipstream.attention import ContextStore
from slipstream.model import Tensors, TensorSpec, TiedWeight


class BatchPart(Protocol):
    """The part of a batch that one F works on: a token slice of a microbatch, or a microbatch."""

    @property
    def tensors(self) -> Tensors:
        """The tensors of the batch that are in it: memory that isn't a stage's."""
        ...

    @property
    def length(self) -> int:
        """Tokens of the whole sequences that it is a part of: what a context store has room for."""
        ...


class Stage(Protocol):
    """Consecutive layers. `model.stage.Stage` has those of a causal LM, `model.sequence_stage` those of a sequence."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def layers(self) -> Sequence[nn.Module]: ...

    @property
    def tied(self) -> list[TiedWeight]: ...

    @property
    def is_first(self) -> bool: ...

    @property
    def is_last(self) -> bool: ...

    @property
    def layers_here(self) -> range:
        """The model's layers that it has something of."""
        ...

    def compute(self, piece: Any, inputs: Tensors, store: ContextStore) -> Any:
        """Runs its forward; returns a tuple of tensors for the next stage, on the last stage the model's outputs.

        The first stage works on the piece's tensors, all others on what they `receive`.
        """
        ...

    def receives(self, piece: Any) -> Sequence[TensorSpec]:
        """The tensors that come in; none on the first stage."""
        ...

    def sends(self, piece: Any) -> Sequence[TensorSpec]:
        """The tensors that `compute` returns; none on the last stage."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields parameters by the unsplit model's names; a tied weight by its canonical one."""
        ...

    def state(self) -> dict[str, Tensor]:
        """The part of the unsplit model's state dict that is here, by its names."""
        ...
