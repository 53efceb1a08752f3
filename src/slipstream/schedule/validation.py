"""Checks of a whole schedule: every action stands where it belongs, none is missing, and the ranks can run it.

Errors show the rank x step grid with the offending actions marked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise, product

from slipstream.schedule.action import COMMUNICATION, OPS, RECEIVES, SENDS, VOCABULARY, Action, Op, ScheduleError
from slipstream.schedule.rules import OPERATIONS, predecessors, reason
from slipstream.schedule.schedule import Schedule

_AROUND = 5  # steps shown to either side of a mark of the grid


def running_order(
    schedule: Schedule,
    rendezvous: bool = False,
    rows: Sequence[Sequence[Action]] | None = None,
    when_stuck: Callable[[Sequence[int], Mapping[int, Action]], int | None] | None = None,
) -> list[Action]:
    """Returns all actions in an order in which the ranks can run them, each rank in its own order.

    Posting a receive never waits, and an action that uses a message waits until both ends were reached. A send
    does not wait either, unless `rendezvous`: then it holds its rank until the receive is posted.

    Args:
        schedule: with all actions.
        rendezvous: whether sends wait.
        rows: the ranks' orders. None: the schedule's.
        when_stuck: changes `rows`, given how far each rank has come and the action that each misses, and returns the
            rank that can go on; None where none can.

    Raises:
        ScheduleError: the ranks get stuck; the message names the cycle of ranks that wait for each other.
    """
    rows = schedule.actions if rows is None else rows
    done: dict[Action, None] = {}  # the actions that have run, in order
    reached = [0] * schedule.num_ranks
    stuck: dict[Action, list[int]] = {}  # awaited action -> ranks that wait for it
    ready = deque(range(schedule.num_ranks))
    while ready:
        rank = ready.popleft()
        row = rows[rank]
        while reached[rank] < len(row):
            action = row[reached[rank]]
            missing = next((a for a in _awaited(action, schedule, rendezvous) if a not in done), None)
            if missing is not None:
                stuck.setdefault(missing, []).append(rank)
                break
            done[action] = None
            reached[rank] += 1
            ready.extend(stuck.pop(action, ()))
        if stuck and not ready and when_stuck is not None:
            waiting = {rank: action for action, ranks in stuck.items() for rank in ranks}
            ready.extend(() if (going := when_stuck(reached, waiting)) is None else (going,))
    if stuck:
        awaited = {rank: action for action, ranks in stuck.items() for rank in ranks}
        raise ScheduleError(_explain_stuck(schedule, reached, awaited))
    return list(done)


def _awaited(action: Action, schedule: Schedule, rendezvous: bool) -> tuple[Action, ...]:
    """Returns the actions that the rank waits for at `action`: not all that precede it, as posting doesn't wait."""
    if action.op in RECEIVES:
        return ()
    before = predecessors(action, schedule)
    if action.op in SENDS:
        return (*before, action.other_end) if rendezvous else before
    return before + tuple(a.other_end for a in before if a.op in RECEIVES)


def _explain_stuck(schedule: Schedule, reached: list[int], awaited: Mapping[int, Action]) -> str:
    """Explains which ranks wait for each other, where `awaited[rank]` misses for the rank's next action."""
    text, positions = schedule.text, schedule.positions
    next_action = {rank: schedule.actions[rank][reached[rank]] for rank in awaited}
    cycle = _cycle(schedule, awaited)
    lines = ["The ranks wait for each other forever:" if len(cycle) > 1 else "This order can't run:"]
    for rank in cycle:
        action, other = next_action[rank], awaited[rank]
        if other not in positions:
            where = "which the schedule lacks"
        elif (there := positions[other][0]) == rank:
            where = "which comes after it on the same rank"
        else:
            where = f"which comes after {text(next_action[there])} on rank {there}"
        lines.append(f"  {text(action)} (rank {rank}) waits for {text(other)}, {where}: {reason(action, other)}.")
    return "\n".join([*lines, grid(schedule, [(rank, reached[rank]) for rank in cycle])])


def _cycle(schedule: Schedule, awaited: Mapping[int, Action]) -> list[int]:
    """Returns the ranks that wait in a circle, or the one that waits for an action the schedule lacks."""
    path: list[int] = []
    rank = min(awaited)
    while rank not in path:
        path.append(rank)
        if awaited[rank] not in schedule.positions:
            return [rank]
        rank, _ = schedule.positions[awaited[rank]]
    return path[path.index(rank) :]


def validate(schedule: Schedule) -> list[Action]:
    """Checks that every action stands where it belongs, none is missing or doubled, and the ranks can run them.

    A schedule without any backward is valid too: evaluation runs it.

    Returns:
        All actions in an order in which the ranks can run them (see `running_order`).

    Raises:
        ScheduleError: with the rank x step grid, the offending action marked as in `>2B0.3<`, the rule that it
            breaks and the action that it waits for.
    """
    seen: set[Action] = set()
    for rank, row in enumerate(schedule.actions):
        for step, action in enumerate(row):
            if problem := "comes a second time" if action in seen else _misplaced(action, rank, schedule):
                raise ScheduleError(f"{schedule.text(action)} {problem}.\n{grid(schedule, [(rank, step)])}")
            seen.add(action)
    for stage, (microbatch, index) in product(range(schedule.num_stages), schedule.microbatch_slices):
        _check_complete(stage, microbatch, index, schedule)
    if not schedule.ops.isdisjoint(VOCABULARY):
        _check_vocabulary(schedule)
    return running_order(schedule)


_COMPLETE = (Op.F, Op.B, Op.I, Op.W)
_ALONE = frozenset(_COMPLETE) | COMMUNICATION | VOCABULARY | {Op.REDUCE_GRAD}  # operations with rules of their own
_FOR_BACKWARDS = (Op.R, Op.OFFLOAD, Op.RELOAD)
_AFTER_BACKWARDS = {Op.V: Op.VW, Op.E: Op.EW}


def _misplaced(action: Action, rank: int, schedule: Schedule) -> str:
    """Returns the problem of an action's place; "" if there is none."""
    _, g, m, i, _ = action
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    slices = schedule.slice_counts[m] if 0 <= m < microbatches else schedule.num_slices
    if not (0 <= g < stages and 0 <= m < microbatches and 0 <= i < slices):
        counts = (("stage", g, stages), ("microbatch", m, microbatches), ("slice", i, slices))
        what, value, count = next(checked for checked in counts if not 0 <= checked[1] < checked[2])
        whose = f"microbatch {m}" if what == "slice" and schedule.is_ragged else "the schedule"
        return f"has {what} {value}, but {whose}'s are 0 to {count - 1}"
    if schedule.placement[g] != rank:
        return f"stands on rank {rank}, but stage {g} is placed on rank {schedule.placement[g]}"
    if action.op in COMMUNICATION:
        other = action.other_end
        if not 0 <= other.stage < schedule.num_stages:
            return f"has no other end: there is no stage {other.stage}"
        if schedule.placement[other.stage] == rank:
            return f"has no other end: stage {other.stage} is on the same rank"
        if other not in schedule.positions:
            return f"has no other end: the schedule lacks {schedule.text(other)}"
    return ""


def _check_complete(stage: int, microbatch: int, index: int, schedule: Schedule) -> None:
    """Checks that a slice has exactly one F, and one B or one I and one W, or F alone in a schedule of forwards."""
    unit = (Action(op, stage, microbatch, index) for op in _COMPLETE if op in schedule.ops)
    present = "".join(action.op for action in unit if action in schedule.positions)
    trains = schedule.trains(stage)
    if present in (("FB", "FIW") if trains else ("F",)):
        if not schedule.ops <= _ALONE:
            _check_helpers(stage, microbatch, index, schedule)
        return
    present_text = ", ".join(present) or "nothing"
    wanted = "F and B, or F, I and W" if trains else "F"
    where = f"Stage {stage}, microbatch {microbatch}, slice {index}"
    raise ScheduleError(f"{where} has {present_text}; it needs {wanted}.\n{grid(schedule, [])}")


def _check_vocabulary(schedule: Schedule) -> None:
    """Checks that every slice has a V on each rank, one L, and after a V that leaves gradients a VW; and no others.

    Where rows embed too, it has an E on each rank, and after backwards an EW.
    """
    forwards = (Op.V, Op.E) if schedule.spreads_embedding else (Op.V,)
    ops = (*forwards, *(_AFTER_BACKWARDS[op] for op in forwards if schedule.has_backward))
    wanted = {
        Action(op, stage, *place)
        for place in schedule.microbatch_slices
        for op, stages in [*((op, schedule.vocabulary_stages) for op in ops), (Op.L, (schedule.num_stages - 1,))]
        for stage in stages
    }
    vocabulary_actions = {action for action in schedule.positions if action.op in VOCABULARY}
    if vocabulary_actions != wanted:
        each = min(vocabulary_actions ^ wanted)
        problem = "is missing" if each in wanted else "doesn't belong here"
        stages = " ".join(map(str, schedule.vocabulary_stages))
        rule = f"with a spread vocabulary {' and '.join(ops)} are of stages {stages}, L of the last one"
        marks = [] if each in wanted else [schedule.positions[each]]
        raise ScheduleError(f"{schedule.text(each)} {problem}: {rule}.\n{grid(schedule, marks)}")


def _check_helpers(stage: int, microbatch: int, index: int, schedule: Schedule) -> None:
    """Checks that R, OFFLOAD and RELOAD serve a backward, and that what must be undone is."""
    unit = (Action(op, stage, microbatch, index) for op in OPS if op in schedule.ops - _ALONE)
    present = {action.op: action for action in unit if action in schedule.positions}
    for_backwards = [op for op in _FOR_BACKWARDS if op in present]
    if for_backwards and not schedule.has_backward:
        where = ", ".join(schedule.text(present[op]) for op in sorted(for_backwards))
        raise ScheduleError(f"{where}: the schedule has no backward that needs it; leave it out.\n{grid(schedule, [])}")
    for op, action in present.items():
        undone_by = OPERATIONS[op].undone_by
        if undone_by is not None and undone_by not in present:
            undoing = action.with_op(undone_by)
            raise ScheduleError(
                f"{schedule.text(action)} is never undone: add {schedule.text(undoing)} after it and before what needs "
                f"it.\n{grid(schedule, [schedule.positions[action]])}"
            )


def grid(schedule: Schedule, marked: Collection[tuple[int, int]]) -> str:
    """Returns one line per rank and one column per step; `marked` holds (rank, step) pairs, shown as `>2B0.3<`.

    Only the steps around the marks are shown, or the first ones if nothing is marked; `..` stands for others.
    """
    num_steps = max(map(len, schedule.actions))
    near = [step for _, step in marked] or [0]
    shown = [step for step in range(num_steps) if min(abs(step - mark) for mark in near) <= _AROUND]
    columns = [["step", *(f"rank {rank}" for rank in range(schedule.num_ranks))]]
    for before, step in pairwise([-1, *shown, num_steps]):
        if step > before + 1:
            columns.append([".."] * (schedule.num_ranks + 1))
        if step < num_steps:
            columns.append([f" {step}", *(_cell(schedule, rank, step, marked) for rank in range(schedule.num_ranks))])
    widths = [max(map(len, column)) for column in columns]
    return "\n".join(
        " ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in zip(*columns, strict=True)
    )


def _cell(schedule: Schedule, rank: int, step: int, marked: Collection[tuple[int, int]]) -> str:
    if step >= len(schedule.actions[rank]):
        return ""
    text = schedule.text(schedule.actions[rank][step])
    return f">{text}<" if (rank, step) in marked else f" {text}"
