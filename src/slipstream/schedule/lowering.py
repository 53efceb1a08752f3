"""Passes over schedules that add communication or change backwards, and the check that a lowered schedule runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Literal, NamedTuple

from slipstream.schedule.action import BACKWARDS, COMMUNICATION, RECEIVES, SENDS, Action, Op, ScheduleError
from slipstream.schedule.rules import OPERATIONS, sending
from slipstream.schedule.schedule import Schedule
from slipstream.schedule.validation import grid, running_order, validate

if TYPE_CHECKING:
    from slipstream.schedule.action_arrays import ActionArrays

NARROWEST_WINDOW = 8  # sends that may be on their way on a channel, at least
Seconds = Callable[[Action], float]


Direction = Literal["activations", "gradients", "lookups"]


_DIRECTIONS: dict[Op, Direction] = {Op.SEND_F: "activations", Op.SEND_B: "gradients", Op.SEND_E: "lookups"}


class Channel(NamedTuple):
    """One communicator, first in, first out: all messages of one direction from one rank to another."""

    direction: Direction
    source: int
    destination: int
    stages: tuple[int, ...] = ()  # the two ends of a message past neighbours, which has a communicator of its own


def channel(action: Action, schedule: Schedule) -> Channel:
    """Returns the channel of a SEND or RECV; source and destination are pipeline ranks."""
    send = action.send
    source, destination = schedule.placement[send.stage], schedule.placement[send.other_end.stage]
    stages = () if send.peer < 0 else (send.stage, send.peer)
    return Channel(_DIRECTIONS[send.op], source, destination, stages)


def forward_only(schedule: Schedule) -> Schedule:
    """Returns the forwards of a compute-only schedule, for evaluation."""
    arrays = _arrays(schedule)
    return arrays.only(arrays.is_one_of(Op.F, Op.V, Op.L, Op.E))


def without_communication(schedule: Schedule) -> Schedule:
    """Returns the schedule without sends and receives."""
    arrays = _arrays(schedule)
    return arrays.only(~arrays.is_one_of(*COMMUNICATION))


def freeze_stages(schedule: Schedule, number: int) -> Schedule:
    """Leaves out the backwards of the first stages, of which nothing is trained, where a schedule still has them. Two
    frozen stages of three:

    rank 0  F0.0 F0.1                      (no B)
    rank 1       F0.0 F0.1                 (no B)
    rank 2            F0.0 F0.1 B0.1 B0.0
    """
    if not 0 <= number < schedule.num_stages:
        raise ScheduleError(
            f"{schedule.name} has {number} frozen stages of {schedule.num_stages}; at least the last one has backwards."
        )
    if number <= schedule.num_frozen_stages:
        return schedule
    arrays = _arrays(schedule)
    backward = arrays.is_one_of(*BACKWARDS, Op.R, Op.OFFLOAD, Op.RELOAD, Op.REDUCE_GRAD)
    return arrays.only(~backward | (arrays.stage >= number))


def _arrays(schedule: Schedule) -> ActionArrays:
    from slipstream.schedule.action_arrays import ActionArrays  # loads numpy

    return ActionArrays.of(schedule)


def split_backwards(schedule: Schedule, everywhere: bool = False) -> Schedule:
    """Splits each B that sends its result to another rank into I and W, so that the message leaves before W.

    The stage before starts its backward earlier by the time of the weight gradients:

        rank 0        B0.1           B0.0
        rank 1  I0.1 W0.1 I0.0 W0.0

    With `everywhere`, splits each B, whether or not it sends.
    """
    placement = schedule.placement
    sends = [g for g in range(schedule.num_stages) if everywhere or (g and placement[g - 1] != placement[g])]
    return _arrays(schedule).with_halves(sends)


def join_backwards(schedule: Schedule) -> Schedule:
    """Turns each I into B, where it stands, and leaves W out: the opposite of `split_backwards`."""
    return _arrays(schedule).with_whole_backwards()


def add_reductions(schedule: Schedule) -> Schedule:
    """Adds a REDUCE_GRAD of every stage after its last backward, and after those of its rank's later stages.

    The stage's gradients are summed over the replicas of the pipeline while earlier stages still compute. Replicas
    may run different schedules: a rank's stages are reduced from the last to the first in all of them.

        rank 0        B0     B1 0REDUCE_GRAD
        rank 1  B0 B1 1REDUCE_GRAD
    """
    return replace(schedule, actions=tuple(map(_with_reductions, schedule.actions)))


def _with_reductions(row: Sequence[Action]) -> tuple[Action, ...]:
    # The stage's message leaves before its reduction.
    ends = BACKWARDS | {Op.SEND_B, Op.VW, Op.EW}
    last = {action.stage: index for index, action in enumerate(row) if action.op in ends}
    stages = sorted(last, reverse=True)
    reduced = defaultdict(list)
    for stage, index in zip(stages, accumulate((last[stage] for stage in stages), max), strict=True):
        reduced[index].append(Action(Op.REDUCE_GRAD, stage))
    return tuple(inserted for index, action in enumerate(row) for inserted in (action, *reduced[index]))


def add_communication(schedule: Schedule, ahead: int = 1) -> Schedule:
    """Adds a SEND after every action whose result another rank needs, and the RECV that takes it there.

    A run with `unit_seconds` is the witness. Each RECV is posted where its rank stands when the SEND
    happens in it, or `ahead` compute actions before its consumer if that is earlier, and never later than a
    RECV whose message comes after it on the same channel. Between two compute actions RECVs come first, so
    the ranks can follow the witness without a SEND ever waiting for its RECV: the result ends under
    rendezvous too. Forwards of two ranks and three slices, each receive posted one forward ahead:

        rank 0: 0F0.0 0SEND_F0.0 0F0.1 0SEND_F0.1 0F0.2 0SEND_F0.2
        rank 1: 1RECV_F0.0 1RECV_F0.1 1F0.0 1RECV_F0.2 1F0.1 1F0.2

    Raises:
        ScheduleError: the schedule is not valid or has communication already.
    """
    if schedule.is_lowered:
        raise ScheduleError(f"{schedule.name} has sends and receives already; lower it before they are added.")
    if ahead < 0:
        raise ScheduleError(f"ahead={ahead}: a number of compute actions, 0 or more.")
    receives = _place_receives(schedule, ahead)
    rows = []
    for rank, row in enumerate(schedule.actions):
        lowered = receives[rank, 0]
        for index, action in enumerate(row, start=1):
            send = sending(action, schedule)
            lowered += [action, *receives[rank, index], *([] if send is None else [send])]
        rows.append(tuple(lowered))
    return replace(schedule, actions=tuple(rows))


def _place_receives(schedule: Schedule, ahead: int) -> defaultdict[tuple[int, int], list[Action]]:
    """Returns the RECVs that stand before each (rank, index) of the compute-only schedule, in order of arrival."""
    from slipstream.schedule.action_arrays import MessageArrays  # loads numpy

    order, arrays = validate(schedule), _arrays(schedule)
    seconds, actions = arrays.each(unit_seconds), [*chain.from_iterable(schedule.actions)]
    ends = dict(zip(actions, arrays.ends(seconds).tolist(), strict=True))
    sender, user, _, posted, *_ = MessageArrays.placed(arrays, seconds, ahead=ahead)
    ranks = arrays.rank[user]
    places = zip(sender.tolist(), ranks.tolist(), (posted // 3 - arrays.firsts[ranks]).tolist(), strict=True)
    before = {actions[number]: place for number, *place in places}
    receives: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for producer in sorted(order, key=ends.__getitem__, reverse=True):
        if send := sending(producer, schedule):
            rank, index = before[producer]
            receives[rank, index].insert(0, send.other_end)
    return receives


def unit_seconds(action: Action) -> float:
    """Returns 2 for a whole backward, 0 for one that runs alongside the computing, else 1."""
    return OPERATIONS[action.op].seconds


def check_communication(schedule: Schedule) -> None:
    """Checks that the messages of a lowered schedule match in order and that it ends.

    It must be valid, every channel's RECVs must stand in the order of its SENDs, and the ranks must come to
    their ends (a) under rendezvous, where a SEND holds its rank until its RECV is posted, and (b) with one
    stream per channel, where posting never waits and a message moves when both ends have reached it and the
    messages before it have moved.

    Raises:
        ScheduleError: with the first mismatch, or the cycle of ranks that wait for each other.
    """
    # This runs model (b): given equal orders, the messages before have moved as well.
    validate(schedule)
    receives = _ends_by_channel(schedule, RECEIVES)
    for line, sent in _ends_by_channel(schedule, SENDS).items():
        for send, receive in zip(sent, receives[line], strict=True):
            if receive != send.other_end:
                marked = grid(schedule, [schedule.positions[send], schedule.positions[receive]])
                direction, source, destination, _ = line
                met = f"goes out where rank {destination} takes {schedule.text(receive)}"
                rule = f"the {direction} from rank {source} to rank {destination} are first in, first out"
                raise ScheduleError(f"{schedule.text(send)} {met}: {rule}.\n{marked}")
    try:
        running_order(schedule, rendezvous=True)
    except ScheduleError as error:
        raise ScheduleError(f"With sends that wait for their receives: {error}") from None


def _ends_by_channel(schedule: Schedule, ops: frozenset[Op]) -> defaultdict[Channel, list[Action]]:
    ends: defaultdict[Channel, list[Action]] = defaultdict(list)
    for row in schedule.actions:
        for action in row:
            if action.op in ops:
                ends[channel(action, schedule)].append(action)
    return ends


def receives_in_flight(schedule: Schedule) -> dict[Channel, int]:
    """Returns, per channel, the most receives posted at the same time whose consumers have not run: its buffers."""
    from slipstream.schedule.action_arrays import MessageArrays  # loads numpy

    arrays = _arrays(without_communication(schedule))
    messages, actions = MessageArrays.of(arrays, schedule), [*chain.from_iterable(arrays)]
    sends = [(sending(actions[messages.sender[line[0]]], schedule), line) for line in messages.lines]
    return {channel(send, schedule): messages.most_posted(line) for send, line in sends if send}


def send_windows(schedule: Schedule) -> dict[Channel, int]:
    """Returns how many sends of a channel may be on their way before the next one waits for the oldest."""
    return {line: send_window(most_posted) for line, most_posted in receives_in_flight(schedule).items()}


def send_window(most_posted: int) -> int:
    """Returns how many sends may be on their way where so many receives are posted at the same time."""
    return max(NARROWEST_WINDOW, 2 * most_posted)
