"""A rank's row of a lowered schedule, with all that follows from the schedule alone: found once, not in every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from slipstream.schedule import (
    COMMUNICATION,
    RECEIVES,
    Action,
    Channel,
    Op,
    Schedule,
    awaited_send,
    channel,
    far_inputs,
    far_sends,
    predecessors,
    settlements,
)

SliceKey = tuple[int, int, int]  # stage, microbatch, slice


def key_of(action: Action) -> SliceKey:
    return action.stage, action.microbatch, action.slice


class ProgramStep(NamedTuple):
    """An action, and its properties in its schedule."""

    action: Action
    key: SliceKey
    trains: bool  # backwards on this stage
    awaited: Action | None  # the SEND of the action's input; None for an input from this rank
    forward_awaited: Action | None  # the SEND of the input of the slice's F; None for an input from this rank
    far: tuple[Action, ...]  # SENDs to the action's stage that skip stages, from other ranks
    forward_far: tuple[Action, ...]  # SENDs to the slice's F that skip stages, from other ranks
    messages: tuple[Action, ...]  # all awaited SENDs
    told: dict[Action, tuple[Channel, Action]]  # awaited SEND -> the last SEND from here that it acknowledges
    result: Action  # the SEND of the result of F, B or I, in case its reader is on another rank
    neighbour: SliceKey | None  # the slice on the stage that gets the result; None for a result that goes nowhere
    is_local: bool  # True for a neighbour on this rank
    channel: Channel | None  # the channel of a SEND or RECV; None for other actions
    message: Action  # the SEND at the beginning of a SEND's or RECV's message
    inputs: tuple[Action, ...]  # SENDs of a spread head's messages to the action, from this rank too
    results: tuple[Action, ...]  # SENDs of a spread head's messages from the action, to this rank too
    is_recomputed: bool
    is_offloaded: bool
    is_last_slice: bool  # last slice of its microbatch


def program_of(schedule: Schedule, rank: int) -> list[ProgramStep]:
    """Returns a rank's steps, action by action."""
    told = {send: (channel(earlier, schedule), earlier) for send, earlier in settlements(schedule, rank).items()}
    return [_step(action, schedule, rank, told) for action in schedule.actions[rank]]


def _step(action: Action, schedule: Schedule, rank: int, told: Mapping[Action, tuple[Channel, Action]]) -> ProgramStep:
    g, m, i = key = key_of(action)
    is_forward = action.op is Op.F
    to = g + 1 if is_forward else g - 1
    gets_result = to < schedule.num_stages if is_forward else schedule.trains(to)
    far, awaited = _far(action, schedule), awaited_send(action, schedule)
    inputs = tuple(far_inputs(action, schedule)) if schedule.spreads_vocabulary else ()
    return ProgramStep(
        action=action,
        key=key,
        trains=schedule.trains(g),
        awaited=awaited,
        forward_awaited=awaited_send(action.with_op(Op.F), schedule),
        far=far,
        forward_far=_far(action.with_op(Op.F), schedule),
        messages=far if awaited is None else (awaited, *far),
        told={send: told[send] for send in (*far, *inputs) if send in told},
        result=action.with_op(Op.SEND_F if is_forward else Op.SEND_B),
        neighbour=(to, m, i) if gets_result else None,
        is_local=gets_result and schedule.placement[to] == rank,
        channel=channel(action, schedule) if action.op in COMMUNICATION else None,
        message=action.other_end if action.op in RECEIVES else action,
        inputs=inputs,
        results=tuple(far_sends(action, schedule)) if schedule.spreads_vocabulary else (),
        is_recomputed=action.with_op(Op.R) in schedule.positions,
        is_offloaded=action.with_op(Op.OFFLOAD) in schedule.positions,
        is_last_slice=action.op is not Op.REDUCE_GRAD and i == schedule.slice_counts[m] - 1,
    )


def _far(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """Returns the SENDs past neighbours that an action waits for."""
    if not schedule.peers or action.op in COMMUNICATION:
        return ()
    return tuple(before.send for before in predecessors(action, schedule) if before.peer >= 0)
