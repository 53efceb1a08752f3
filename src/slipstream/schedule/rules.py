"""The rules of order, stated once: the actions that an action must follow, and those that a rank waits for.

Validation, lowering, simulation and reports all call `predecessors`; nothing else knows the rules. They stand in the
table of operations, next to what time, memory and pictures need to know of each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from slipstream.schedule.action import BACKWARDS, OPS, RECEIVES, SENDS, Action, Op, named_operation
from slipstream.schedule.schedule import Schedule


def predecessors(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """Returns the actions that must be done before `action` may start, in any order.

    Actions that follow from others are left out: with every slice attending to all earlier ones, F(g,m,i) names
    F(g,m,i-1) only. Whether a message travels as SEND and RECV, and whether a backward is whole (B) or split (I and W),
    depends on `schedule`.
    """
    before = OPERATIONS[action.op].before(action, schedule)
    helpers = _helpers(schedule.ops).get(action.op, ())
    return (*before, *(helper for op in helpers if (helper := action.with_op(op)) in schedule.positions))


@lru_cache(maxsize=256)
def _helpers(ops: frozenset[Op]) -> dict[Op, tuple[Op, ...]]:
    """Returns for each operation those of `ops` that serve it."""
    helpers = [op for op in OPS if op in ops and OPERATIONS[op].serves]
    return {served: tuple(op for op in helpers if served in OPERATIONS[op].serves) for served in OPS if helpers}


def _before_forward(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    _, g, m, i, _ = action
    first = max(i - 1, 0) if schedule.reach is None else schedule.reach[m][i]
    before = [Action(Op.F, g, m, j) for j in range(first, i)]
    if g > 0:
        before.append(_input(Action(Op.F, g - 1, m, i), action, schedule))
    elif schedule.spreads_embedding:
        lookups = (Action(Op.E, stage, m, i) for stage in schedule.vocabulary_stages)
        before += [_result(lookup, action, Op.RECV_E, schedule) for lookup in lookups]
    return (*before, *_skips(action, Op.RECV_F, schedule))


def _before_backward(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    _, g, m, i, _ = action
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
    return (*before, *_skips(action, Op.RECV_B, schedule))


def _input(producer: Action, user: Action, schedule: Schedule) -> Action:
    """Returns the action that brings the neighbour's result: the neighbour's action, or a RECV."""
    send = awaited_send(user, schedule) if schedule.is_lowered else None
    return producer if send is None else send.other_end


def _before_reduction(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    weights = [Action(Op.W, action.stage, m, i) for m, i in schedule.microbatch_slices]
    before = tuple(w if w in schedule.positions else w.with_op(Op.B) for w in weights)
    rows = (w.with_op(op) for op in (Op.VW, Op.EW) if op in schedule.ops for w in weights)
    return (*before, *(w for w in rows if w in schedule.positions))


def _result(producer: Action, user: Action, receive: Op, schedule: Schedule) -> Action:
    """Returns the action that brings a result past neighbours: the one that makes it, or a RECV."""
    message = Action(receive, user.stage, user.microbatch, user.slice, producer.stage)
    return message if message in schedule.positions else producer


def _skips(action: Action, receive: Op, schedule: Schedule) -> Iterator[Action]:
    """Yields the RECVs of the skips that a forward works on, or of the gradients that a backward does."""
    if schedule.spreads_vocabulary:
        return
    for peer in schedule.peers.get((receive, action.stage), ()):
        if (message := Action(receive, *action[1:4], peer)) in schedule.positions:
            yield message


def _before_logits(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    hidden = action.with_op(Op.F)._replace(stage=schedule.num_stages - 1)
    return (_result(hidden, action, Op.RECV_F, schedule),)


def _before_loss(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    parts = (Action(Op.V, stage, *action[2:4]) for stage in schedule.vocabulary_stages)
    return tuple(_result(part, action, Op.RECV_F, schedule) for part in parts)


def _before_rows(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    loss = action.with_op(Op.L)._replace(stage=schedule.num_stages - 1)
    return (_result(loss, action, Op.RECV_B, schedule),)


def _before_embedding_rows(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    _, _, m, i, _ = action
    return (_result(input_gradient(0, m, i, schedule), action, Op.RECV_E, schedule),)


def sent_result(send: Action, schedule: Schedule) -> Action:
    """Returns the action whose result a SEND carries."""
    _, g, m, i, peer = send
    from_last = peer >= 0 and schedule.spreads_vocabulary and g == schedule.num_stages - 1
    if send.op is Op.SEND_E:
        return input_gradient(0, m, i, schedule) if g == 0 else Action(Op.E, g, m, i)
    if send.op is Op.SEND_B:
        return Action(Op.L, g, m, i) if from_last else input_gradient(g, m, i, schedule)
    is_part = peer >= 0 and schedule.spreads_vocabulary and not from_last
    return Action(Op.V if is_part else Op.F, g, m, i)


class Lane(Enum):
    """Where an operation runs: what it keeps busy."""

    RANK = "rank"  # computing
    CHANNEL = "channel"  # messages between two ranks
    COPIES = "copies"  # copies to a rank's host or back


class Held(Enum):
    """The bytes that an operation takes or frees."""

    ALL = "all"  # the activations of its slice
    KEPT = "kept"  # the activations until its recomputation, where there is one; else all
    REST = "rest"  # what recomputation brings back
    OWN = "own"  # what costs say of the operation itself


@dataclass(frozen=True)
class Operation:
    """A row of the table of operations: all that order, time, memory and pictures need to know of one.

    Args:
        before: the rule of order: the actions that must come before one of this operation, besides those that serve it.
        why: the rule in words, for error messages.
        serves: the operations on its slice and stage that wait for it wherever it is there.
        needed: why these wait, in words.
        undone_by: the operation that must follow it on its slice and stage.
        lane: what it keeps busy.
        seconds: its time where all are of the same order: 1 for a forward.
        is_timed: whether costs must give its time; one that isn't takes none where they don't.
        takes: what it begins to hold as it starts.
        frees: what is free when it ends.
        label: its name in legends. "" for one that pictures draw apart.
        colors: the lightest and the darkest, from the first slice to the last.
        is_hatched: whether its boxes are.
    """

    before: Callable[[Action, Schedule], tuple[Action, ...]]
    why: str
    serves: frozenset[Op] = frozenset()
    needed: str = ""
    undone_by: Op | None = None
    lane: Lane = Lane.RANK
    seconds: float = 1
    is_timed: bool = True
    takes: Held | None = None
    frees: Held | None = None
    label: str = ""
    colors: tuple[str, str] = ("#dddddd", "#777777")
    is_hatched: bool = False


def _message(before: Callable[[Action, Schedule], tuple[Action, ...]], why: str) -> Operation:
    return Operation(before, why, lane=Lane.CHANNEL, seconds=0, is_timed=False)


_SENT, _FILLED = "a send follows what it sends", "a receive is filled by its send"
_AGAIN = "a backward follows its own forward and recomputation"
_BACKWARD = "a backward needs the gradient from the stage after it"

OPERATIONS: dict[Op, Operation] = {
    Op.F: Operation(
        _before_forward,
        "a forward needs the output of the stage before it",
        takes=Held.KEPT,
        label="forward",
        colors=("#d3e5f6", "#1f63a8"),
    ),
    Op.B: Operation(
        _before_backward, _BACKWARD, seconds=2, frees=Held.ALL, label="backward", colors=("#fde2c3", "#c45f10")
    ),
    Op.I: Operation(_before_backward, _BACKWARD, label="input gradient", colors=("#f6c6c3", "#a5202b")),
    Op.W: Operation(
        lambda action, _: (action.with_op(Op.I),),
        "a weight gradient follows its input gradient",
        frees=Held.ALL,
        label="weight gradient",
        colors=("#d6f5ea", "#36a98c"),
    ),
    Op.R: Operation(
        lambda action, _: (action.with_op(Op.F),),
        "a recomputation follows its own forward",
        serves=frozenset({Op.B, Op.I}),
        needed=_AGAIN,
        takes=Held.REST,
        label="recompute",
        colors=("#d3e5f6", "#1f63a8"),  # a forward's colors
        is_hatched=True,
    ),
    Op.V: Operation(
        _before_logits,
        "logits need the output of the last stage",
        label="vocabulary part",
        colors=("#e4daf4", "#6a4bb0"),
    ),
    Op.L: Operation(
        _before_loss,
        "the loss needs every rank's logits",
        seconds=0,
        is_timed=False,
        label="loss of all parts",
        colors=("#8b8b8b", "#8b8b8b"),
    ),
    Op.VW: Operation(
        _before_rows,
        "the weight gradient of a part of the head needs the loss over all parts",
        label="weight gradient of the part",
        colors=("#efe3b8", "#a08a2c"),
    ),
    Op.E: Operation(
        lambda *_: (),
        "the ids of tokens are known from the beginning",
        seconds=0,
        is_timed=False,
        label="embedding part",
        colors=("#f3d9ea", "#a2437f"),
    ),
    Op.EW: Operation(
        _before_embedding_rows,
        "the gradient of a part of the embedding needs that of the first stage's input",
        seconds=0,
        is_timed=False,
        label="gradient of the embedding part",
        colors=("#e6dfd2", "#7d6b4a"),
    ),
    Op.REDUCE_GRAD: Operation(
        _before_reduction,
        "gradients are reduced when every backward of the stage is done",
        seconds=0,
        is_timed=False,
        label="gradient reduction",
        colors=("#b9a7dd", "#b9a7dd"),
    ),
    Op.OFFLOAD: Operation(
        lambda action, _: (action.with_op(Op.F),),
        "what a forward saves is moved after it",
        undone_by=Op.RELOAD,
        lane=Lane.COPIES,
        seconds=0,
        is_timed=False,
        frees=Held.KEPT,
        label="offload",
        colors=("#8c7bbd", "#8c7bbd"),
    ),
    Op.RELOAD: Operation(
        lambda action, _: (action.with_op(Op.OFFLOAD),),
        "what comes back must have been moved to the host",
        serves=frozenset({Op.R, Op.B, Op.I}),
        needed="what was moved to the host must be back before it is used",
        lane=Lane.COPIES,
        seconds=0,
        is_timed=False,
        takes=Held.KEPT,
        label="reload",
        colors=("#c3b6e3", "#c3b6e3"),
    ),
    **{op: _message(lambda send, schedule: (sent_result(send, schedule),), _SENT) for op in SENDS},
    **{op: _message(lambda receive, _: (receive.other_end,), _FILLED) for op in RECEIVES},
}
"""The table of operations. It is open: `add_operation` adds a row."""


def operations_on(lane: Lane) -> list[Op]:
    """Returns the operations that run there."""
    return [op for op, operation in OPERATIONS.items() if operation.lane is lane]


def add_operation(name: str, operation: Operation) -> Op:
    """Adds an operation to the table, and returns it: schedules with it are read, validated, simulated and drawn."""
    op = named_operation(name)
    OPERATIONS[op] = operation
    _helpers.cache_clear()
    return op


def input_gradient(stage: int, microbatch: int, index: int, schedule: Schedule) -> Action:
    """Returns the action that makes the gradient of the stage's input: I where the backward is split, else B."""
    if Op.I in schedule.ops and (split := Action(Op.I, stage, microbatch, index)) in schedule.positions:
        return split
    return Action(Op.B, stage, microbatch, index)


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
        # Nobody needs that gradient.
        return False
    return 0 <= other < schedule.num_stages and schedule.placement[other] != schedule.placement[end.stage]


def consumer(receive: Action, schedule: Schedule) -> Action:
    """Returns the action that needs the RECV's message."""
    _, g, m, i, _ = receive
    return Action(Op.F, g, m, i) if receive.op is Op.RECV_F else input_gradient(g, m, i, schedule)


def reason(action: Action, before: Action) -> str:
    """Returns why `before` comes before `action`, in words for an error message."""
    if action.op in SENDS and before.op in RECEIVES:
        return "it can't leave before its receive is posted"
    if action.op in OPERATIONS[before.op].serves:
        return OPERATIONS[before.op].needed
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
    if action.op in (Op.B, Op.I) and before.op is Op.F:
        return _AGAIN
    return OPERATIONS[action.op].why


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
        # A RECV's SEND says the same.
        if needed.op not in RECEIVES:
            missing[schedule.placement[needed.stage]].append(needed)
    awaited = [predecessor for predecessor in predecessors(action, schedule) if predecessor in wanted]
    sources = [predecessor.send if predecessor.op in RECEIVES else predecessor for predecessor in awaited]
    # A send is held up by those before it on its channel.
    if action.op in SENDS:
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
