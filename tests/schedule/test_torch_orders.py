"""With one slice, our schedules are PyTorch's own: the same passes in the same order on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from slipstream.schedule import (
    Action,
    Schedule,
    add_communication,
    breadth_first,
    check_communication,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from support.torch_schedules import torch_schedule


class RecordingStage:
    """Stands in for a PipelineStage and writes down what the schedule has it compute."""

    def __init__(self, stage: int) -> None:
        self.stage_index, self.has_backward, self.order = stage, True, []

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.order.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, **kwargs: Any) -> None:
        self.order.append(f"{self.stage_index}B{microbatch}")

    def get_fwd_recv_ops(self, microbatch: int) -> list[Any]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def perform_reduce_grad(self, factor: int) -> None:
        pass


def order_of_single_stages(schedule_class: type, stage: int, num_stages: int, num_microbatches: int) -> list[str]:
    """What PyTorch's schedule really runs on one rank, without models and processes: it writes no order down."""

    class Recorded(schedule_class):
        def __init__(self) -> None:
            self._stage, self._num_stages, self._n_microbatches = (
                RecordingStage(stage),
                num_stages,
                num_microbatches,
            )
            self.scale_grads = False

        def _check_inputs(self, *args: Any) -> Any:
            return [()] * num_microbatches, [{}] * num_microbatches

        def _nothing(self, *args: Any) -> None:
            pass

        _initialize_stage = _maybe_compute_loss = _maybe_get_loss = _update_losses = _nothing

    recorded = Recorded()
    recorded._step_microbatches()
    return recorded._stage.order


def orders_of_several_stages(
    name: str, num_ranks: int, stages_per_rank: int, num_microbatches: int
) -> tuple[list[list[str]], list[int]]:
    """The order that PyTorch's multi-stage schedule makes for every rank, and the rank of every stage."""
    theirs = torch_schedule(name, num_ranks, stages_per_rank, num_microbatches)
    orders = [[str(action) for action in theirs.pipeline_order[rank] if action] for rank in range(num_ranks)]
    return orders, [theirs.stage_index_to_group_rank[g] for g in range(num_ranks * stages_per_rank)]


def orders(schedule: Schedule) -> list[list[str]]:
    return [[schedule.text(action) for action in row] for row in schedule.actions]


@pytest.mark.parametrize(("generator", "oracle"), [(gpipe, ScheduleGPipe), (one_f_one_b, Schedule1F1B)])
def test_one_stage_a_rank(generator: Callable[..., Schedule], oracle: type) -> None:
    for p in range(1, 6):
        for m in range(1, 9):
            expected = [order_of_single_stages(oracle, stage, p, m) for stage in range(p)]
            assert orders(generator(p, m)) == expected, (p, m)


@pytest.mark.parametrize(
    ("name", "generator", "stages_per_rank"),
    [
        *(("ScheduleInterleaved1F1B", interleaved_one_f_one_b, v) for v in (1, 2, 3, 4)),
        *(("ScheduleLoopedBFS", breadth_first, v) for v in (1, 2, 3, 4)),
        ("ScheduleInterleavedZeroBubble", lambda p, m, s, v: zb_h1(p, m, s), 1),
        ("ScheduleZBVZeroBubble", lambda p, m, s, v: zb_v(p, m, s), 2),
    ],
)
def test_several_stages_a_rank_and_split_backwards(
    name: str, generator: Callable[..., Schedule], stages_per_rank: int
) -> None:
    compared = 0
    for p in range(1, 7):
        for m in range(1, 14):
            if name.startswith("ScheduleInterleaved") and m % max(1, m // p):
                continue  # PyTorch refuses microbatches that don't form equal groups
            schedule = generator(p, m, 1, stages_per_rank)
            expected, placement = orders_of_several_stages(name, p, stages_per_rank, m)
            assert orders(schedule) == expected, (p, m)
            assert list(schedule.placement) == placement
            compared += 1
    assert compared > 40


@pytest.mark.parametrize(
    ("name", "stages_per_rank", "num_microbatches"),
    [("ScheduleInterleavedZeroBubble", 3, 4), ("ScheduleInterleavedZeroBubble", 2, 8), ("ScheduleLoopedBFS", 2, 5)],
)
def test_pytorchs_own_orders_are_lowered(name: str, stages_per_rank: int, num_microbatches: int) -> None:
    rows, placement = orders_of_several_stages(name, 4, stages_per_rank, num_microbatches)
    actions = tuple(tuple(map(Action.parse, row)) for row in rows)
    schedule = Schedule(name, actions, tuple(placement), num_microbatches, num_slices=1)
    check_communication(add_communication(schedule))
