"""Passes over schedules: recomputation, offload, several flushes per step, and a spread vocabulary.

The pass that spreads the vocabulary over all ranks: where V, L and VW, E and EW stand among the other actions.

Vocabulary parallelism for pipelines, with one exchange before the backward (Yeung et al. 2024, "Balancing Pipeline
Parallelism with Vocabulary Parallelism", algorithm 2, whose passes S and T are V and VW here, and its section on the
input layer, whose passes are E and EW).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

from slipstream.schedule.action import COMMUNICATION, VOCABULARY, Action, Op, ScheduleError
from slipstream.schedule.lowering import Seconds, unit_seconds
from slipstream.schedule.rules import predecessors
from slipstream.schedule.schedule import Schedule
from slipstream.schedule.validation import validate

if TYPE_CHECKING:
    from slipstream.schedule.action_arrays import RowsRun


def add_recompute(
    schedule: Schedule,
    stages: Collection[int] | None = None,
    alive: int = 1,
    seconds: Seconds = unit_seconds,
    run: RowsRun | None = None,
) -> Schedule:
    """Adds an R for the backwards of `stages` (default: all), as early as waiting time allows (GPipe section 2.3).

    R needs nothing from other ranks. So where its rank would wait for as long as R takes, in a run with times `seconds`
    and messages that take none, R stands before that wait; else right before its B or I. At most `alive` slices of a
    rank have all their activations at the same time. A slice whose backward directly follows its forward gets no R:
    its activations would be dropped and computed again immediately. One microbatch of three slices:

        rank 0  F0.0 F0.1 F0.2                B0.2----- R0.1 B0.1----- R0.0 B0.0-----
        rank 1       F0.0 F0.1 F0.2 B0.2----- R0.1 B0.1----- R0.0 B0.0-----

    With `run`, the compiled `run_rows`, that does the work, and the schedule is taken to be valid: a named one is.

    Raises:
        ScheduleError: the schedule is not valid, or has communication or recomputation already.
    """
    if run is None:
        _check(schedule, Op.R)
    if alive < 1:
        raise ScheduleError(f"alive={alive}: a number of slices, 1 or more.")
    from slipstream.schedule.action_arrays import ActionArrays, run_rows  # loads numpy

    chosen = range(schedule.num_stages) if stages is None else stages
    arrays = ActionArrays.of(schedule, alike=seconds is unit_seconds)
    return arrays.with_recompute(chosen, alive, seconds, run or run_rows)


def add_offload(
    schedule: Schedule,
    share: float = 1.0,
    ahead: int = 1,
    seconds: Seconds = unit_seconds,
    run: RowsRun | None = None,
) -> Schedule:
    """Moves the saved activations of a `share` of each rank's slices to the host between forward and backward.

    Those that wait longest are chosen, in a run with times `seconds` and messages that take none. OFFLOAD stands right
    after F; RELOAD stands `ahead` compute actions before the first that needs it (R, B or I), so that the copy runs
    alongside them. A slice without an action between the two stays on the device. One rank, ahead=1:

        F0.0 OFFLOAD0.0 F0.1 F0.2 B0.2 RELOAD0.0 B0.1 B0.0

    With `run`, the compiled `run_rows`, that does the work, and the schedule is taken to be valid: a named one is.

    Raises:
        ScheduleError: the schedule is not valid, or has communication or offloading already.
    """
    if run is None:
        _check(schedule, Op.OFFLOAD)
    if not 0 <= share <= 1 or ahead < 0:
        raise ScheduleError(f"share={share}, ahead={ahead}: a share from 0 to 1, and 0 or more actions ahead.")
    from slipstream.schedule.action_arrays import ActionArrays, run_rows  # loads numpy

    arrays = ActionArrays.of(schedule, alike=seconds is unit_seconds)
    return arrays.with_offload(share, ahead, seconds, run or run_rows)


def in_flushes(schedule: Schedule, num_flushes: int) -> Schedule:
    """Returns the schedule repeated `num_flushes` times, with consecutive microbatches (TeraPipe, appendix A).

    Each rank finishes a flush before it starts the next, so it never keeps more activations than one flush has, while
    ranks that finish early start the next flush early. GPipe over two ranks, two flushes of two microbatches:

        rank 0  F0 F1       B0 B1 F2 F3       B2 B3
        rank 1     F0 F1 B0 B1       F2 F3 B2 B3

    REDUCE_GRAD runs after the last flush only; documents (`reach`) repeat with the microbatches.

    Raises:
        ScheduleError: there is less than one flush, or the schedule has sends and receives, which are added later.
    """
    if num_flushes < 1:
        raise ScheduleError(f"num_flushes={num_flushes}: give 1 or more.")
    if schedule.is_lowered:
        raise ScheduleError(f"{schedule.name} has sends and receives already; repeat it before they are added.")

    num_microbatches, rows = num_flushes * schedule.num_microbatches, []
    for row in schedule.actions:
        passes = [action for action in row if action.op is not Op.REDUCE_GRAD]
        firsts = range(0, num_microbatches, schedule.num_microbatches)
        repeated = (action._replace(microbatch=first + action.microbatch) for first in firsts for action in passes)
        rows.append((*repeated, *(action for action in row if action.op is Op.REDUCE_GRAD)))
    reach = schedule.reach and schedule.reach * num_flushes
    counts = schedule.slice_counts * num_flushes
    return replace(schedule, actions=tuple(rows), num_microbatches=num_microbatches, reach=reach, slice_counts=counts)


def _check(schedule: Schedule, op: Op) -> None:
    """Raises ScheduleError if `op` can't be added to the schedule."""
    validate(schedule)
    if schedule.is_lowered:
        raise ScheduleError(f"{schedule.name} has sends and receives already; add {op} before they are.")
    present = next((action for action in schedule.positions if action.op is op), None)
    if present is not None:
        raise ScheduleError(f"{schedule.name} has {schedule.text(present)} already, so {op} can't be added.")
    if not schedule.has_backward:
        raise ScheduleError(f"{schedule.name} has no backward that {op} could serve.")


def spread_vocabulary(
    schedule: Schedule,
    seconds: Seconds = unit_seconds,
    link: Seconds = lambda _: 0,
    embedding: bool = False,
    ahead: int = 0,
) -> Schedule:
    """Adds V, L and VW to a schedule with compute actions only, so that every rank has its rows of the head.

    The other actions keep their order. In a run with times `seconds`, and messages that travel `link` seconds after
    the action that sends them, V and VW fill the time in which their rank waits. V's are also tried before other
    actions, always or from when their microbatch has gone through all stages; the shortest of the three runs counts.
    One microbatch of three slices on two ranks:

        rank 0  F0.0 F0.1 F0.2 V0.0 V0.1 V0.2           VW0.2 B0.2----- ...
        rank 1       F0.0 F0.1 F0.2 V0.2 V0.1 L0.2 B0.2-----  ...

    With `embedding`, for a head whose weight embeds too, E and EW are added: an E runs as soon as the first stage is
    within two slices a rank of its own, and an EW where its rank waits, or when more than two a rank are left over.

    With `ahead`, every rank runs the forwards of so many microbatches more before its other actions than the order has,
    and holds as many more: between a microbatch's last forward and its first backward lie V and L, for which 1F1B has
    no time (the paper's section 5.2).

    A schedule of forwards alone gets V and L, and E.

    Raises:
        ScheduleError: the schedule is not valid, or has communication or a spread vocabulary already, or can't run so
            far ahead.
    """
    schedule = _with_forwards_ahead(schedule, ahead)
    validate(schedule)
    if empty := set(range(schedule.num_ranks)) - set(schedule.placement):
        raise ScheduleError(f"{schedule.name} has no stage on rank {min(empty)}, next to which it could have its rows.")
    if not schedule.ops.isdisjoint(COMMUNICATION | VOCABULARY):
        raise ScheduleError(f"{schedule.name} has sends and receives, or V's, already: spread the vocabulary before.")
    wider = _with_vocabulary_last(schedule, embedding)
    # Before other actions: never, from when their microbatch is through, or always.
    runs = [_Run(wider, schedule, seconds, link, early) for early in ((False, False), (False, True), (True, True))]
    rows = min((run.finished() for run in runs), key=lambda run: run.makespan).rows
    return replace(schedule, actions=tuple(map(tuple, rows)))


def _with_forwards_ahead(schedule: Schedule, microbatches: int) -> Schedule:
    """Returns the schedule with every rank's forwards moved ahead, in their order, by as many as microbatches have."""
    if not microbatches:
        return schedule
    rows, num_slices = [], microbatches * max(schedule.slice_counts)
    for row in schedule.actions:
        forwards = [place for place, action in enumerate(row) if action.op is Op.F]
        earlier = dict(zip(forwards, forwards[:1] * num_slices + forwards, strict=False))
        rows.append(tuple(row[place] for place in sorted(range(len(row)), key=lambda at: earlier.get(at, at))))
    return replace(schedule, actions=tuple(rows))


_ORDER = {Op.E: -1, Op.L: 0, Op.V: 2, Op.VW: 3, Op.EW: 4}
_AHEAD = 2  # slices for each rank by which an E may be ahead of its F, and an EW behind its backward


def _with_vocabulary_last(schedule: Schedule, embedding: bool) -> Schedule:
    """Returns the schedule with the new actions at the ends of rows: the rules of order need to know of them."""
    ops = [Op.V, *([Op.E] if embedding else [])]
    if schedule.has_backward:
        ops += [Op.VW, *([Op.EW] if embedding else [])]
    last = schedule.num_stages - 1
    rows = [
        (*row, *(Action(op, stage, *place) for op in ops for place in schedule.microbatch_slices))
        for row, stage in zip(schedule.actions, schedule.vocabulary_stages, strict=True)
    ]
    rows[schedule.placement[last]] += tuple(Action(Op.L, last, *place) for place in schedule.microbatch_slices)
    return replace(schedule, actions=tuple(rows))


class _Ready(NamedTuple):
    """An action that may start, in the order in which a rank takes those that may."""

    start: float
    priority: int
    order: int
    action: Action


class _Queue:
    """The actions that a rank may run next: those whose inputs have arrived by priority, the others by when they do."""

    def __init__(self) -> None:
        self._arriving: list[_Ready] = []
        self._there: list[tuple[int, int, Action]] = []
        self._current: dict[Action, _Ready] = {}  # further entries of the two are of the past

    def __len__(self) -> int:
        return len(self._current)

    def add(self, ready: _Ready) -> None:
        self._current[ready.action] = ready
        heappush(self._arriving, ready)

    def remove(self, action: Action) -> None:
        del self._current[action]

    def first(self, free: float) -> _Ready | None:
        """Returns the first action to start on a rank that is free from then on, and its start; None without one."""
        while self._arriving and self._arriving[0].start <= free:
            ready = heappop(self._arriving)
            if self._current.get(ready.action) == ready:
                heappush(self._there, ready[1:])
        while self._there:
            priority, order, action = self._there[0]
            current = self._current.get(action)
            if current is not None and current[1:] == self._there[0]:
                return _Ready(free, priority, order, action)
            heappop(self._there)
        while self._arriving:
            if self._current.get(self._arriving[0].action) == self._arriving[0]:
                return self._arriving[0]
            heappop(self._arriving)
        return None


@dataclass
class _Run:
    """Runs all ranks at the same time, each as soon as it can, and notes the actions of each."""

    wider: Schedule  # with the new actions somewhere
    schedule: Schedule
    seconds: Seconds
    link: Seconds
    early: tuple[bool, bool]  # whether a V is tried before other actions, once its microbatch is not or is through
    makespan: float = 0
    rows: list[list[Action]] = field(default_factory=list)

    def finished(self) -> _Run:
        """Runs to the end: always the action that starts first, and of several the first by priority."""
        num_ranks = self.schedule.num_ranks
        self.rows = [[] for _ in range(num_ranks)]
        self._ends: dict[Action, float] = {}
        self._free: list[float] = [0] * num_ranks
        self._before = {action: {*predecessors(action, self.wider)} for action in self.wider.positions}
        self._before |= self._not_too_early()
        for action, following in chain.from_iterable(map(pairwise, self.schedule.actions)):
            self._before[following].add(action)
        self._after = defaultdict(list)
        for action, before in self._before.items():
            for predecessor in before:
                self._after[predecessor].append(action)
        # the new ones that may start, with those of E's kind apart: which of them comes first depends on their number
        self._queues = [(_Queue(), _Queue()) for _ in range(num_ranks)]
        self._by_microbatch: dict[tuple[int, int], dict[Action, float]] = defaultdict(dict)  # of a rank, and since when
        self._through: set[int] = set()  # microbatches that have gone through all stages
        self._note(action for action, before in self._before.items() if not before)
        while (chosen := min(self._choices(), default=None)) is not None:
            start, _, rank, _, action = chosen
            self._run(action, rank, start)
        self.makespan = max(self._free)
        return self

    def _not_too_early(self) -> dict[Action, set[Action]]:
        """Returns for each E the forward of the first stage after which it may run, so that few results wait there."""
        ahead = _AHEAD * self.schedule.num_ranks
        row = self.schedule.actions[self.schedule.placement[0]]
        forwards = [action for action in row if action.op is Op.F and action.stage == 0]
        pairs = zip(forwards, forwards[ahead:], strict=False)
        stages = self.schedule.vocabulary_stages if self.wider.spreads_embedding else ()
        return {later.with_op(Op.E)._replace(stage=g): {earlier} for earlier, later in pairs for g in stages}

    def _choices(self) -> Iterator[tuple[float, int, int, int, Action]]:
        """Yields each rank's candidates: start, priority, rank, order of slices, action."""
        for rank, (others, gradients) in enumerate(self._queues):
            has_many = len(gradients) > _AHEAD * self.schedule.num_ranks
            if (first := others.first(self._free[rank])) is not None:
                yield first.start, first.priority, rank, first.order, first.action
            if (first := gradients.first(self._free[rank])) is not None:
                yield first.start, 0 if has_many else first.priority, rank, first.order, first.action

    def _add(self, action: Action, rank: int, since: float) -> None:
        """Puts an action into its queue, or to another place in it."""
        is_through = action.microbatch in self._through
        order = -action.slice if is_through else action.slice
        if action.op is Op.E:
            _, order = self.schedule.positions[Action(Op.F, 0, action.microbatch, action.slice)]
        priority = 0 if action.op is Op.V and self.early[is_through] else _ORDER.get(action.op, 1)
        self._queues[rank][action.op is Op.EW].add(_Ready(since, priority, order, action))

    def _run(self, action: Action, rank: int, start: float) -> None:
        self._free[rank] = self._ends[action] = start + self.seconds(action)
        self._queues[rank][action.op is Op.EW].remove(action)
        del self._by_microbatch[rank, action.microbatch][action]
        self.rows[rank].append(action)
        m, last = action.microbatch, self.schedule.num_stages - 1
        if action == Action(Op.F, last, m, self.schedule.slice_counts[m] - 1):
            self._through.add(action.microbatch)
            for other_rank in range(self.schedule.num_ranks):
                for ready, since in self._by_microbatch[other_rank, action.microbatch].items():
                    self._add(ready, other_rank, since)
        self._note(self._after[action])

    def _note(self, actions: Iterable[Action]) -> None:
        """Makes those of the actions ready for which all that must come before has run."""
        for action in actions:
            rank = self.schedule.placement[action.stage]
            if action not in self._ends and self._before[action] <= self._ends.keys():
                since = max((self._arrival(b, rank) for b in self._before[action]), default=0)
                self._by_microbatch[rank, action.microbatch][action] = since
                self._add(action, rank, since)

    def _arrival(self, before: Action, rank: int) -> float:
        here = self.schedule.placement[before.stage] == rank
        return self._ends[before] + (0 if here else self.link(before))
