"""The problem of planning a step, and the plan: which sequences form which microbatch, their slices, and the order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, sqrt

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.errors import SlipstreamError
from slipstream.planner.cuts import ANY_NUMBER, Cuts
from slipstream.planner.plan import Plan
from slipstream.planner.ragged.stage_rates import StageRates
from slipstream.schedule import Op, Schedule, SlicedMicrobatch
from slipstream.units import numbers_text

_SHORTEST = 1 / 256  # length of the shortest slices as a share of a step's work, if slices have no fixed cost


@dataclass(frozen=True)
class StepMemory:
    """The memory of a step, in bytes.

    Args:
        limit: of each rank.
        state: of each rank's parameters, gradients and optimizer state.
        account: returns the most bytes that each rank holds with a plan.
    """

    limit: float
    state: Sequence[float]
    account: Callable[[StepPlan], Sequence[float]]


@dataclass(frozen=True)
class StepProblem:
    """A step of sequences of different lengths on a pipeline whose stages are fixed.

    Args:
        lengths: tokens of each sequence.
        rates: of the stages.
        given: the placement, and of the name of the order, the number of microbatches and that of slices those that are
            kept; those that it leaves open are searched for. The slices are those of the microbatch that takes longest;
            others have as many as take equal time.
        memory: what the plan must keep to. None: any number of bytes.
        room: bytes that each rank has for activations. None: any number.
        packs: whether a microbatch may have several sequences.
        split: whether backwards may be split into input and weight gradients.
        cuts: where a microbatch's row may be cut, wherever its sequences end.
        effort: how many actions may be placed; some 5 million take a second.

    Raises:
        SlipstreamError: for an empty sequence, no placement, an order or slices of one length, more microbatches than
            sequences, limits on slices, or rates of another number of stages.
    """

    lengths: tuple[int, ...]
    rates: StageRates
    given: Plan
    memory: StepMemory | None = None
    room: tuple[float, ...] | None = None
    packs: bool = True
    split: bool = True
    cuts: Cuts = ANY_NUMBER
    effort: float = 1e5

    def __post_init__(self) -> None:
        if min(self.lengths, default=0) < 1:
            raise SlipstreamError(
                f"a step has sequences of {[*self.lengths[:8]]} tokens: give at least one, and none empty."
            )
        given = self.given
        if given.is_open("placement"):
            raise SlipstreamError("given=Plan(...) leaves the placement open, but stages stay where they are: give it.")
        if isinstance(given.schedule, Schedule) or not given.is_open("slices"):
            what = "slices" if isinstance(given.schedule, str) or given.is_open("schedule") else "an order"
            raise SlipstreamError(
                f"given=Plan(...) has {what}, but sequences of different lengths have their own: give a schedule by "
                "its name, and num_slices."
            )
        if not given.is_open("num_microbatches") and not 1 <= given.num_microbatches <= len(self.lengths):
            raise SlipstreamError(
                f"num_microbatches={given.num_microbatches}, but the step has {len(self.lengths)} sequences, each in "
                f"one microbatch. Give 1 to {len(self.lengths)}."
            )
        limits = ("longest_slice", "shortest_slice", "most_slices")
        for name in limits:
            if getattr(self.cuts, name) != getattr(ANY_NUMBER, name):
                raise SlipstreamError(
                    f"{name}={getattr(self.cuts, name)}, but the slices of sequences of different lengths take equal "
                    "time: give slipstream.planner.cuts.Cuts(granularity=64, most_slices=None), or another granularity."
                )
        if self.rates.num_stages != len(self.placement):
            raise SlipstreamError(
                f"rates of {self.rates.num_stages} stages for a placement of {len(self.placement)}: make them equal."
            )

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return self.given.placement

    @property
    def num_ranks(self) -> int:
        return max(self.placement) + 1

    @property
    def may_split(self) -> bool:
        """Whether some backward may be split: a schedule that has a name may do so by itself."""
        return self.split or not self.given.is_open("schedule")

    @cached_property
    def ranks(self) -> Ints:
        """The rank of each stage."""
        return np.array(self.placement, np.int64)

    @cached_property
    def work(self) -> Floats:
        """The seconds of each sequence's forwards and backwards on all stages, (sequences,)."""
        lengths = np.array(self.lengths, np.int64)
        return self.rates.work(lengths, self.rates.scores(lengths))

    @cached_property
    def best_slice(self) -> float:
        """The seconds of a slice on all stages for which the pipeline's fill takes as long as slices' fixed parts.

        With n slices the busiest rank waits (p - 1) / n of its share of the work, and pays n fixed parts.
        """
        total = float(self.work.sum())
        fixed = (self.rates.rates[Op.F] + self.rates.rates[Op.B])[:, 0].sum()
        return max(sqrt(total * fixed / max(self.num_ranks - 1, 1)), _SHORTEST * total)

    @cached_property
    def limits(self) -> Floats:
        """The bytes that each rank has for activations; infinite where they aren't limited."""
        return np.array(self.room if self.room is not None else [inf] * self.num_ranks, float)

    @cached_property
    def most_tokens(self) -> float:
        """The tokens of the longest microbatch that every rank can hold, in one slice; infinite without a limit."""
        fixed, per_token = (np.bincount(self.ranks, part) for part in self.rates.held.T)
        return float(np.where(per_token > 0, (self.limits - fixed) / np.where(per_token > 0, per_token, 1), inf).min())


@dataclass(frozen=True)
class StepPlan:
    """The microbatches, slices and order of one step.

    Args:
        groups: the numbers of the sequences in each microbatch, which are packed into one row in this order.
        slices: the tokens of each slice, of each microbatch.
        schedule: every rank's order; its microbatches have as many slices.
        seconds: the simulated step; None where nobody has simulated it.
    """

    groups: tuple[tuple[int, ...], ...]
    slices: tuple[tuple[int, ...], ...]
    schedule: Schedule
    seconds: float | None = None

    @property
    def microbatches(self) -> list[SlicedMicrobatch]:
        """The one row and the slices of each microbatch."""
        return [SlicedMicrobatch(1, slices) for slices in self.slices]

    def check(self, lengths: Sequence[int]) -> None:
        """Raises SlipstreamError where this isn't a plan for sequences of these lengths, in tokens."""
        self._check_groups(len(lengths))
        if len(self.slices) != len(self.groups):
            raise SlipstreamError(
                f"the plan has {len(self.groups)} microbatches, but slices of {len(self.slices)}. Give each its slices."
            )
        for place, (group, slices) in enumerate(zip(self.groups, self.slices, strict=True)):
            tokens = sum(lengths[sequence] for sequence in group)
            if sum(slices) != tokens or min(slices, default=0) < 1:
                raise SlipstreamError(
                    f"the plan cuts microbatch {place} into slices of [{numbers_text(slices)}] tokens, {sum(slices)} "
                    f"in all, but its sequences [{numbers_text(group)}] have {tokens}: it was made for other lengths. "
                    "Make a plan for these."
                )
        counts = [len(slices) for slices in self.slices]
        if counts != [*self.schedule.slice_counts]:
            raise SlipstreamError(
                f"the plan has microbatches of [{numbers_text(counts)}] slices, but its schedule "
                f"{self.schedule.name!r} of [{numbers_text([*self.schedule.slice_counts])}]. Make them equal."
            )

    def _check_groups(self, num_sequences: int) -> None:
        """Raises SlipstreamError where not every sequence is in one microbatch."""
        occurrences = Counter(sequence for group in self.groups for sequence in group)
        unknown = sorted(occurrences.keys() - range(num_sequences))
        wrong = [sequence for sequence in range(num_sequences) if occurrences[sequence] != 1]
        if unknown:
            problem = f"there is no sequence {unknown[0]}"
        elif wrong:
            problem = f"sequence {wrong[0]} is in {occurrences[wrong[0]]} of them, not in one"
        elif not all(self.groups):
            problem = "one is empty"
        else:
            return
        raise SlipstreamError(
            f"the plan's microbatches don't add up to the batch of {num_sequences} sequences: {problem}. Make a plan "
            "for this batch."
        )
