"""The joint search's plan: a cut, a placement, slices and an order that were found together."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from slipstream.cost import Costs
from slipstream.planner.plan import Plan
from slipstream.schedule import Schedule
from slipstream.units import numbers_text, table_text


@dataclass(frozen=True)
class JointPlan:
    """A cut, a placement, slices and an order that were found together.

    Args:
        plan: the order, the cut, the slices and the recomputation for which the memory limit asks; all else is open.
        seconds: the simulated step.
        bound: the least that a step can take with this cut, placement and slices, in any order.
        ideal: the least work of this and the rejected plans, or of the fewest slices, divided by the ranks.
        exact: the plan with the slices that are best for equal stages (`slipstream.slice_tokens`) and the most even cut
            for them, in the same placement. None: it doesn't fit the memory limit.
        rejected: the best that was found with each other placement, best first.
        costs: those that were planned with. None: not kept.
        other_head: the best with a whole head where this plan spreads its rows over the ranks, or the other way round.
            None: not searched for.
    """

    plan: Plan
    seconds: float
    bound: float
    ideal: float
    exact: JointPlan | None = None
    rejected: tuple[JointPlan, ...] = ()
    other_head: JointPlan | None = None
    costs: Costs | None = field(default=None, compare=False, repr=False)

    @property
    def schedule(self) -> Schedule:
        """The compute actions of a step, on its placement."""
        assert isinstance(self.plan.schedule, Schedule)
        return self.plan.schedule

    @property
    def partition(self) -> tuple[float, ...]:
        """The layers of each stage, in halves where layers can be cut; 0 for an end of the model alone."""
        return self.plan.partition

    @property
    def slices(self) -> tuple[int, ...]:
        """The tokens of each slice."""
        return self.plan.slices

    @property
    def recompute(self) -> str:
        """The recomputation for which the memory limit asks."""
        return self.plan.recompute

    def in_order(self, schedule: Schedule, seconds: float) -> JointPlan:
        """Returns the plan in another order, which takes so many seconds."""
        return replace(self, plan=self.plan.closed(schedule=schedule), seconds=seconds)

    def cut_as(self, partition: tuple[float, ...]) -> JointPlan:
        """Returns the plan with a cut that counts layers otherwise."""
        return replace(self, plan=self.plan.closed(partition=partition))

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
