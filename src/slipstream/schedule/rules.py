"""The rules of order, stated once: the actions that an action must follow, and those that a rank waits for.

Validation, lowering, simulation and reports all call `predecessors`; nothing else knows the rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from slipstream.schedule.action import BACKWARDS, RECEIVES, SENDS, Action, Op
from slipstream.schedule.schedule import Schedule


def predecessors(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """Returns the actions that must be done before `action` may start, in any order.

    Actions that follow from others are left out: with every slice attending to all earlier ones, F(g,m,i) names
    F(g,m,i-1) only. Whether a message travels as SEND and RECV, and whether a backward is whole (B) or split (I and W),
    depends on `schedule`.
    """
    rule, _ = _RULES[action.op]
    return rule(action, schedule)


def _before_forward(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    _, g, m, i = action
    first = max(i - 1, 0) if schedule.reach is None else schedule.reach[m][i]
    before = [Action(Op.F, g, m, j) for j in range(first, i)]
    if g > 0:
        before.append(_input(Action(Op.F, g - 1, m, i), action, schedule))
    elif schedule.spreads_embedding:
        before += [Action(Op.E, stage, m, i) for stage in schedule.vocabulary_stages]
    return tuple(before)


def _before_backward(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    _, g, m, i = action
    before = [action.with_op(Op.F)]
    if schedule.reach is not None:
        attending = (j for j in range(i + 1, schedule.slice_counts[m]) if schedule.reach[m][j] <= i)
        before += [input_gradient(g, m, j, schedule) for j in attending]
    elif i + 1 < schedule.slice_counts[m]:
        before.append(input_gradient(g, m, i + 1, schedule))
    if g + 1 < schedule.num_stages:
        before.append(_input(input_gradient(g + 1, m, i, schedule), action, schedule))
    elif schedule.spreads_vocabulary:
        before.append(action.with_op(Op.L))
    for op in (Op.R, Op.RELOAD):
        if op in schedule.ops and (helper := action.with_op(op)) in schedule.positions:
            before.append(helper)
    return tuple(before)


def _input(producer: Action, user: Action, schedule: Schedule) -> Action:
    """Returns the action that brings the neighbour's result: the neighbour's action, or a RECV."""
    send = awaited_send(user, schedule) if schedule.is_lowered else None
    return producer if send is None else send.other_end


def _before_recompute(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    forward, reload = action.with_op(Op.F), action.with_op(Op.RELOAD)
    return (forward, reload) if reload in schedule.positions else (forward,)


def _before_reduction(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    weights = [Action(Op.W, action.stage, m, i) for m, i in schedule.microbatch_slices]
    before = tuple(w if w in schedule.positions else w.with_op(Op.B) for w in weights)
    rows = (w.with_op(op) for op in (Op.VW, Op.EW) if op in schedule.ops for w in weights)
    return (*before, *(w for w in rows if w in schedule.positions))


def _before_logits(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    return (action.with_op(Op.F)._replace(stage=schedule.num_stages - 1),)


def _before_loss(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    return tuple(Action(Op.V, stage, *action[2:]) for stage in schedule.vocabulary_stages)


def _before_rows(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    return (action.with_op(Op.L)._replace(stage=schedule.num_stages - 1),)


def _before_embedding_rows(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    _, _, m, i = action
    return (input_gradient(0, m, i, schedule),)


# Per op, the rule and, for error messages, its reason.
_RULES: dict[Op, tuple[Callable[[Action, Schedule], tuple[Action, ...]], str]] = {
    Op.F: (_before_forward, "a forward needs the output of the stage before it"),
    Op.B: (_before_backward, "a backward needs the gradient from the stage after it"),
    Op.I: (_before_backward, "a backward needs the gradient from the stage after it"),
    Op.W: (lambda action, _: (action.with_op(Op.I),), "a weight gradient follows its input gradient"),
    Op.R: (_before_recompute, "a recomputation follows its own forward"),
    Op.SEND_F: (lambda action, _: (action.with_op(Op.F),), "a send follows what it sends"),
    Op.SEND_B: (lambda action, schedule: (input_gradient(*action[1:], schedule),), "a send follows what it sends"),
    Op.RECV_F: (lambda action, _: (action.other_end,), "a receive is filled by its send"),
    Op.RECV_B: (lambda action, _: (action.other_end,), "a receive is filled by its send"),
    Op.REDUCE_GRAD: (_before_reduction, "gradients are reduced when every backward of the stage is done"),
    Op.OFFLOAD: (lambda action, _: (action.with_op(Op.F),), "what a forward saves is moved after it"),
    Op.V: (_before_logits, "logits need the output of the last stage"),
    Op.L: (_before_loss, "the loss needs every rank's logits"),
    Op.VW: (_before_rows, "the weight gradient of a part of the head needs the loss over all parts"),
    Op.E: (lambda *_: (), "the ids of tokens are known from the beginning"),
    Op.EW: (_before_embedding_rows, "the gradient of a part of the embedding needs that of the first stage's input"),
    Op.RELOAD: (lambda action, _: (action.with_op(Op.OFFLOAD),), "what comes back must have been moved to the host"),
}


def input_gradient(stage: int, microbatch: int, index: int, schedule: Schedule) -> Action:
    """Returns the action that makes the gradient of the stage's input: I where the backward is split, else B."""
    if Op.I in schedule.ops and (split := Action(Op.I, stage, microbatch, index)) in schedule.positions:
        return split
    return Action(Op.B, stage, microbatch, index)


def gradients_before(schedule: Schedule) -> dict[Action, Action]:
    """Returns for each E the last EW before it in its rank's order, which must have been given its gradient."""
    last_readers: dict[Action, Action] = {}
    for row in schedule.actions:
        last = None
        for action in row:
            last = action if action.op is Op.EW else last
            if action.op is Op.E and last is not None:
                last_readers[action] = last
    return last_readers


_MESSAGES = {Op.F: (Op.SEND_F, Op.RECV_F), Op.B: (Op.SEND_B, Op.RECV_B), Op.I: (Op.SEND_B, Op.RECV_B)}


def sending(producer: Action, schedule: Schedule) -> Action | None:
    """Returns the SEND that carries the producer's result to another rank, or None if it stays on its rank."""
    if producer.op not in _MESSAGES:
        return None
    send = producer.with_op(_MESSAGES[producer.op][0])
    return send if _crosses_ranks(send, schedule) else None


def awaited_send(user: Action, schedule: Schedule) -> Action | None:
    """Returns the SEND whose message `user` works on, or None if its input is made on its own rank.

    It is to a message's receiver as `sending` to its sender.
    """
    if user.op not in _MESSAGES:
        return None
    receive = user.with_op(_MESSAGES[user.op][1])
    return receive.other_end if _crosses_ranks(receive, schedule) else None


def _crosses_ranks(end: Action, schedule: Schedule) -> bool:
    other = end.other_end.stage
    if end.op is Op.SEND_B and other < schedule.num_frozen_stages:
        return False  # nobody needs that gradient
    return 0 <= other < schedule.num_stages and schedule.placement[other] != schedule.placement[end.stage]


def consumer(receive: Action, schedule: Schedule) -> Action:
    """Returns the action that needs the RECV's message."""
    _, g, m, i = receive
    return Action(Op.F, g, m, i) if receive.op is Op.RECV_F else input_gradient(g, m, i, schedule)


def reason(action: Action, before: Action) -> str:
    """Returns why `before` comes before `action`, in words for an error message."""
    if action.op in SENDS and before.op in RECEIVES:
        return "it can't leave before its receive is posted"
    if before.op is Op.RELOAD:
        return "what was moved to the host must be back before it is used"
    here = before.stage == action.stage
    if here and action.op is Op.F and before.op is Op.F:
        return f"slice {action.slice} attends to slice {before.slice}, so its forward comes later"
    if here and action.op in (Op.B, Op.I) and before.op in BACKWARDS:
        leaves = f"slice {before.slice} attends to slice {action.slice} and leaves gradients there"
        return f"{leaves}, so backwards of a microbatch run last in, first out"
    if before.op is Op.E:
        return "the first stage's forward needs every rank's part of the embedding"
    if before.op is Op.L and action.op is not Op.VW:
        return "the last stage's backward needs the loss"
    if action.op in (Op.B, Op.I) and before.op in (Op.F, Op.R):
        return "a backward follows its own forward and recomputation"
    _, why = _RULES[action.op]
    return why


_SHOWN = 6  # missing actions named per rank


def report_wait(schedule: Schedule, rank: int, action: Action) -> str:
    """Explains why `rank` can't run `action`, from its own facts: its earlier actions ran, and all they needed.

    Everything that `action` needs, directly or not, is either known to be done or listed as missing under its rank, in
    that rank's order: the first of them is the cause of the wait, or where that rank itself waits.
    """
    text, place, row = schedule.text, schedule.positions[action][1], schedule.actions[rank]
    done = _with_predecessors((earlier for earlier in row[:place] if earlier.op not in RECEIVES), schedule)
    wanted = _with_predecessors([action], schedule) - done - {action}
    missing: defaultdict[int, list[Action]] = defaultdict(list)
    for needed in sorted(wanted, key=schedule.positions.__getitem__):
        if needed.op not in RECEIVES:  # its SEND says the same
            missing[schedule.placement[needed.stage]].append(needed)
    awaited = [predecessor for predecessor in predecessors(action, schedule) if predecessor in wanted]
    sources = [predecessor.send if predecessor.op in RECEIVES else predecessor for predecessor in awaited]
    if action.op in SENDS:  # held up by those before it on its channel
        sources = [action.other_end]
    named = ", ".join(f"{text(source)} of rank {schedule.placement[source.stage]}" for source in sources) or "nothing"
    lines = [f"rank {rank} waits at {text(action)} (action {place + 1} of {len(row)}) for {named}."]
    for other, actions in sorted(missing.items()):
        more = f", and {len(actions) - _SHOWN} more" if len(actions) > _SHOWN else ""
        lines.append(f"  missing on rank {other}: {', '.join(map(text, actions[:_SHOWN]))}{more}")
    return "\n".join(lines)


def _with_predecessors(actions: Iterable[Action], schedule: Schedule) -> set[Action]:
    """Returns the actions, all they need, and all that stands before any of these on its rank.

    A receive that stands before is only posted; its message is there when an action that needs it has run.
    """
    closure: set[Action] = set()
    waiting = list(actions)
    while waiting:
        action = waiting.pop()
        if action in closure:
            continue
        closure.add(action)
        rank, index = schedule.positions[action]
        waiting += predecessors(action, schedule)
        if action.op not in RECEIVES:
            row = reversed(schedule.actions[rank][:index])
            waiting += [earlier for earlier in row if earlier.op not in RECEIVES][:1]
    return closure
