"""What the joint search is asked, the costs, the ranks and what is allowed; and the plan that it chose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from slipstream.array_types import Floats
from slipstream.errors import SlipstreamError
from slipstream.planner.joint.unit_costs import SlicedUnits, UnitCosts
from slipstream.schedule import Schedule

# From the layers of each stage, the slices, the compute actions and whether forwards run again: bytes of each rank.
MemoryAccount = Callable[[tuple[float, ...], tuple[int, ...], Schedule, bool], Sequence[float]]


@dataclass(frozen=True)
class JointProblem:
    """What is searched for: a step of `num_microbatches` sequences of `seq_len` tokens on `num_ranks` ranks.

    Args:
        costs: what each unit of the model costs, for a microbatch.
        granularity: slices begin at multiples of this many tokens.
        most_slices: the largest number of slices of a sequence, unless `longest_slice` asks for more.
        longest_slice: tokens of the longest slice, of which whole granules count. None: the sequence.
        memory_limit: bytes of each rank. None: no limit.
        account: returns the most bytes that each rank holds with a plan; they decide what fits. None: weights,
            gradients, optimizer state and activations alone count.
        split: whether backwards may be split into input and weight gradients.
        effort: how many actions list scheduling may place; some 5 million take a second.
        tied: whether the head's weight embeds too, so that the embedding is spread where the head is.
    """

    costs: UnitCosts
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
    tied: bool = False

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
        return self.costs.num_layers * self.costs.units_per_layer + 2

    def ideal(self, units: SlicedUnits) -> float:
        """Returns all work on these slices, or on as few as are allowed where that is less, divided by the ranks."""
        full, rest = divmod(self.seq_len, self.longest)
        few = SlicedUnits(self.costs, (self.longest,) * full + (rest,) * (rest > 0))
        # Measured costs may rise faster than the tokens, so that shorter slices are less work.
        least = min(float(each.unit_work().sum()) for each in (few, units))
        return least * self.num_microbatches / self.num_ranks

    @cached_property
    def state_sums(self) -> Floats:
        """The bytes of weights, gradients and optimizer state of the first 0, 1, ... units."""
        sums: Floats = np.concatenate([[0.0], np.cumsum(self.costs.state_bytes())])
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
        recompute: whether forwards run again before their backwards, because the memory limit asks for it.
        exact: the plan with the slices that are best for equal stages (`slipstream.slice_tokens`) and the most even cut
            for them, in the same placement. None: it doesn't fit the memory limit.
        rejected: the best that was found with each other placement, best first.
        costs: of the units that were planned with. None: not kept.
        other_head: the best with a whole head where this plan spreads its rows over the ranks, or the other way round.
            None: not searched for.
    """

    schedule: Schedule
    partition: tuple[float, ...]
    slices: tuple[int, ...]
    seconds: float
    bound: float
    ideal: float
    recompute: bool = False
    exact: JointPlan | None = None
    rejected: tuple[JointPlan, ...] = ()
    other_head: JointPlan | None = None
    costs: UnitCosts | None = field(default=None, compare=False, repr=False)

    @property
    def head(self) -> str:
        """How the rows of the head are kept: "spread" over the ranks, or "whole" on the last stage's."""
        return "spread" if self.schedule.spreads_vocabulary else "whole"

    def table(self) -> str:
        """Returns one line per placement that was searched to the end, the chosen one first, and what was compared."""
        rows: list[tuple[str, ...]] = [("stages on ranks", "layers", "slices", "step", "over ideal")]
        plans = [self, *self.rejected, *([self.other_head] if self.other_head else [])]
        rows += [plan._row() for plan in plans]
        if any(plan.head == "spread" for plan in plans):
            rows = [(*row, head) for row, head in zip(rows, ["head", *(plan.head for plan in plans)], strict=True)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        if self.exact is not None:
            longer = f"take {self.exact.seconds:.4g} s: {self.exact.seconds / self.seconds - 1:.1%} longer"
            same = self.exact.slices == self.slices
            lines.append(
                f"The slices of the dynamic program, {_short(self.exact.slices)}, {'are these' if same else longer}."
            )
        if self.other_head is not None:
            more = self.other_head.seconds / self.seconds - 1
            what = {"spread": "with its rows spread over the ranks", "whole": "whole, on one rank,"}
            lines.append(f"The head is {self.head}: {what[self.other_head.head]} a step takes {more:+.1%}.")
        if self.recompute:
            lines.append("Activations are computed again in the backward, as the memory limit asks for it.")
        return "\n".join(lines)

    def _row(self) -> tuple[str, ...]:
        return (
            _short(self.schedule.placement),
            _short(self.partition),
            _short(self.slices),
            f"{self.seconds:.4g} s",
            f"{self.seconds / self.ideal:.3f}",
        )


def _short(numbers: Sequence[float]) -> str:
    words = [f"{number:g}" for number in numbers]
    return " ".join(words if len(words) <= 8 else [*words[:4], "...", *words[-3:]])
