"""The costs of a model's stages: the interface that plans read, and the simulator's costs of a whole pipeline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.schedule import Op
from slipstream.simulator import TableCost

ActionSeconds = Mapping[tuple[int, int, Op], float]  # (stage, slice, op) -> seconds


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter that training keeps. bfloat16 trains with a float32 master weight and two moments."""

    weights: float
    gradients: float
    optimizer: float

    @classmethod
    def of(cls, dtype: str) -> StateBytes:
        return cls(4, 4, 8) if dtype == "float32" else cls(2, 4, 12)


class StageCosts(ABC):
    """The costs of any stage on one of its tensor-parallel ranks, for microbatches of one size.

    A stage is given by its `layers`; a slice by its `length` and its `context`, the tokens before it, of each sequence.
    Times are in seconds, sizes in bytes.
    """

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """The layers of the whole model."""

    @abstractmethod
    def seconds(self, layers: range, op: Op, length: Any, context: Any) -> Any:
        """The time of F, B, I or W; ints give a number, integer arrays an array."""

    @abstractmethod
    def reduce_seconds(self, layers: range, op: Op, length: Any) -> Any:
        """The part of it that is all-reduces between tensor-parallel ranks."""

    @abstractmethod
    def replay_seconds(self, layers: range, recompute: str, length: Any, context: Any) -> Any:
        """The time of R under "selective" or "full" recomputation."""

    @abstractmethod
    def activation_bytes(self, layers: range, length: int, context: int = 0) -> float:
        """The activations that a slice's F keeps for its backward without recomputation, except keys and values."""

    @abstractmethod
    def kept_bytes(self, layers: range, recompute: str, length: int) -> float:
        """The part of the activations that F keeps until R where the slice is recomputed."""

    @abstractmethod
    def context_bytes(self, layers: range, length: int) -> float:
        """The keys and values of `length` tokens, kept from a microbatch's first F to its last backward."""

    @abstractmethod
    def context_gradient_bytes(self, layers: range, length: int) -> float:
        """Their gradients, kept from a microbatch's first backward to its last."""

    @abstractmethod
    def logits_gradient_bytes(self, layers: range, length: int) -> float:
        """The gradient of a slice's logits in float32, made before any activation is freed; 0 without the head."""

    @abstractmethod
    def message_bytes(self, length: Any) -> Any:
        """The message of a slice to the next stage, b T h elements, as large as its gradient back."""

    @abstractmethod
    def num_parameters(self, layers: range) -> float:
        """The number of a stage's parameters on one rank."""

    @abstractmethod
    def gradient_seconds(self, layers: range, data_parallel: int) -> float:
        """The reduction of a stage's gradients between the replicas."""

    @abstractmethod
    def optimizer_step_seconds(self, layers: range, shards: int = 1) -> float:
        """An AdamW step whose state is spread over `shards` replicas."""

    @abstractmethod
    def action_costs(self, times: ActionSeconds, slices: Sequence[int], data_parallel: int = 1) -> TableCost:
        """The simulator's costs with the given times of actions and with the links' times of messages."""

    def cost(self, partition: Sequence[int], slices: Sequence[int]) -> TableCost:
        """Returns the simulator's costs of a pipeline: times and activations of every stage and slice, and messages.

        Args:
            partition: layers of each stage.
            slices: tokens of each slice.

        Raises:
            SlipstreamError: where the layers don't add up to the model's, a slice is empty, or its time is unknown.
        """
        if min(partition, default=0) < 1 or sum(partition) != self.num_layers:
            raise SlipstreamError(
                f"partition={list(partition)} has {sum(partition)} layers; give every stage at least one, and the "
                f"model's {self.num_layers} in all."
            )
        if min(slices, default=0) < 1:
            raise SlipstreamError(f"slices={list(slices)}: give at least one, each of 1 token or more.")
        times: dict[tuple[int, int, Op], float] = {}
        activations, kept = dict[tuple[int, int], float](), dict[tuple[int, int], float]()
        for stage, layers in enumerate(stages_of(partition)):
            for index, (length, context) in enumerate(zip(slices, accumulate(slices, initial=0), strict=False)):
                for op in (Op.F, Op.B, Op.I, Op.W):
                    times[stage, index, op] = float(self.seconds(layers, op, length, context))
                times[stage, index, Op.R] = times[stage, index, Op.F]
                activations[stage, index] = self.activation_bytes(layers, length, context)
                kept[stage, index] = self.kept_bytes(layers, "full", length)
        return replace(self.action_costs(times, slices), activations=activations, kept=kept)


def stages_of(partition: Sequence[int]) -> list[range]:
    """Returns the layers of every stage from how many each has."""
    return [range(a, b) for a, b in pairwise(accumulate(partition, initial=0))]
