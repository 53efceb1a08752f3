"""A rank's row of a lowered schedule, with all that follows from the schedule alone: found once, not in every step."""

from __future__ import annotations

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
)

SliceKey = tuple[int, int, int]  # stage, microbatch, slice


def key_of(action: Action) -> SliceKey:
    return action.stage, action.microbatch, action.slice


class ProgramStep(NamedTuple):
    """An action, and its properties in its schedule."""

    action: Action
    key: SliceKey
    trains: bool  # whether the stage has backwards
    awaited: Action | None  # the SEND of the action's input, where that comes from another rank
    forward_awaited: Action | None  # likewise of the slice's F
    result: Action  # the SEND with which the result of F, B or I would go to another rank
    neighbour: SliceKey | None  # the slice on the stage that gets the result; None where no stage does
    is_local: bool  # whether that stage is on this rank
    channel: Channel | None  # of a SEND or RECV
    message: Action  # the SEND that a SEND or RECV is an end of
    is_recomputed: bool
    is_offloaded: bool
    is_last_slice: bool  # of its microbatch


def program_of(schedule: Schedule, rank: int) -> list[ProgramStep]:
    """Returns a rank's steps, action by action."""
    return [_step(action, schedule, rank) for action in schedule.actions[rank]]


def _step(action: Action, schedule: Schedule, rank: int) -> ProgramStep:
    g, m, i = key = key_of(action)
    is_forward = action.op is Op.F
    to = g + 1 if is_forward else g - 1
    gets_result = to < schedule.num_stages if is_forward else schedule.trains(to)
    return ProgramStep(
        action=action,
        key=key,
        trains=schedule.trains(g),
        awaited=awaited_send(action, schedule),
        forward_awaited=awaited_send(action.with_op(Op.F), schedule),
        result=action.with_op(Op.SEND_F if is_forward else Op.SEND_B),
        neighbour=(to, m, i) if gets_result else None,
        is_local=gets_result and schedule.placement[to] == rank,
        channel=channel(action, schedule) if action.op in COMMUNICATION else None,
        message=action.other_end if action.op in RECEIVES else action,
        is_recomputed=action.with_op(Op.R) in schedule.positions,
        is_offloaded=action.with_op(Op.OFFLOAD) in schedule.positions,
        is_last_slice=action.op is not Op.REDUCE_GRAD and i == schedule.slice_counts[m] - 1,
    )
