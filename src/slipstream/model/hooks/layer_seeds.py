"""Seeds dropout by place, so that replays draw the forwards' numbers, and every cut of a model the same (rule 10)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

from torch import nn

from slipstream.keyed_draws import current_draws
from slipstream.model.hooks.token_slice import current_slice, note_output

_SECOND_HALF = 100  # the first number of the second half's parts, wherever the first half ran


class LayerSeeds:
    """Keys the random state by layer, and by the part of a layer, as the forward of a slice goes through a stage.

    Args:
        model: whose mode says whether anything is drawn.
        draws: whether its layers draw random numbers in training.
        num_layers: of the whole model.
        shared: the ranks that share its layers.
    """

    def __init__(self, model: nn.Module, draws: bool, num_layers: int, shared: TensorParallelLayers | None) -> None:
        self._model = model
        self._draws = draws
        self._num_layers = num_layers
        self._shared = shared

    @property
    def are_used(self) -> bool:
        """Whether the next forward draws random numbers."""
        return self._draws and self._model.training

    def forked(self) -> AbstractContextManager[None]:
        """Surrounds a forward: layers seed their own dropout, and afterwards the caller's random state is as before."""
        return current_draws().forked() if self.are_used else nullcontext()

    def install(self, is_first: bool) -> None:
        """Installs the exchange between ranks that share layers: dropout differs from where they begin to compute
        different things, to where they compute the same."""
        if self._shared is not None:
            enter = partial(self._seed_part, "own", self._shared.rank)
            leave = partial(self._seed_part, "shared")
            self._shared.install(self._model, enter, leave, is_first)

    def watch(self, layer: nn.Module, index: int, middle: nn.Module | None) -> None:
        """Seeds where a layer begins, and at `middle`, where its second half does if it can run on another stage; notes
        its output."""
        layer.register_forward_pre_hook(partial(self.enter, index))
        layer.register_forward_hook(partial(_note_output, index))
        if middle is not None and self._draws:
            middle.register_forward_pre_hook(partial(self._enter_second_half, index))

    def enter(self, layer: int, *_: Any) -> None:
        """Keys the random state by layer, -1 before the first, the number of layers after the last."""
        current_slice().enter_layer(layer)
        if self.are_used:
            self._seed(layer, *self._tokens_here(layer))

    def _enter_second_half(self, layer: int, *_: Any) -> None:
        """Makes dropout the same whether the first half ran here or on another stage."""
        current_slice().parts_of_layer = _SECOND_HALF
        self._seed(layer, "feed-forward", *self._tokens_here(layer))

    def _seed(self, *place: str | int) -> None:
        if self.are_used:
            current_draws().seed(current_slice().seed(*place))

    def _tokens_here(self, layer: int) -> tuple[str | int, ...]:
        """Returns a key of this rank among those that share a layer, where each has different tokens of it."""
        is_spread = self._shared is not None and self._shared.sequence and 0 <= layer < self._num_layers
        return ("tokens", self._shared.rank) if is_spread and self._shared is not None else ()

    def _seed_part(self, *place: str | int) -> None:
        context = current_slice()
        context.parts_of_layer += 1
        self._seed(context.layer, context.parts_of_layer, *place)


def _note_output(index: int, _layer: nn.Module, _args: object, output: object) -> None:
    note_output(f"layer {index}", output)


class TensorParallelLayers(Protocol):
    """The ranks that share every layer of a stage; `parallel.TensorParallel` implements it."""

    sequence: bool  # True for tokens that are split, too, between the parts of a layer

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
