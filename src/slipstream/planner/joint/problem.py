"""The joint search's problem, the candidates among which it looks, and its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import inf
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np

from slipstream.array_types import Floats
from slipstream.cost import FLOAT32_STATE, Costs, LinkTime, StateBytes, partition_of, unit_bounds
from slipstream.errors import SlipstreamError
from slipstream.planner.joint.sliced_units import SlicedUnits
from slipstream.schedule import Schedule
from slipstream.simulator import TableCost, simulate
from slipstream.units import numbers_text, table_text

# From the layers of each stage, the slices, the compute actions and the recomputation: bytes of each rank.
MemoryAccount = Callable[[tuple[float, ...], tuple[int, ...], Schedule, str], Sequence[float]]


@dataclass(frozen=True)
class JointProblem:
    """The problem of a search: a step of `num_microbatches` sequences of `seq_len` tokens on `num_ranks` ranks.

    Args:
        costs: of the model's parts, for a microbatch.
        granularity: slices begin at multiples of this many tokens.
        most_slices: the largest number of slices of a sequence, unless `longest_slice` asks for more.
        longest_slice: tokens of the longest slice, of which whole granules count. None: the sequence.
        memory_limit: bytes of each rank. None: no limit.
        account: returns the most bytes that each rank holds with a plan; they decide what fits. None: weights,
            gradients, optimizer state and activations alone count.
        split: whether backwards may be split into input and weight gradients.
        effort: how many actions list scheduling may place; some 5 million take a second.
        most_seconds: only a shorter step is of interest.
        tied: whether the head's weight embeds too, so that the embedding is spread where the head is.
        state: bytes per parameter.
        replicas: pipelines that share the batch.
        optimizer_shards: ranks over which the optimizer's state is spread.
    """

    costs: Costs
    seq_len: int
    num_ranks: int
    num_microbatches: int = 1
    granularity: int = 64
    most_slices: int = 32
    longest_slice: int | None = None
    memory_limit: float | None = None
    account: MemoryAccount | None = None
    split: bool = True
    effort: float = 1.5e8
    most_seconds: float = inf
    tied: bool = False
    state: StateBytes = FLOAT32_STATE
    replicas: int = 1
    optimizer_shards: int = 1

    def check(self) -> None:
        """Raises SlipstreamError where no slices are allowed."""
        if self.longest < 1:
            raise SlipstreamError(
                f"longest_slice={self.longest_slice}, but slices begin at multiples of granularity={self.granularity} "
                "tokens: give a longest slice of at least as many, or a smaller granularity."
            )

    @property
    def longest(self) -> int:
        """The number of tokens of the longest slice that is allowed."""
        if self.longest_slice is None or self.longest_slice >= self.seq_len:
            return self.seq_len
        return self.longest_slice // self.granularity * self.granularity

    @property
    def slice_counts(self) -> range:
        """The numbers of slices that are allowed."""
        fewest = -(-self.seq_len // self.longest)
        return range(fewest, max(fewest, min(self.most_slices, -(-self.seq_len // self.granularity))) + 1)

    @cached_property
    def num_units(self) -> int:
        """The embedding, the layers or their halves, and the head."""
        return len(self.costs.parts)

    @cached_property
    def link(self) -> LinkTime:
        """The slowest link between neighbours."""
        return self.costs.link(self.num_ranks, self.replicas)

    def units(self, slices: tuple[int, ...], recompute: str = "none") -> SlicedUnits:
        """Returns the units' costs on these slices."""
        return SlicedUnits(self.costs, slices, self.link, recompute)

    @property
    def fewest_slices(self) -> tuple[int, ...]:
        """The longest slices that are allowed."""
        full, rest = divmod(self.seq_len, self.longest)
        return (self.longest,) * full + (rest,) * (rest > 0)

    def ideal(self, units: SlicedUnits) -> float:
        """Returns all work on these slices, or on as few as are allowed where that is less, divided by the ranks."""
        # Measured costs may rise faster than the tokens, so that shorter slices are less work.
        return min(map(self.even_seconds, (self.units(self.fewest_slices), units)))

    def even_seconds(self, units: SlicedUnits) -> float:
        """Returns all work on these slices, divided by the ranks."""
        return float(units.unit_work().sum()) * self.num_microbatches / self.num_ranks

    @cached_property
    def state_sums(self) -> Floats:
        """The bytes of weights, gradients and optimizer state of the first 0, 1, ... units."""
        costs, state = self.costs, self.state
        optimized = costs.each_number.optimized(self.optimizer_shards, costs.degrees.experts)
        of_kinds = costs.each_weight(state.weights) + state.gradients * costs.each_number.trained
        of_kinds = of_kinds + state.optimizer * optimized
        sums: Floats = np.concatenate([[0.0], np.cumsum(of_kinds[list(costs.parts)])])
        return sums


@dataclass(frozen=True)
class JointPlan:
    """A cut, a placement, slices and an order that were found together.

    Args:
        schedule: the compute actions of a step, on its placement.
        partition: layers of each stage, in halves where layers can be cut; 0 for an end of the model alone.
        slices: tokens of each slice.
        seconds: the simulated step.
        bound: the least that a step can take with this cut, placement and slices, in any order.
        ideal: the least work of this and the rejected plans, or of the fewest slices, divided by the ranks.
        recompute: the recomputation for which the memory limit asks.
        exact: the plan with the slices that are best for equal stages (`slipstream.slice_tokens`) and the most even cut
            for them, in the same placement. None: it doesn't fit the memory limit.
        rejected: the best that was found with each other placement, best first.
        costs: those that were planned with. None: not kept.
        other_head: the best with a whole head where this plan spreads its rows over the ranks, or the other way round.
            None: not searched for.
    """

    schedule: Schedule
    partition: tuple[float, ...]
    slices: tuple[int, ...]
    seconds: float
    bound: float
    ideal: float
    recompute: str = "none"
    exact: JointPlan | None = None
    rejected: tuple[JointPlan, ...] = ()
    other_head: JointPlan | None = None
    costs: Costs | None = field(default=None, compare=False, repr=False)

    @property
    def head(self) -> str:
        """How the rows of the head are kept: "spread" over the ranks, or "whole" on the last stage's."""
        return "spread" if self.schedule.spreads_vocabulary else "whole"

    def table(self) -> str:
        """Returns one line per placement that was searched to the end, the chosen one first, and the other heads."""
        rows: list[tuple[str, ...]] = [("stages on ranks", "layers", "slices", "step", "over ideal")]
        plans = [self, *self.rejected, *([self.other_head] if self.other_head else [])]
        rows += [plan._row() for plan in plans]
        if any(plan.head == "spread" for plan in plans):
            rows = [(*row, head) for row, head in zip(rows, ["head", *(plan.head for plan in plans)], strict=True)]
        lines = [table_text(rows)]
        if self.exact is not None:
            longer = f"take {self.exact.seconds:.4g} s: {self.exact.seconds / self.seconds - 1:.1%} longer"
            same = self.exact.slices == self.slices
            slices = numbers_text(self.exact.slices, " ")
            lines.append(f"The slices of the dynamic program, {slices}, {'are these' if same else longer}.")
        if self.other_head is not None:
            more = self.other_head.seconds / self.seconds - 1
            what = {"spread": "with its rows spread over the ranks", "whole": "whole, on one rank,"}
            lines.append(f"The head is {self.head}: {what[self.other_head.head]} a step takes {more:+.1%}.")
        if self.recompute != "none":
            lines.append(f"Activations are computed again ({self.recompute!r}), as the memory limit asks for it.")
        return "\n".join(lines)

    def _row(self) -> tuple[str, ...]:
        return (
            numbers_text(self.schedule.placement, " "),
            numbers_text(self.partition, " "),
            numbers_text(self.slices, " "),
            f"{self.seconds:.4g} s",
            f"{self.seconds / self.ideal:.3f}",
        )


_MOST_SIMULATIONS = 200
_MANY_CUTS = 32
Choice = TypeVar("Choice")
Value = TypeVar("Value", bound=Any)


@dataclass(frozen=True)
class Candidate:
    """A cut, given by the first unit of each stage and the number of units, and slices."""

    bounds: tuple[int, ...]
    slices: tuple[int, ...]

    def cuts(self) -> Iterator[Candidate]:
        """Yields the candidate with one to three neighbouring cuts moved by one or two units."""
        yield from (Candidate(bounds, self.slices) for bounds in moved_cuts(self.bounds))

    def slicings(self, problem: JointProblem) -> Iterator[Candidate]:
        """Yields the candidate with tokens moved between slices, a slice halved, or two joined."""
        slices, step = self.slices, problem.granularity
        count = len(slices)
        for portion in (4 * step, step):
            for giver in range(count):
                for taker in {giver - 1, giver + 1, 0, count - 1} - {giver}:
                    if 0 <= taker < count and slices[giver] > portion:
                        changed = list(slices)
                        changed[giver] -= portion
                        changed[taker] += portion
                        yield replace(self, slices=tuple(changed))
        for i, tokens in enumerate(slices):
            half = tokens // 2 // step * step
            if half and count + 1 in problem.slice_counts:
                yield replace(self, slices=(*slices[:i], half, tokens - half, *slices[i + 1 :]))
        for i in range(count - 1):
            yield replace(self, slices=(*slices[:i], slices[i] + slices[i + 1], *slices[i + 2 :]))


def steepest_descent(
    start: Choice,
    values: Callable[[list[Choice]], Iterable[Value]],
    changes: Callable[[Choice], Iterable[Choice]],
    most: float = inf,
) -> tuple[Choice, Value]:
    """Returns the end of taking the best change again and again while the value falls, and its value.

    It ends once `most` changes were tried.
    """
    best, (least,) = start, values([start])
    while most > 0 and (changed := [*dict.fromkeys(changes(best))]):
        most -= len(changed)
        step = min(zip(values(changed), changed, strict=True), key=itemgetter(0))
        if step[0] >= least:
            break
        least, best = step
    return best, least


@dataclass(frozen=True)
class SlowedStep:
    """A step in which some ranks take longer than `units` says.

    Args:
        units: the costs, on the step's slices.
        schedule: the order of the compute actions.
        slowness: how many times as long each slow rank of the pipeline computes.
    """

    units: SlicedUnits
    schedule: Schedule
    slowness: Mapping[int, float]

    def seconds(self, partition: Sequence[float]) -> float:
        """Returns the simulated seconds of the step with so many layers in each stage, in the same order."""
        return self._simulated(self._bounds(partition))

    def best_cut(self, partition: Sequence[float]) -> tuple[tuple[float, ...], float]:
        """Returns the best cut that is reached from this one by moving layers, and its seconds.

        The best move of a unit over one boundary, or over several neighbouring ones, is taken again and again, as long
        as the step becomes shorter.
        """
        start = self._bounds(partition)
        best, seconds = steepest_descent(
            start, partial(map, self._simulated), lambda cut: _moved(cut, (-1, 1)), _MOST_SIMULATIONS
        )
        return partition_of(best, self._per_layer), seconds

    @cached_property
    def _per_layer(self) -> int:
        return self.units.costs.units_per_layer

    def _bounds(self, partition: Sequence[float]) -> tuple[int, ...]:
        return unit_bounds(partition, self.units.costs.num_layers, self._per_layer)

    def _simulated(self, bounds: Sequence[int]) -> float:
        return simulate(self.schedule, self._slowed(self.units.table(bounds))).makespan

    def _slowed(self, table: TableCost) -> TableCost:
        factors = [self.slowness.get(rank, 1.0) for rank in self.schedule.placement]
        return replace(table, times={key: seconds * factors[key[0]] for key, seconds in table.times.items()})


def moved_cuts(bounds: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields the bounds with one to three neighbouring cuts moved by one or two units; of many, single ones by one."""
    return _moved(bounds, (-1, 1, -2, 2), most=3) if len(bounds) <= _MANY_CUTS else _moved(bounds, (-1, 1), most=1)


def _moved(bounds: tuple[int, ...], steps: Sequence[int], most: float = inf) -> Iterator[tuple[int, ...]]:
    """Yields the bounds with one of them, or at most so many neighbours together, moved; no stage becomes empty."""
    inner = range(1, len(bounds) - 1)
    for first in inner:
        for last in range(first, int(min(first + most, len(bounds) - 1))):
            for step in steps:
                if bounds[first - 1] < bounds[first] + step and bounds[last] + step < bounds[last + 1]:
                    yield (*bounds[:first], *(b + step for b in bounds[first : last + 1]), *bounds[last + 1 :])
