"""What "auto" runs to learn from: trials, the times of their actions, and the fastest of several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from statistics import median
from typing import NamedTuple, TypeVar

from slipstream.schedule import Op, Schedule
from slipstream.simulator import MeasuredCost, TableCost, simulate
from slipstream.timeline import Timeline

_STEPS = 2  # of each trial in a round
_ROUNDS = 2
_DISTURBED = 1.1  # times the least work of a step

SampleKey = tuple[int, int, Op]  # stage, slice, op


class Trial(NamedTuple):
    """The compute actions of a step, and the length of every slice."""

    schedule: Schedule
    slices: tuple[int, ...]


class TrialRequest(NamedTuple):
    """A trial to run as a step, for its timeline; or not to run, for what the ranks would hold in it."""

    trial: Trial
    holds: bool = False
    is_last: bool = False  # whether all later steps run it


class TrialMemory(NamedTuple):
    """The bytes that ranks would hold in a trial."""

    peaks: tuple[float, ...]  # of each rank
    units: dict[tuple[int, int], float]  # per stage and slice, from its forward to its backward


TrialResult = Timeline | TrialMemory
Answer = TypeVar("Answer")
Inquiry = Generator[TrialRequest, TrialResult, Answer]  # yields what to run next, takes what came out


def timed(trial: Trial) -> Inquiry[Timeline]:
    answer = yield TrialRequest(trial)
    assert isinstance(answer, Timeline)
    return answer


def holdings_of(trial: Trial) -> Inquiry[TrialMemory]:
    answer = yield TrialRequest(trial, holds=True)
    assert isinstance(answer, TrialMemory)
    return answer


class Samples:
    """Seconds of actions in some steps, over all microbatches, and of messages."""

    def __init__(self, timelines: Iterable[Timeline] = ()) -> None:
        self.actions: defaultdict[SampleKey, list[float]] = defaultdict(list)
        self.messages: list[float] = []
        for timeline in timelines:
            self.add(timeline)

    def add(self, timeline: Timeline) -> None:
        for span in timeline.compute_spans:
            self.actions[span.action.stage, span.action.slice, span.action.op].append(span.seconds)
        self.messages += [message.seconds for message in timeline.messages]

    @property
    def latency(self) -> float:
        """A message's shortest time: longer ones had a receiver that came late."""
        return max(0.0, min(self.messages, default=0.0))

    def cost(self, typical: Callable[[Sequence[float]], float] = median) -> TableCost:
        """Returns costs with each action's `typical` time; a disturbance of some steps doesn't change their min."""
        return TableCost({key: typical(seconds) for key, seconds in self.actions.items()}, latency=self.latency)


def fastest(trials: Iterable[Trial]) -> Inquiry[Trial]:
    """Finds the trial with the least `undisturbed_seconds`, by successive halving (Jamieson and Talwalkar 2016).

    All run some steps, the better half, two at least, run as many again, alternately, and the best is chosen.
    """
    left = list(trials)
    timelines: defaultdict[Trial, list[Timeline]] = defaultdict(list)
    for each in range(_ROUNDS):
        # At first a trial's one step warms up for its next. Then they alternate, so that a slower machine slows all.
        order = left * _STEPS if each else [trial for trial in left for _ in range(_STEPS)]
        for trial in order:
            timelines[trial].append((yield from timed(trial)))
        left.sort(key=lambda trial: undisturbed_seconds(timelines[trial]))
        left = left[: max(2, -(-len(left) // 2))]
    return left[0]


def undisturbed_seconds(timelines: Sequence[Timeline]) -> float:
    """Returns the seconds of a step of one schedule, simulated with the median of each action's times.

    Steps that something else on the machine slowed down as a whole don't count. The shortest times would need no such
    rule, but they get shorter with every step that counts. What the executor adds between actions is what it adds in
    the step where it is least.
    """
    work = [sum(span.seconds for span in timeline.compute_spans) for timeline in timelines]
    counted = [timeline for timeline, its in zip(timelines, work, strict=True) if its <= _DISTURBED * min(work)]
    ran = _schedule_of(timelines[0])
    between = min(timeline.makespan - simulate(ran, MeasuredCost(timeline)).makespan for timeline in counted)
    return simulate(ran, Samples(counted).cost()).makespan + between


def _schedule_of(timeline: Timeline) -> Schedule:
    """Returns the compute actions that ran, including recomputation."""
    spans = sorted(timeline.compute_spans, key=lambda span: span.start)
    rows = tuple(tuple(span.action for span in spans if span.rank == rank) for rank in range(timeline.num_ranks))
    ranks = {span.action.stage: span.rank for span in spans}
    placement = tuple(ranks[stage] for stage in range(len(ranks)))
    microbatches, slices = (1 + max(getattr(s.action, name) for s in spans) for name in ("microbatch", "slice"))
    return Schedule(timeline.name, rows, placement, microbatches, slices)
