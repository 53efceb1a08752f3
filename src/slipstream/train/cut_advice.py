"""Says whether another cut makes up for a rank that has become slow, where what the layers cost is known."""

from __future__ import annotations

from slipstream.planner.joint import JointPlan, SlicedUnits, UnitCosts
from slipstream.planner.joint.problem import SlowedStep
from slipstream.train.config import Config
from slipstream.train.run_folder import RunFolder

_LEAST_GAIN = 0.03  # of the step's time, below which noise decides


class CutAdvice:
    """The costs of a run's plan, and what they say about other cuts.

    A cut is looked for where the run has planned its rows by itself, with a whole head and without a memory limit,
    which another cut might break.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._plan: JointPlan | None = None

    def note(self, plan: JointPlan) -> None:
        """Takes the plan that the run follows."""
        self._plan = plan

    def lines(self, rank: int, place: int, slowness: float) -> list[str]:
        """Returns a line about the best cut for a rank at a place of the pipeline that computes so many times as long;
        none where nothing is known."""
        plan = self._plan
        if plan is None or plan.costs is None or plan.head == "spread" or self._config.memory.limit is not None:
            return []
        seconds, best, cut = self._compared(plan, plan.costs, place, slowness)
        slow = f"rank {rank} computes {slowness:.2g} times as slowly"
        if best > (1 - _LEAST_GAIN) * seconds:
            return [f"{slow}: no other cut would save {_LEAST_GAIN:.0%} of the step's time"]
        layers, tokens = (",".join(f"{each:g}" for each in numbers) for numbers in (cut, plan.slices))
        schedule = RunFolder(self._config.training.output).planned_schedule
        return [
            f"{slow}: the cut {layers} would take {best / seconds:.2f} of the step's time; to go on with it from a "
            f"checkpoint, type --checkpoint.resume=latest --pipeline.schedule={schedule} --pipeline.slices=[{tokens}] "
            f"--pipeline.partition=[{layers}]"
        ]

    def _compared(
        self, plan: JointPlan, costs: UnitCosts, place: int, slowness: float
    ) -> tuple[float, float, tuple[float, ...]]:
        """Returns the seconds of a step with the cut of the plan, those with the best one, and that one."""
        units = SlicedUnits(costs, plan.slices, plan.recompute)
        slowed = SlowedStep(units, plan.schedule, {place: slowness})
        cut, best = slowed.best_cut(plan.partition)
        if self._config.parallel.data > 1:  # the other replicas wait for the slow one, but lose by the cut
            best = max(best, SlowedStep(units, plan.schedule, {}).seconds(cut))
        return slowed.seconds(plan.partition), best, cut
