"""The installed torch judges our orders by its own validator and simulator, and we judge its orders by ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import _Action

from slipstream.planner.order.order_search import find_order, hand_written
from slipstream.planner.order.ordering_problem import OrderingProblem
from slipstream.schedule import Action, Schedule, add_communication, check_communication, validate
from slipstream.simulator import simulate
from slipstream.simulator.costs import UnitCost
from support.examples import examples
from support.schedules import torch_orders

_PLACEMENTS = {
    "loop": lambda p: [*range(p)],
    "two loops": lambda p: [*range(p), *range(p)],
    "V": lambda p: [*range(p), *reversed(range(p))],
}


def judge(schedule: Schedule) -> None:
    """Torch's validator and its simulator of messages accept the order; a slice counts as a microbatch."""
    orders: dict[int, list[Any]] = {
        rank: [_Action.from_str(_text(action, schedule)) for action in row] for rank, row in enumerate(schedule.actions)
    }
    num_units = schedule.num_microbatches * schedule.num_slices
    found = torch_schedules._validate_schedule(orders, schedule.num_ranks, schedule.num_stages, num_units)
    assert [found[stage] for stage in range(schedule.num_stages)] == [*schedule.placement]
    lowered = torch_schedules._add_send_recv(orders, found.__getitem__, schedule.num_stages)
    torch_schedules._simulate_comms_compute(lowered, found.__getitem__, schedule.num_stages)


def _text(action: Action, schedule: Schedule) -> str:
    return f"{action.stage}{action.op.value}{action.microbatch * schedule.num_slices + action.slice}"


@examples(25)
@given(st.sampled_from([*_PLACEMENTS]), st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.booleans())
def test_torch_accepts_our_named_orders(kind: str, p: int, m: int, s: int, split: bool) -> None:
    placement = _PLACEMENTS[kind](p)
    for schedule in hand_written(OrderingProblem(placement, m, s, UnitCost(), None, None, split)):
        judge(schedule)


@examples(10)
@given(st.sampled_from([*_PLACEMENTS]), st.integers(2, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 9))
def test_torch_accepts_orders_that_were_found(kind: str, p: int, m: int, s: int, extra: int) -> None:
    placement = _PLACEMENTS[kind](p)
    least = s * len(placement) // p
    judge(find_order(placement, m, s, UnitCost(), memory_limit=[least + extra] * p, effort=2e3))


@pytest.mark.parametrize(
    ("name", "stages_per_rank"),
    [
        ("ScheduleInterleaved1F1B", 1),
        ("ScheduleInterleaved1F1B", 2),
        ("ScheduleLoopedBFS", 3),
        ("ScheduleInterleavedZeroBubble", 2),
        ("ScheduleZBVZeroBubble", 2),
    ],
)
def test_we_accept_torchs_orders(name: str, stages_per_rank: int) -> None:
    for p, m in ((1, 2), (2, 4), (3, 6), (4, 8)):
        orders, placement = torch_orders(name, p, stages_per_rank, m)
        schedule = Schedule.parse(_as_text(name, orders, placement, m))
        validate(schedule)
        check_communication(add_communication(schedule))
        judge(schedule)
        assert simulate(schedule, UnitCost()).makespan >= 3 * m * stages_per_rank


def _as_text(name: str, orders: Sequence[Sequence[str]], placement: Sequence[int], num_microbatches: int) -> str:
    head = [f"schedule: {name}", f"placement: {' '.join(map(str, placement))}"]
    head += [f"microbatches: {num_microbatches}", "slices: 1"]
    return "\n".join([*head, *(f"rank {rank}: {' '.join(row)}" for rank, row in enumerate(orders))])


def test_torch_refuses_an_order_that_is_wrong() -> None:
    """Otherwise the judge would be none."""
    wrong = "schedule: x\nplacement: 0 1\nmicrobatches: 1\nslices: 1\nrank 0: 0B0 0F0\nrank 1: 1F0 1B0"
    with pytest.raises(AssertionError, match="without first running Forward"):
        judge(Schedule.parse(wrong))
