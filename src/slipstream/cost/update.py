"""The update that ends a step: what the optimizer's rule keeps of a parameter and moves, and which ranks share it.

It is applied last, to the numbers of parameters that any costs say, whichever modes wrap them. AdamW is the rule: bytes
are those of its two moments, and of a master weight beside a narrow one.

    costs       seconds of the sums of gradients, of the rule, and of gathering what each rank updated; of a rule on the
                host, the bytes that go there and back, and those that it reads and writes there
    refuses     shards of tied weights, and of parameters that are cut already
    converts    parameters to bytes of weights, gradients and state, to the part of each that a rank keeps, and to what
                of it is on the host
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from slipstream.array_types import Floats
from slipstream.cost.operation_counts import ModelCount
from slipstream.cost.sharing import Divided
from slipstream.number_format import weight_format


class Numbers(NamedTuple):
    """The numbers of parameters that a rank holds, (kinds,) each, of a part of every kind."""

    all: Floats
    trained: Floats
    trained_in_experts: Floats  # trained ones of experts that are spread over ranks


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter that training keeps. bfloat16 trains with a float32 master weight and two moments."""

    weights: float
    gradients: float
    optimizer: float

    @classmethod
    def of(cls, dtype: str) -> StateBytes:
        """Returns those of weights that are trained, or measured, in this dtype."""
        kept = weight_format(dtype)
        return cls(kept.weight_bytes, kept.gradient_bytes, kept.optimizer_bytes)


@dataclass(frozen=True)
class Update:
    """The update of weights, of which several ranks have copies.

    Args:
        state: bytes per parameter, where nothing is sharded.
        copies: ranks with the same weights, but for experts.
        shard: what each of them keeps only its part of: "none", the "optimizer"'s state, or the "parameters" too.
        place: where the rule runs, with its state: on the "device" or the "host".
        seq_len, num_microbatches: tokens of a sequence, and microbatches of a replica, in the step that the update
            ends: exchanges of replicas may run beside their passes.
    """

    state: StateBytes
    copies: int = 1
    shard: str = "none"
    place: str = "device"
    seq_len: int = 0
    num_microbatches: int = 1

    @property
    def shards(self) -> int:
        """The ranks over which the optimizer's state is spread."""
        return self.copies if self.shard != "none" else 1

    @cached_property
    def held(self) -> StateBytes:
        """The bytes per parameter while a step runs. The rows of sharded parameters lie beside the whole ones, and
        count as the optimizer's; master weights are those rows."""
        state = self.on_device
        more = 0 if self.shard != "parameters" or self._has_masters else state.weights
        return replace(state, optimizer=state.optimizer + more)

    @property
    def on_device(self) -> StateBytes:
        """The bytes per parameter that the device keeps, but for rows of sharded parameters."""
        return replace(self.state, optimizer=0.0) if self.place == "host" else self.state

    @property
    def on_host(self) -> float:
        """The bytes per parameter that the host keeps, where it runs the rule: its state, copies of weights, which are
        part of that where they are wider, and gradients."""
        return 0.0 if self.place == "device" else self.state.optimizer + self._copied_weights + self.state.gradients

    @property
    def _has_masters(self) -> bool:
        return self.state.weights < self.state.gradients

    @property
    def _copied_weights(self) -> float:
        return 0.0 if self._has_masters else self.state.weights

    def optimized(self, numbers: Numbers, divided: Divided) -> Floats:
        """Returns how many trained parameters have their optimizer state on a rank: of spread experts a larger part
        than of other weights, as fewer ranks have the same ones."""
        shared, in_experts = divided.copies(self.shards)
        elsewhere = numbers.trained - numbers.trained_in_experts
        return elsewhere / shared.num_ranks + numbers.trained_in_experts / in_experts.num_ranks

    @property
    def passes_of_gradients(self) -> int:
        """How often gradients go around: a reduce-scatter, and where each rank updates all weights a gathering."""
        return 1 if self.shards > 1 else 2

    def moved_bytes(self, trained: float, optimized: float) -> float:
        """Returns the bytes that the rule reads and writes: weights, its state, and gradients, which it only reads."""
        state = self.state
        written = state.weights * trained + state.optimizer * optimized
        return 2 * written + state.gradients * trained

    @property
    def moved_on_host(self) -> float:
        """The bytes per parameter that a rule on the host reads and writes there: its state and the copies of weights,
        and gradients, which it only reads; then weights are read again, and written as the device has them."""
        state = self.state
        wide = max(state.weights, state.gradients)
        return 2 * (state.optimizer + self._copied_weights) + state.gradients + wide + state.weights


LONE_UPDATE = Update(StateBytes.of("float32"))
"""The update of float32 weights of which there are no copies."""


def refused_shards(model: ModelCount) -> dict[str, str]:
    """Returns why parameters can't be sharded, by the choice in a plan, as far as the model's counts tell."""
    if not model.tied:
        return {}
    return {"shard": "The head is tied to the embedding, and their shards would be updated separately."}


def possible_shards(copies: int, divided: Divided) -> tuple[str, ...]:
    """Returns what ranks with the same weights can shard, what costs least first: no parameters that ranks which share
    layers have cut already."""
    if copies == 1:
        return ("none",)
    return ("optimizer", "none", "parameters") if divided.width == 1 else ("optimizer", "none")
