"""Passes that hold less memory: recomputation, copies to host memory and back, and several flushes per step."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile

from slipstream.schedule.action import Action, Op, Schedule, ScheduleError
from slipstream.schedule.dependencies import predecessors
from slipstream.schedule.lowering import Seconds, run_times, unit_seconds
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
        while row.has_time(ready) and all(before in ends for before in predecessors(row.waiting[0], schedule)):
            row.recompute()
        ends[action] = row.run(action, ready)
    return replace(schedule, actions=tuple(tuple(row.actions) for row in rows))


class _Row:
    """One rank's actions that have run so far, with R's among them."""

    def __init__(self, row: tuple[Action, ...], stages: Collection[int], alive: int, seconds: Seconds) -> None:
        self.waiting: deque[Action] = deque()  # R's, in the order of their backwards
        self.actions: list[Action] = []
        self._ahead = deque(row)
        self._whole: set[Action] = set()  # F's of chosen slices that need no R
        self._most_alive, self._alive = alive, 0  # slices that are chosen and have all their activations
        self._seconds = seconds
        self._free: float = 0  # when the last action ends
        for before, action in pairwise(row):
            if action.op in (Op.B, Op.I) and action.stage in stages:
                if before == action.with_op(Op.F):
                    self._whole.add(before)
                else:
                    self.waiting.append(action.with_op(Op.R))
        self._chosen = {recompute.with_op(Op.F) for recompute in self.waiting} | self._whole

    def has_time(self, ready: float) -> bool:
        """Whether the next R fits before an action that can start at `ready`, in time and in memory."""
        if not self.waiting or self._free + self._seconds(self.waiting[0]) > ready:
            return False
        until_backward = takewhile(
            lambda a: a.op not in (Op.B, Op.I) or a.with_op(Op.R) != self.waiting[0], self._ahead
        )
        return self._alive + any(action in self._whole for action in until_backward) < self._most_alive

    def recompute(self) -> None:
        self._alive += 1
        self._append(self.waiting.popleft(), 0)

    def run(self, action: Action, ready: float) -> float:
        """Runs an action, after its R if that is due, and returns when it ends."""
        self._ahead.popleft()
        if action.op in (Op.B, Op.I) and self.waiting and self.waiting[0] == action.with_op(Op.R):
            self.recompute()
        self._alive += action in self._whole
        self._alive -= action.op in (Op.B, Op.I) and action.with_op(Op.F) in self._chosen
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
        num_chosen = round(share * sum(action.op is Op.F for action in row))
        places = {action: index for index, action in enumerate(row)}
        stays = [_HostStay.of(action, places, ahead) for action in row if action.op is Op.F]
        possible = [stay for stay in stays if stay.leaves_room]
        possible.sort(key=lambda stay: ends[row[stay.forward]] - starts[row[stay.needed]])
        rows.append(_with_offload(row, possible[:num_chosen]))
    return replace(schedule, actions=tuple(rows))


@dataclass(frozen=True)
class _HostStay:
    """The time that a slice's activations spend on the host, as indices in its rank's row."""

    forward: int
    reload: int  # RELOAD stands before this
    needed: int

    @classmethod
    def of(cls, forward: Action, places: Mapping[Action, int], ahead: int) -> _HostStay:
        users = (forward.with_op(op) for op in (Op.R, Op.B, Op.I))
        needed = min(places[user] for user in users if user in places)
        return cls(places[forward], needed - ahead, needed)

    @property
    def leaves_room(self) -> bool:
        """Whether anything runs while the activations are away."""
        return self.reload > self.forward + 1


def _with_offload(row: tuple[Action, ...], stays: list[_HostStay]) -> tuple[Action, ...]:
    offloads = {stay.forward: row[stay.forward].with_op(Op.OFFLOAD) for stay in stays}
    reloads: defaultdict[int, list[Action]] = defaultdict(list)
    for stay in sorted(stays, key=lambda stay: stay.needed):
        reloads[stay.reload].append(row[stay.forward].with_op(Op.RELOAD))
    actions: list[Action] = []
    for index, action in enumerate(row):
        actions += reloads[index]
        actions.append(action)
        if index in offloads:
            actions.append(offloads[index])
    return tuple(actions)


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

    def renumbered(action: Action, flush: int) -> Action:
        return action._replace(microbatch=flush * schedule.num_microbatches + action.microbatch)

    def row(actions: tuple[Action, ...]) -> tuple[Action, ...]:
        passes = [action for action in actions if action.op is not Op.REDUCE_GRAD]
        reductions = [action for action in actions if action.op is Op.REDUCE_GRAD]
        return (*(renumbered(action, flush) for flush in range(num_flushes) for action in passes), *reductions)

    return replace(
        schedule,
        actions=tuple(map(row, schedule.actions)),
        num_microbatches=num_flushes * schedule.num_microbatches,
        reach=schedule.reach and schedule.reach * num_flushes,
    )


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
