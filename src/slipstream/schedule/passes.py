"""Passes over schedules: recomputation, offload, several flushes per step, and a spread vocabulary.

The pass that spreads the vocabulary over all ranks: where V, L and VW, E and EW stand among the other actions.

Vocabulary parallelism for pipelines, with one exchange before the backward (Yeung et al. 2024, "Balancing Pipeline
Parallelism with Vocabulary Parallelism", algorithm 2, whose passes S and T are V and VW here, and its section on the
input layer, whose passes are E and EW).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from slipstream.schedule.action import COMMUNICATION, OPS, VOCABULARY, Action, Op, ScheduleError
from slipstream.schedule.lowering import Seconds, unit_seconds
from slipstream.schedule.schedule import Schedule
from slipstream.schedule.validation import validate

if TYPE_CHECKING:
    from slipstream.array_types import Flags, Floats, Ints
    from slipstream.schedule.action_arrays import ActionArrays
    from slipstream.schedule.sweep import HeadGaps


def add_recompute(
    schedule: Schedule,
    stages: Collection[int] | None = None,
    alive: int = 1,
    seconds: Seconds = unit_seconds,
    compiled: bool = False,
) -> Schedule:
    """Adds an R for the backwards of `stages` (default: all), as early as waiting time allows (GPipe section 2.3).

    R needs nothing from other ranks. So where its rank would wait for as long as R takes, in a run with times `seconds`
    and messages that take none, R stands before that wait; else right before its B or I. At most `alive` slices of a
    rank have all their activations at the same time. A slice whose backward directly follows its forward gets no R:
    its activations would be dropped and computed again immediately. One microbatch of three slices:

        rank 0  F0.0 F0.1 F0.2                B0.2----- R0.1 B0.1----- R0.0 B0.0-----
        rank 1       F0.0 F0.1 F0.2 B0.2----- R0.1 B0.1----- R0.0 B0.0-----

    With `compiled`, compiled code does the work, and the schedule is taken to be valid: a named one is.

    Raises:
        ScheduleError: the schedule is not valid, or has communication or recomputation already.
    """
    if not compiled:
        _check(schedule, Op.R)
    if alive < 1:
        raise ScheduleError(f"alive={alive}: a number of slices, 1 or more.")
    from slipstream.schedule.action_arrays import ActionArrays  # loads numpy

    chosen = range(schedule.num_stages) if stages is None else stages
    arrays = ActionArrays.of(schedule, alike=seconds is unit_seconds)
    return arrays.with_recompute(chosen, alive, seconds, compiled)


def add_offload(
    schedule: Schedule,
    share: float = 1.0,
    ahead: int = 1,
    seconds: Seconds = unit_seconds,
    compiled: bool = False,
) -> Schedule:
    """Moves the saved activations of a `share` of each rank's slices to the host between forward and backward.

    Those that wait longest are chosen, in a run with times `seconds` and messages that take none. OFFLOAD stands right
    after F; RELOAD stands `ahead` compute actions before the first that needs it (R, B or I), so that the copy runs
    alongside them. A slice without an action between the two stays on the device. One rank, ahead=1:

        F0.0 OFFLOAD0.0 F0.1 F0.2 B0.2 RELOAD0.0 B0.1 B0.0

    With `compiled`, compiled code does the work, and the schedule is taken to be valid: a named one is.

    Raises:
        ScheduleError: the schedule is not valid, or has communication or offloading already.
    """
    if not compiled:
        _check(schedule, Op.OFFLOAD)
    if not 0 <= share <= 1 or ahead < 0:
        raise ScheduleError(f"share={share}, ahead={ahead}: a share from 0 to 1, and 0 or more actions ahead.")
    from slipstream.schedule.action_arrays import ActionArrays  # loads numpy

    arrays = ActionArrays.of(schedule, alike=seconds is unit_seconds)
    return arrays.with_offload(share, ahead, seconds, compiled)


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
    return _shortest_filled(wider, schedule, seconds, link)


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


_MOST_INTERPRETED = 300  # actions whose order is found without loading what is compiled
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


def _shortest_filled(wider: Schedule, schedule: Schedule, seconds: Seconds, link: Seconds) -> Schedule:
    """Returns the new actions of `wider` in the gaps of `schedule`, whose own keep their order."""
    import numpy as np

    from slipstream.schedule.action_arrays import ActionArrays, sweeps

    arrays = ActionArrays.of(wider, alike=seconds is unit_seconds)
    durations, size = arrays.each(seconds), len(arrays.op)
    graph = arrays.graph(durations, precedence=arrays.precedence.with_pairs(*_order_of_gaps(arrays, schedule)))
    # Messages leave as soon as their action ends, and don't delay each other.
    travels = arrays.each(link, among=np.flatnonzero(_is_sent(arrays)))
    counts = graph.counts + np.array([0, len(arrays), 0, 0])
    graph = graph._replace(channel=arrays.rank, link_seconds=travels, counts=counts)
    fill = sweeps(compiled=size > _MOST_INTERPRETED).fill_gaps
    best, found = np.inf, np.arange(0)
    # Before other actions: never, from when their microbatch is through, or always.
    for early in ((False, False), (False, True), (True, True)):
        priority, gaps = _priorities(arrays, schedule, early)
        order, start = fill(graph, priority, gaps)
        if (makespan := float((start + durations).max())) < best:
            best, found = makespan, np.concatenate(order.by_rank())
    return arrays.only(found)


def _is_sent(arrays: ActionArrays) -> Flags:
    """Marks the actions whose results other ranks need."""
    import numpy as np

    first_before, before, *_ = arrays.precedence
    users = np.repeat(np.arange(len(arrays.op)), np.diff(first_before))
    sent = np.zeros(len(arrays.op), np.bool_)
    sent[before[arrays.rank[before] != arrays.rank[users]]] = True
    return sent


def _order_of_gaps(arrays: ActionArrays, schedule: Schedule) -> tuple[Ints, Ints]:
    """Returns further pairs of actions of which the one comes before the other: of the order that is kept, and of each
    E the forward of the first stage after which it may run, so that few results wait there."""
    import numpy as np

    kept = np.concatenate(
        [np.arange(first, first + len(row) - 1) for first, row in zip(arrays.firsts, schedule.actions, strict=False)]
    ).astype(np.int64)
    forwards = np.flatnonzero(arrays.is_one_of(Op.F) & (arrays.stage == 0))
    ahead = _AHEAD * len(arrays)
    earlier, later = forwards[:-ahead], forwards[ahead:]
    lookups = arrays.places(Op.E)[:, arrays.slices[later]]
    is_there = lookups >= 0
    limits = np.broadcast_to(earlier, lookups.shape)[is_there]
    return np.concatenate([kept, limits]), np.concatenate([kept + 1, lookups[is_there]])


def _priorities(arrays: ActionArrays, schedule: Schedule, early: tuple[bool, bool]) -> tuple[Floats, HeadGaps]:
    """Returns the priority of every action, and what changes it, where V's come before other actions, if they do, once
    their microbatch is not, or is, through all stages."""
    import numpy as np

    from slipstream.schedule.sweep import HeadGaps

    size, last = len(arrays.op), schedule.num_stages - 1
    classes = np.array([_ORDER.get(op, 1) for op in OPS])[arrays.op]
    # Of one class and order, the first by name.
    names = np.argsort(np.argsort([*map(str, OPS)]))[arrays.op]
    by_name = np.empty(size)
    by_name[np.lexsort((arrays.slice, arrays.microbatch, arrays.stage, names))] = np.arange(size)
    lookups, forwards = arrays.is_one_of(Op.E), arrays.places(Op.F)[0]
    place = forwards[arrays.slices] - arrays.firsts[schedule.placement[0]]
    most = int(max(place.max(), arrays.slice.max()))
    unit = float((2 * most + 1) * size)

    def priority(is_through: bool) -> Floats:
        order = np.where(lookups, place, -arrays.slice if is_through else arrays.slice)
        of_class = np.where(arrays.is_one_of(Op.V) & early[is_through], 0, classes)
        together: Floats = of_class * unit + (order + most) * size + by_name
        return together

    ends = arrays.slice == np.array(schedule.slice_counts)[arrays.microbatch] - 1
    gaps = HeadGaps(
        unit=unit,
        microbatch=arrays.microbatch,
        ends_forwards=ends & arrays.is_one_of(Op.F) & (arrays.stage == last),
        later=priority(True),
        is_gradient=arrays.is_one_of(Op.EW),
        num_gradients=np.zeros(len(arrays), np.int64),
        most_gradients=_AHEAD * schedule.num_ranks,
        gradient_class=float(_ORDER[Op.EW]),
    )
    return priority(False), gaps
