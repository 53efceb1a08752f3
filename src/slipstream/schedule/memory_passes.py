"""Passes that hold less memory: recomputation, copies to host memory and back, and several flushes per step."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise, takewhile

from slipstream.schedule.action import Action, Op, ScheduleError
from slipstream.schedule.dependencies import predecessors
from slipstream.schedule.lowering import Seconds, run_times, unit_seconds
from slipstream.schedule.schedule import Schedule
from slipstream.schedule.validation import validate


def add_recompute(
    schedule: Schedule, stages: Collection[int] | None = None, alive: int = 1, seconds: Seconds = unit_seconds
) -> Schedule:
    """Adds an R for the backwards of `stages` (default: all), as early as waiting time allows (GPipe section 2.3).

    R needs nothing from other ranks. So where its rank would wait for as long as R takes, in a run with times `seconds`
    and messages that take none, R stands before that wait; else right before its B or I. At most `alive` slices of a
    rank have all their activations at the same time. A slice whose backward directly follows its forward gets no R:
    its activations would be dropped and computed again immediately. One microbatch of three slices:

        rank 0  F0.0 F0.1 F0.2                B0.2----- R0.1 B0.1----- R0.0 B0.0-----
        rank 1       F0.0 F0.1 F0.2 B0.2----- R0.1 B0.1----- R0.0 B0.0-----

    Raises:
        ScheduleError: the schedule is not valid, or has communication or recomputation already.
    """
    order = _check(schedule, Op.R)
    if alive < 1:
        raise ScheduleError(f"alive={alive}: a number of slices, 1 or more.")
    chosen = range(schedule.num_stages) if stages is None else stages
    rows = [_Row(row, chosen, alive, seconds) for row in schedule.actions]
    ends: dict[Action, float] = {}
    for action in order:
        row = rows[schedule.placement[action.stage]]
        ready = max((ends[before] for before in predecessors(action, schedule)), default=0)
        while row.has_time(ready) and all(before in ends for before in predecessors(row.next_recompute, schedule)):
            row.recompute()
        ends[action] = row.run(action, ready)
    return replace(schedule, actions=tuple(tuple(row.actions) for row in rows))


class _Row:
    """One rank's actions that have run so far, with R's among them."""

    def __init__(self, row: tuple[Action, ...], stages: Collection[int], alive: int, seconds: Seconds) -> None:
        self.actions: list[Action] = []
        self._ahead = deque(row)
        self._waiting: deque[Action] = deque()  # backwards whose R's have not run
        self._whole: set[Action] = set()  # F's of chosen slices that need no R
        self._most_alive, self._alive = alive, 0  # slices that are chosen and have all their activations
        self._seconds = seconds
        self._free: float = 0  # when the last action ends
        self._chosen = {action for action in row if action.op in (Op.B, Op.I) and action.stage in stages}
        for before, action in pairwise(row):
            if action in self._chosen and before == action.with_op(Op.F):
                self._whole.add(before)
            elif action in self._chosen:
                self._waiting.append(action)

    @property
    def next_recompute(self) -> Action:
        return self._waiting[0].with_op(Op.R)

    def has_time(self, ready: float) -> bool:
        """Returns whether the next R fits before an action that can start at `ready`, in time and in memory."""
        if not self._waiting or self._free + self._seconds(self.next_recompute) > ready:
            return False
        until_backward = takewhile(lambda action: action != self._waiting[0], self._ahead)
        return self._alive + any(action in self._whole for action in until_backward) < self._most_alive

    def recompute(self) -> None:
        self._alive += 1
        self._append(self.next_recompute, 0)
        self._waiting.popleft()

    def run(self, action: Action, ready: float) -> float:
        """Runs an action, after its R if that is due, and returns when it ends."""
        self._ahead.popleft()
        if self._waiting and self._waiting[0] == action:
            self.recompute()
        self._alive += (action in self._whole) - (action in self._chosen)
        return self._append(action, ready)

    def _append(self, action: Action, ready: float) -> float:
        self.actions.append(action)
        self._free = max(self._free, ready) + self._seconds(action)
        return self._free


def add_offload(schedule: Schedule, share: float = 1.0, ahead: int = 1, seconds: Seconds = unit_seconds) -> Schedule:
    """Moves the saved activations of a `share` of each rank's slices to the host between forward and backward.

    Those that wait longest are chosen, in a run with times `seconds` and messages that take none. OFFLOAD stands right
    after F; RELOAD stands `ahead` compute actions before the first that needs it (R, B or I), so that the copy runs
    alongside them. A slice without an action between the two stays on the device. One rank, ahead=1:

        F0.0 OFFLOAD0.0 F0.1 F0.2 B0.2 RELOAD0.0 B0.1 B0.0

    Raises:
        ScheduleError: the schedule is not valid, or has communication or offloading already.
    """
    order = _check(schedule, Op.OFFLOAD)
    if not 0 <= share <= 1 or ahead < 0:
        raise ScheduleError(f"share={share}, ahead={ahead}: a share from 0 to 1, and 0 or more actions ahead.")
    starts, ends = run_times(schedule, seconds, order)
    rows = []
    for row in schedule.actions:
        forwards = [action for action in row if action.op is Op.F and schedule.trains(action.stage)]
        needed = {forward: _first_use(forward, schedule) for forward in forwards}
        # Only where anything runs while the activations are away.
        possible = [f for f in forwards if needed[f] - ahead > schedule.positions[f][1] + 1]
        possible.sort(key=lambda forward: ends[forward] - starts[row[needed[forward]]])
        chosen = set(possible[: round(share * len(forwards))])
        reloads: defaultdict[int, list[Action]] = defaultdict(list)
        for forward in sorted(chosen, key=needed.__getitem__):
            reloads[needed[forward] - ahead].append(forward.with_op(Op.RELOAD))
        actions: list[Action] = []
        for index, action in enumerate(row):
            actions += [*reloads[index], action, *([action.with_op(Op.OFFLOAD)] if action in chosen else [])]
        rows.append(tuple(actions))
    return replace(schedule, actions=tuple(rows))


def _first_use(forward: Action, schedule: Schedule) -> int:
    """Returns the place, in its rank's row, of the first action that needs what a forward saves."""
    users = (forward.with_op(op) for op in (Op.R, Op.B, Op.I))
    return min(schedule.positions[user][1] for user in users if user in schedule.positions)


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

    num_microbatches = num_flushes * schedule.num_microbatches

    def row(actions: tuple[Action, ...]) -> tuple[Action, ...]:
        passes = [action for action in actions if action.op is not Op.REDUCE_GRAD]
        firsts = range(0, num_microbatches, schedule.num_microbatches)
        repeated = (action._replace(microbatch=first + action.microbatch) for first in firsts for action in passes)
        return (*repeated, *(action for action in actions if action.op is Op.REDUCE_GRAD))

    rows, reach = tuple(map(row, schedule.actions)), schedule.reach and schedule.reach * num_flushes
    counts = schedule.slice_counts * num_flushes
    return replace(schedule, actions=rows, num_microbatches=num_microbatches, reach=reach, slice_counts=counts)


def _check(schedule: Schedule, op: Op) -> list[Action]:
    """Returns an order in which the schedule runs; raises ScheduleError if `op` can't be added to it."""
    order = validate(schedule)
    if schedule.is_lowered:
        raise ScheduleError(f"{schedule.name} has sends and receives already; add {op} before they are.")
    present = next((action for action in schedule.positions if action.op is op), None)
    if present is not None:
        raise ScheduleError(f"{schedule.name} has {schedule.text(present)} already, so {op} can't be added.")
    if not schedule.has_backward:
        raise ScheduleError(f"{schedule.name} has no backward that {op} could serve.")
    return order
