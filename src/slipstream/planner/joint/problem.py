"""The joint search's problem: a model's costs, a number of ranks, and what the plan must keep to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from slipstream.array_types import Floats
from slipstream.cost import LONE_UPDATE, Costs, LinkTime, Update
from slipstream.planner.cuts import USUAL_CUTS, Cuts
from slipstream.planner.joint.sliced_units import SlicedUnits
from slipstream.planner.order.given_order import given_order
from slipstream.planner.plan import NOTHING_DECIDED, Plan
from slipstream.schedule import Schedule

# From an order, its cut, its slices and the recomputation: the most bytes of each rank.
MemoryAccount = Callable[[Plan], Sequence[float]]


@dataclass(frozen=True)
class JointProblem:
    """The problem of a search: a step of `num_microbatches` sequences of `seq_len` tokens on `num_ranks` ranks.

    Args:
        costs: of the model's parts, for a microbatch.
        cuts: where sequences may be cut.
        memory_limit: bytes of each rank. None: no limit.
        account: returns the most bytes that each rank holds with a plan; they decide what fits. None: weights,
            gradients, optimizer state and activations alone count.
        split: whether backwards may be split into input and weight gradients.
        effort: how many actions list scheduling may place; some 5 million take a second.
        most_seconds: only a shorter step is of interest.
        tied: whether the head's weight embeds too, so that the embedding is spread where the head is.
        update: that ends the step.
        replicas: pipelines that share the batch.
        given: the choices that are kept; of the order, the stages a rank, the placement, the cut, the slices, the
            recomputation and the vocabulary, those that it leaves open are searched for. The backwards of a named order
            are split where they may be; without a recomputation there is none, or what the memory limit asks for.
        may_spread: whether the ranks can spread the head's rows, where it is open whether they do.
        whole_rounds: whether all ranks have as many stages, as schedules that have names place them.
    """

    costs: Costs
    seq_len: int
    num_ranks: int
    num_microbatches: int = 1
    cuts: Cuts = USUAL_CUTS
    memory_limit: float | None = None
    account: MemoryAccount | None = None
    split: bool = True
    effort: float = 1.5e8
    most_seconds: float = inf
    tied: bool = False
    update: Update = LONE_UPDATE
    replicas: int = 1
    given: Plan = NOTHING_DECIDED
    may_spread: bool = False
    whole_rounds: bool = False

    def check(self) -> None:
        """Raises SlipstreamError where no slices are allowed, or not those that are given."""
        if self.given.is_open("slices"):
            self.cuts.longest(self.seq_len)
        else:
            self.cuts.check(self.given.slices, self.seq_len)

    @property
    def slice_counts(self) -> range:
        """The numbers of slices that are allowed."""
        if isinstance(self.given.schedule, Schedule):
            return range(self.given.schedule.num_slices, self.given.schedule.num_slices + 1)
        return self.cuts.counts(self.seq_len)

    @cached_property
    def num_units(self) -> int:
        """The embedding, the layers or their halves, and the head."""
        return len(self.costs.parts)

    def order(self, placement: tuple[int, ...], num_slices: int) -> Schedule | None:
        """Returns the order that is given, on so many slices; None where it is searched for. Raises SlipstreamError
        where its stages are on other ranks."""
        if self.given.is_open("schedule"):
            return None
        return given_order(self.given.schedule, placement, self.num_microbatches, num_slices, self.split)

    @cached_property
    def link(self) -> LinkTime:
        """The slowest link between neighbours."""
        return self.costs.link(self.num_ranks, self.replicas)

    def units(self, slices: tuple[int, ...], recompute: str = "none") -> SlicedUnits:
        """Returns the units' costs on these slices."""
        return SlicedUnits(self.costs, slices, self.link, recompute)

    def ideal(self, units: SlicedUnits) -> float:
        """Returns all work on these slices, or on as few as are allowed where that is less, divided by the ranks."""
        # Measured costs may rise faster than the tokens, so that shorter slices are less work.
        return min(map(self.even_seconds, (self.units(self.cuts.fewest(self.seq_len)), units)))

    def even_seconds(self, units: SlicedUnits) -> float:
        """Returns all work on these slices, divided by the ranks."""
        return float(units.unit_work().sum()) * self.num_microbatches / self.num_ranks

    @cached_property
    def state_sums(self) -> Floats:
        """The device's bytes of weights, gradients and optimizer state of the first 0, 1, ... units."""
        costs = self.costs
        state = self.update.on_device
        optimized = self.update.optimized(costs.each_number, costs.divided)
        of_kinds = costs.each_weight(state.weights) + state.gradients * costs.each_number.trained
        of_kinds = of_kinds + state.optimizer * optimized
        sums: Floats = np.concatenate([[0.0], np.cumsum(of_kinds[list(costs.parts)])])
        return sums
