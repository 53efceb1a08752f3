"""Messages past neighbours: skip connections, and those of a spread vocabulary, as SENDs and RECVs with a peer.

last stage  --- F: the head's input --->  rows of stage g
            <-- V: their part ----------
            --- L: the sums ----------->

first stage <-- E: the embeddings ------  rows of stage g, where they embed too
            --- B or I: its gradient -->

stage 0     --- F: a skip ------------->  stage 2, past stage 1; its gradient comes back

Each kind, between two stages, has a communicator of its own. A SEND stands right after the action whose result it
carries. A RECV stands before the action that works on the message before it on its channel, so that one more is on its
way than is needed; or earlier, where the ranks would otherwise wait for each other if every SEND waited for its RECV.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from slipstream.schedule.action import RECEIVES, SENDS, Action, Op
from slipstream.schedule.lowering import Channel, channel
from slipstream.schedule.rules import input_gradient, sent_result
from slipstream.schedule.schedule import Schedule
from slipstream.schedule.validation import running_order


class StageSkip(NamedTuple):
    """What goes from the stage of its stash to that of its pop, past stages between: of all slices or the first one."""

    stash: int
    pop: int
    is_first_slices: bool = False


def far_sends(action: Action, schedule: Schedule, skips: Sequence[StageSkip] = ()) -> list[Action]:
    """Returns the SENDs of an action's result to stages that aren't neighbours, or to a spread head: also to stages of
    the same rank, to which it is handed over."""
    op, g, m, i, _ = action
    last, rows = schedule.num_stages - 1, schedule.vocabulary_stages
    if op in (Op.F, Op.B, Op.I) and not schedule.spreads_vocabulary:
        send, ends = (Op.SEND_F, (0, 1)) if op is Op.F else (Op.SEND_B, (1, 0))
        here = [skip for skip in skips if skip[ends[0]] == g and not (skip.is_first_slices and i)]
        peers = dict.fromkeys(skip[ends[1]] for skip in here)
        return [Action(send, g, m, i, peer) for peer in peers if op is Op.F or schedule.trains(peer)]
    if op is Op.V:
        return [Action(Op.SEND_F, g, m, i, last)]
    if op is Op.E:
        return [Action(Op.SEND_E, g, m, i, 0)]
    if op is Op.F and g == last and schedule.spreads_vocabulary:
        return [Action(Op.SEND_F, g, m, i, peer) for peer in rows if (Op.V, peer) in schedule.kinds]
    if op is Op.L:
        return [Action(Op.SEND_B, g, m, i, peer) for peer in rows if (Op.VW, peer) in schedule.kinds]
    if op in (Op.B, Op.I) and g == 0 and schedule.spreads_embedding:
        return [Action(Op.SEND_E, g, m, i, peer) for peer in rows if (Op.EW, peer) in schedule.kinds]
    return []


def far_inputs(action: Action, schedule: Schedule) -> list[Action]:
    """Returns the SENDs of what a V, L or VW, an EW or the first stage's F gets from the ends of a spread vocabulary,
    in the order of ranks; none of other actions."""
    op, g, m, i, _ = action
    last, rows = schedule.num_stages - 1, schedule.vocabulary_stages
    if op is Op.F and g == 0 and schedule.spreads_embedding:
        return [Action(Op.SEND_E, stage, m, i, 0) for stage in rows if (Op.E, stage) in schedule.kinds]
    if op is Op.V:
        return [Action(Op.SEND_F, last, m, i, g)]
    if op is Op.L:
        return [Action(Op.SEND_F, stage, m, i, last) for stage in rows]
    if op is Op.VW:
        return [Action(Op.SEND_B, last, m, i, g)]
    return [Action(Op.SEND_E, 0, m, i, g)] if op is Op.EW else []


def user_of(send: Action, schedule: Schedule) -> Action:
    """Returns the action that works on a message past neighbours."""
    _, _, m, i, peer = send
    producer = sent_result(send, schedule).op
    if not schedule.spreads_vocabulary and send.op is Op.SEND_B:
        return input_gradient(peer, m, i, schedule)
    from_head = {Op.V: Op.L, Op.L: Op.VW, Op.E: Op.F, Op.B: Op.EW, Op.I: Op.EW, Op.F: Op.V}
    return Action(from_head[producer] if schedule.spreads_vocabulary else Op.F, peer, m, i)


def is_here(send: Action, schedule: Schedule) -> bool:
    """Returns whether both ends of a message past neighbours are on one rank."""
    return schedule.placement[send.stage] == schedule.placement[send.peer]


def far_channels(schedule: Schedule) -> list[Channel]:
    """Returns the communicators of the messages past neighbours, in one order."""
    return sorted({channel(action, schedule) for row in schedule.actions for action in row if action.peer >= 0})


def settlements(schedule: Schedule, rank: int) -> dict[Action, Action]:
    """Returns for messages that come to a rank, those of a spread head from itself too, the last SEND from there of
    which they tell that it came."""
    gradients = _last_gradients(schedule)
    told = dict[Action, Action]()
    for action in schedule.actions[rank]:
        comes = [action.send] if action.op in RECEIVES and action.peer >= 0 else []
        for send in [*comes, *(far_inputs(action, schedule) if schedule.spreads_vocabulary else ())]:
            if (earlier := _told_by(send, schedule, gradients)) is not None:
                told[send] = earlier
    return told


def _told_by(send: Action, schedule: Schedule, gradients: Mapping[Action, Action]) -> Action | None:
    _, stage, m, i, to = send
    if not schedule.spreads_vocabulary:
        # A gradient tells that its skip came.
        if send.op is Op.SEND_B:
            return Action(Op.SEND_F, to, m, i, stage)
        # A skip tells that the gradient of its sender's last backward came.
        before = gradients.get(Action(Op.F, stage, m, i))
        return None if before is None else Action(Op.SEND_B, to, before.microbatch, before.slice, stage)
    made = sent_result(send, schedule).op
    if made in (Op.V, Op.L):
        return Action(Op.SEND_F, to, m, i, stage)
    # The first stage's output has gone through all stages.
    if made is Op.F:
        return Action(Op.SEND_E, to, m, i, 0) if schedule.spreads_embedding else None
    before = gradients.get(Action(Op.E, stage, m, i)) if made is Op.E else None
    return None if before is None else Action(Op.SEND_E, 0, before.microbatch, before.slice, stage)


def _last_gradients(schedule: Schedule) -> dict[Action, Action]:
    """Returns for each forward, and each E, the last backward of its stage, or EW, before it in its rank's order."""
    found: dict[Action, Action] = {}
    kinds = {Op.F: (Op.B, Op.I), Op.E: (Op.EW,)}
    for row in schedule.actions:
        last: dict[tuple[Op, int], Action] = {}
        for action in row:
            for forward, gradients in kinds.items():
                if action.op in gradients:
                    last[forward, action.stage] = action
                elif action.op is forward and (forward, action.stage) in last:
                    found[action] = last[forward, action.stage]
    return found


def with_far_messages(schedule: Schedule, skips: Sequence[StageSkip] = (), is_alone: bool = False) -> Schedule:
    """Returns a lowered schedule with its messages past neighbours, unless it has them.

    `is_alone` is whether one rank of it runs alone, so that no others could wait.
    """
    if schedule.peers or not (skips or schedule.spreads_vocabulary):
        return schedule
    rows = _with_far_sends(schedule, skips)
    sent = [action for row in rows for action in row if action.op in SENDS and action.peer >= 0]
    if not sent:
        return schedule
    due, inputs = defaultdict[Channel, deque[Action]](deque), defaultdict[Action, list[Action]](list)
    for send in sent:
        due[channel(send, schedule)].append(send)
        inputs[user_of(send, schedule)].append(send)
    posted: set[Action] = set()
    placed = [[*_with_far_receives(row, schedule, due, inputs, posted)] for row in rows]
    lowered = replace(schedule, actions=tuple(map(tuple, placed)))
    if is_alone:
        return lowered

    def post(reached: Sequence[int], waiting: Mapping[int, Action]) -> int | None:
        """Moves up one RECV for which a SEND past neighbours waits, to where its rank stands, and returns that."""
        for rank, receive in sorted(waiting.items()):
            action = placed[rank][reached[rank]]
            if action.op in SENDS and action.peer >= 0 and receive == action.other_end:
                there = schedule.placement[receive.stage]
                placed[there].remove(receive)
                placed[there].insert(reached[there], receive)
                return there
        return None

    running_order(lowered, rendezvous=True, rows=placed, when_stuck=post)
    return replace(schedule, actions=tuple(map(tuple, placed)))


def _with_far_sends(schedule: Schedule, skips: Sequence[StageSkip]) -> list[list[Action]]:
    def sent(action: Action) -> list[Action]:
        return [send for send in far_sends(action, schedule, skips) if not is_here(send, schedule)]

    return [[each for action in row for each in (action, *sent(action))] for row in schedule.actions]


def _with_far_receives(
    row: Sequence[Action],
    schedule: Schedule,
    due: Mapping[Channel, deque[Action]],
    inputs: Mapping[Action, Sequence[Action]],
    posted: set[Action],
) -> Iterator[Action]:
    for action in row:
        mine = inputs.get(action, ())
        for send in mine:
            waiting = due[channel(send, schedule)]
            while send not in posted:
                posted.add(waiting[0])
                yield waiting.popleft().other_end
        for send in mine:
            if waiting := due[channel(send, schedule)]:
                posted.add(waiting[0])
                yield waiting.popleft().other_end
        yield action
