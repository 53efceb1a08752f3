"""Where a step's time goes, from the ideal of one process halved to what was measured."""

from __future__ import annotations

from dataclasses import replace

from slipstream import simulate, step_lower_bound
from slipstream.schedule import COMMUNICATION, Action, Op, Schedule
from slipstream.simulator import MeasuredCost, TableCost
from slipstream.timeline import Timeline


class WithoutLinks(MeasuredCost):
    """Costs from the run's action times; messages take no time."""

    def link_seconds(self, send: Action, source: int, destination: int) -> float:
        return 0.0


class WithLinks(MeasuredCost):
    """Costs from the run's action times; every message takes as long as one whose receiver already waits."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._latency = max(0.0, min((message.seconds for message in timeline.messages), default=0.0))

    def link_seconds(self, send: Action, source: int, destination: int) -> float:
        return self._latency


def waterfall(timeline: Timeline, schedule: Schedule, unsliced: float, step: float) -> dict[str, float]:
    """Returns the seconds lost to each cause, after GPipe's Table 4; they add up from the ideal to the measured step.

    Args:
        timeline: of the step.
        schedule: what ran.
        unsliced: seconds of the step in one process without slices.
        step: seconds of the step from call to return.
    """
    compute = replace(
        schedule, actions=tuple(tuple(a for a in row if a.op not in COMMUNICATION) for row in schedule.actions)
    )
    busy = [timeline.busy(rank) for rank in range(timeline.num_ranks)]
    recomputed = sum(span.seconds for span in timeline.compute_spans if span.action.op is Op.R)
    work = sum(busy) - recomputed
    ordered = simulate(compute, WithoutLinks(timeline)).makespan
    linked = simulate(compute, WithLinks(timeline)).makespan
    ideal, mean = unsliced / timeline.num_ranks, work / timeline.num_ranks
    return {
        "ideal": ideal,
        "slicing": mean - ideal,
        "recomputation": recomputed / timeline.num_ranks,
        "imbalance": max(busy) - sum(busy) / timeline.num_ranks,
        "bubble": ordered - max(busy),
        "communication": linked - ordered,
        "executor": timeline.makespan - linked,
        "outside": step - timeline.makespan,
        "step": step,
    }


def bound(timeline: Timeline, schedule: Schedule) -> float:
    """Returns the lower bound of any order of the step's actions, from their times (see `step_lower_bound`).

    Without an order's choice to split: each backward counts as it ran.
    """
    times: dict[tuple[int, int, Op], list[float]] = {}
    for span in timeline.compute_spans:
        times.setdefault((span.action.stage, span.action.slice, span.action.op), []).append(span.seconds)
    mean = {key: sum(seconds) / len(seconds) for key, seconds in times.items()}
    for stage in range(schedule.num_stages):
        for index in range(schedule.num_slices):
            if (stage, index, Op.B) in mean:
                mean[stage, index, Op.I], mean[stage, index, Op.W] = mean[stage, index, Op.B], 0.0
            else:
                mean[stage, index, Op.B] = mean[stage, index, Op.I] + mean[stage, index, Op.W]
    return step_lower_bound(schedule.placement, schedule.num_microbatches, schedule.num_slices, TableCost(mean))
