"""The rules of order, stated once: what must come before an action, and whether a schedule keeps to it.

Validation, lowering, simulation and reports all ask `predecessors`; nothing else knows the rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from slipstream.schedule.action import (
    BACKWARDS,
    COMMUNICATION,
    RECEIVES,
    SENDS,
    Action,
    Op,
    Schedule,
    ScheduleError,
)
from slipstream.schedule.grid import grid


def predecessors(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """The actions that must be done before `action` may start, in any order.

    Neighbours that imply the rest are enough: with every slice attending to all earlier ones, F(g,m,i) names
    F(g,m,i-1) only. Whether a message travels as SEND and RECV, and whether a backward is whole (B) or split
    (I and W), follows what `schedule` holds.
    """
    return _RULES[action.op](action, schedule)


def _before_forward(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    _, g, m, i = action
    if schedule.reach is None:
        context = [Action(Op.F, g, m, i - 1)] if i else []
    else:
        context = [Action(Op.F, g, m, j) for j in range(schedule.reach[m][i], i)]
    if g > 0:
        context.append(_input(Op.RECV_F, Action(Op.F, g - 1, m, i), action, schedule))
    return tuple(context)


def _before_backward(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    _, g, m, i = action
    before = [Action(Op.F, g, m, i)]
    if schedule.reach is not None:
        attending = (j for j in range(i + 1, schedule.num_slices) if schedule.reach[m][j] <= i)
        before += [input_gradient(g, m, j, schedule) for j in attending]
    elif i + 1 < schedule.num_slices:
        before.append(input_gradient(g, m, i + 1, schedule))
    if g + 1 < schedule.num_stages:
        before.append(_input(Op.RECV_B, input_gradient(g + 1, m, i, schedule), action, schedule))
    for op in (Op.R, Op.RELOAD):
        if op in schedule.ops and (helper := Action(op, g, m, i)) in schedule.positions:
            before.append(helper)
    return tuple(before)


def _before_weight(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    return (Action(Op.I, action.stage, action.microbatch, action.slice),)


def _before_recompute(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    g, m, i = action.stage, action.microbatch, action.slice
    forward, reload = Action(Op.F, g, m, i), Action(Op.RELOAD, g, m, i)
    return (forward, reload) if reload in schedule.positions else (forward,)


def _before_offload(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    return (Action(Op.F, action.stage, action.microbatch, action.slice),)


def _before_reload(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    return (Action(Op.OFFLOAD, action.stage, action.microbatch, action.slice),)


def _before_send(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    if action.op is Op.SEND_F:
        return (Action(Op.F, action.stage, action.microbatch, action.slice),)
    return (input_gradient(action.stage, action.microbatch, action.slice, schedule),)


def _before_receive(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    return (action.other_end,)


def _before_reduction(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    g = action.stage
    units = [(m, i) for m in range(schedule.num_microbatches) for i in range(schedule.num_slices)]
    weights = ((Action(Op.W, g, m, i), Action(Op.B, g, m, i)) for m, i in units)
    return tuple(w if w in schedule.positions else b for w, b in weights)


_RULES: Mapping[Op, Callable[[Action, Schedule], tuple[Action, ...]]] = {
    Op.F: _before_forward,
    Op.B: _before_backward,
    Op.I: _before_backward,
    Op.W: _before_weight,
    Op.R: _before_recompute,
    Op.SEND_F: _before_send,
    Op.SEND_B: _before_send,
    Op.RECV_F: _before_receive,
    Op.RECV_B: _before_receive,
    Op.REDUCE_GRAD: _before_reduction,
    Op.OFFLOAD: _before_offload,
    Op.RELOAD: _before_reload,
}


def input_gradient(stage: int, microbatch: int, index: int, schedule: Schedule) -> Action:
    """The action that makes the gradient of the stage's input: I where the backward is split, else B."""
    if Op.I in schedule.ops and (split := Action(Op.I, stage, microbatch, index)) in schedule.positions:
        return split
    return Action(Op.B, stage, microbatch, index)


def _input(receive: Op, producer: Action, consumer: Action, schedule: Schedule) -> Action:
    """What hands over the neighbour's result: the neighbour itself, or the RECV from another rank."""
    if schedule.is_lowered and schedule.placement[producer.stage] != schedule.placement[consumer.stage]:
        return Action(receive, consumer.stage, consumer.microbatch, consumer.slice)
    return producer


def reason(action: Action, before: Action) -> str:
    """Why `before` comes before `action`, in words for an error message."""
    if action.op in SENDS and before.op in RECEIVES:
        return "it can't leave before its receive is posted"
    if action.op in _REASONS and before.op is not Op.RELOAD:
        return _REASONS[action.op]
    if action.op is Op.F:
        if before.op is Op.F and before.stage == action.stage:
            return f"slice {action.slice} attends to slice {before.slice}, so its forward comes later"
        return "a forward needs the output of the stage before it"
    if before.op is Op.RELOAD:
        return "what was moved to the host must be back before it is used"
    if before.op is Op.F or before.op is Op.R:
        return "a backward follows its own forward and recomputation"
    if before.op in BACKWARDS and before.stage == action.stage:
        return (
            f"slice {before.slice} attends to slice {action.slice} and leaves gradients there, so backwards "
            "of a microbatch run last in, first out"
        )
    return "a backward needs the gradient from the stage after it"


_REASONS = {
    Op.W: "a weight gradient follows its input gradient",
    Op.R: "a recomputation follows its own forward",
    Op.OFFLOAD: "what a forward saves is moved after it",
    Op.RELOAD: "what comes back must have been moved to the host",
    Op.SEND_F: "a send follows what it sends",
    Op.SEND_B: "a send follows what it sends",
    Op.RECV_F: "a receive is filled by its send",
    Op.RECV_B: "a receive is filled by its send",
    Op.REDUCE_GRAD: "gradients are reduced when every backward of the stage is done",
}


def running_order(schedule: Schedule, rendezvous: bool = False) -> list[Action]:
    """All actions in an order in which the ranks can run them, each rank keeping to its own.

    Posting a receive never waits, and whoever uses a message waits until both ends were reached. A send does
    not wait either, unless `rendezvous`: then it holds its rank until the receive is posted. Raises
    ScheduleError if the ranks get stuck; the message names the cycle of who waits for whom.
    """
    done: set[Action] = set()
    order: list[Action] = []
    reached = [0] * schedule.num_ranks
    stuck: dict[Action, list[int]] = {}  # awaited action -> ranks that wait for it
    ready = deque(range(schedule.num_ranks))
    while ready:
        rank = ready.popleft()
        row = schedule.actions[rank]
        while reached[rank] < len(row):
            action = row[reached[rank]]
            missing = next((a for a in _awaited(action, schedule, rendezvous) if a not in done), None)
            if missing is not None:
                stuck.setdefault(missing, []).append(rank)
                break
            done.add(action)
            order.append(action)
            reached[rank] += 1
            ready.extend(stuck.pop(action, ()))
    if stuck:
        awaited = {rank: action for action, ranks in stuck.items() for rank in ranks}
        raise ScheduleError(_explain_stuck(schedule, reached, awaited))
    return order


def _awaited(action: Action, schedule: Schedule, rendezvous: bool) -> tuple[Action, ...]:
    """What holds the rank up at `action`, which is not quite what must precede it: posting doesn't wait."""
    if action.op in RECEIVES:
        return ()
    before = predecessors(action, schedule)
    if action.op in SENDS:
        return (*before, action.other_end) if rendezvous else before
    if not schedule.is_lowered:
        return before
    return before + tuple(a.other_end for a in before if a.op in RECEIVES)


def _explain_stuck(schedule: Schedule, reached: list[int], awaited: Mapping[int, Action]) -> str:
    """Say who waits for whom, `awaited[rank]` being what the rank's next action lacks."""
    text, positions = schedule.text, schedule.positions
    next_action = {rank: schedule.actions[rank][reached[rank]] for rank in awaited}
    cycle = _cycle(schedule, awaited)
    lines = ["The ranks wait for each other for ever:" if len(cycle) > 1 else "This order can't run:"]
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
    """The ranks that wait in a circle, or the one that waits for an action which is nowhere."""
    path: list[int] = []
    rank = min(awaited)
    while rank not in path:
        path.append(rank)
        if awaited[rank] not in schedule.positions:
            return [rank]
        rank, _ = schedule.positions[awaited[rank]]
    return path[path.index(rank) :]


def validate(schedule: Schedule) -> list[Action]:
    """Check that every action stands where it belongs, none is missing or doubled, and the ranks can run it.

    A schedule without any backward is valid too (evaluation). Returns an order in which the ranks can run it (see
    `running_order`). Raises ScheduleError with the rank x step grid, the offending action marked `>2B0.3<`, the rule
    it breaks and the action it waits for.
    """
    seen: set[Action] = set()
    for rank, row in enumerate(schedule.actions):
        for step, action in enumerate(row):
            problem = _misplaced(action, rank, schedule)
            if action in seen:
                problem = "comes a second time"
            if problem:
                raise ScheduleError(f"{schedule.text(action)} {problem}.\n{grid(schedule, [(rank, step)])}")
            seen.add(action)
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            for index in range(schedule.num_slices):
                _check_complete(stage, microbatch, index, schedule)
    return running_order(schedule)


_COMPLETE = (Op.F, Op.B, Op.I, Op.W)
_FOR_MEMORY = (Op.R, Op.OFFLOAD, Op.RELOAD)


def _misplaced(action: Action, rank: int, schedule: Schedule) -> str:
    _, g, m, i = action
    stages, microbatches, slices = len(schedule.placement), schedule.num_microbatches, schedule.num_slices
    if not (0 <= g < stages and 0 <= m < microbatches and 0 <= i < slices):
        counts = (("stage", g, stages), ("microbatch", m, microbatches), ("slice", i, slices))
        what, number, count = next(each for each in counts if not 0 <= each[1] < each[2])
        return f"has {what} {number}, but the schedule's are 0 to {count - 1}"
    if schedule.placement[action.stage] != rank:
        placed = schedule.placement[action.stage]
        return f"stands on rank {rank}, but stage {action.stage} is placed on rank {placed}"
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
    """Exactly one F, and one B or one I and one W; none of them where the schedule only goes forward."""
    ops = [op for op in _COMPLETE if op in schedule.ops]
    present = "".join(op for op in ops if Action(op, stage, microbatch, index) in schedule.positions)
    if present in (("FB", "FIW") if schedule.has_backward else ("F",)):
        if not schedule.ops.isdisjoint(_FOR_MEMORY):
            _check_memory_actions(stage, microbatch, index, schedule)
        return
    found = ", ".join(present) or "nothing"
    wanted = "F and B, or F, I and W" if schedule.has_backward else "F"
    where = f"Stage {stage}, microbatch {microbatch}, slice {index}"
    raise ScheduleError(f"{where} has {found}; it needs {wanted}.\n{grid(schedule, [])}")


def _check_memory_actions(stage: int, microbatch: int, index: int, schedule: Schedule) -> None:
    """R, OFFLOAD and RELOAD serve a backward, and what is moved to the host comes back."""
    unit = {op: Action(op, stage, microbatch, index) for op in _FOR_MEMORY if op in schedule.ops}
    present = {op for op, action in unit.items() if action in schedule.positions}
    if present and not schedule.has_backward:
        where = ", ".join(schedule.text(unit[op]) for op in sorted(present))
        raise ScheduleError(f"{where}: the schedule has no backward that needs it; leave it out.\n{grid(schedule, [])}")
    if Op.OFFLOAD in present and Op.RELOAD not in present:
        offload, reload = (schedule.text(unit[Op.OFFLOAD].with_op(op)) for op in (Op.OFFLOAD, Op.RELOAD))
        raise ScheduleError(
            f"{offload} is never undone: add {reload} after it and before the slice's R or backward.\n"
            f"{grid(schedule, [schedule.positions[unit[Op.OFFLOAD]]])}"
        )
