"""Copies of a recorded step run alongside its actions, and actions wait for those whose memory they may touch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from slipstream import Action, Op
from slipstream.pipeline.execution.action_graphs import RecordedMoves
from slipstream.schedule import Schedule, add_offload, gpipe, one_f_one_b
from slipstream.simulator import Footprint, MemoryTable, StageSlice, memory_of
from support.recorded_ops import RecordedOps

FIRST, SECOND = (0, 0, 0), (0, 0, 1)


class Rehearsal:
    """Notes what is started and awaited. Without `ops`, a copy is run when it is recorded, and never again."""

    def __init__(self, ops: RecordedOps | None = None) -> None:
        self.done: list[str] = []
        self._ops = ops
        self.moves = RecordedMoves(self.record, self, torch.device("cpu"))

    def record(self, copy: Callable[[], None]) -> Callable[[], None]:
        if self._ops is not None:
            return partial(self._ops.record(copy, 0), 0)
        copy()
        return lambda: None

    def start(self, copy: Callable[[], None]) -> int:
        copy()
        self.done.append("copies")
        return self.done.count("copies")

    def wait(self, copy: int) -> None:
        self.done.append(f"waits for {copy}")

    def act(self, number: int) -> None:
        self.moves.before(Action(Op.F, 0, 0, number))
        self.done.append(f"F{number}")


def test_memory_is_free_when_its_copy_had_the_time_of_one_action() -> None:
    """Nobody may take it before, as no replay waits for it yet."""
    run, block = Rehearsal(), torch.arange(4, dtype=torch.uint8)
    blocks, is_held = [block], weakref.ref(block)
    del block
    for is_first in (True, False):
        held = []
        for number in range(4):
            run.act(number)
            held.append(is_held() is not None)
            if number == 0:
                run.moves.offload(FIRST, lambda: [blocks.pop()])
        assert held == ([True, True, False, False] if is_first else [False] * 4)
        run.done, done = [], run.done
    assert done == ["F0", "copies", "F1", "waits for 1", "F2", "F3"]


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("generator", [gpipe, one_f_one_b])
def test_memory_is_held_as_long_as_it_is_counted(generator: Callable[..., Schedule], share: float) -> None:
    """What OFFLOADs have copied: of each slice a byte."""
    schedule, run = add_offload(generator(1, 2, 4), share), Rehearsal()
    units = {
        (StageSlice(0, index, offloaded=is_out), op) for index in range(4) for is_out in (False, True) for op in Op
    }
    sizes = {Op.F: 1, Op.OFFLOAD: -1}  # what comes back is other memory
    table = MemoryTable({(unit, op): Footprint(sizes.get(op, 0) * unit.offloaded, 0) for unit, op in units})
    (rank,) = memory_of(schedule, table, frees_late=True)
    counted = [moment.most for moment in rank.moments if moment.action.op in (Op.F, Op.B)]
    present: dict[Action, list[Tensor]] = {}
    alive, held = weakref.WeakSet[Tensor](), []
    for action in schedule.actions[0]:
        if action.op is Op.OFFLOAD:
            run.moves.offload(action[1:], partial(present.pop, action))
        elif action.op is Op.RELOAD:
            run.moves.reload(action[1:], lambda _: None)
        else:
            run.moves.before(action)
            held.append(len(alive))
            if action.op is Op.F and (offload := action.with_op(Op.OFFLOAD)) in schedule.positions:
                present[offload] = [torch.zeros(1, dtype=torch.uint8)]
                alive.update(present[offload])
    assert held == counted


def test_what_comes_back_is_awaited_by_whoever_reads_it() -> None:
    run, back = Rehearsal(RecordedOps()), list[Tensor]()
    for _ in range(2):
        run.done = []
        run.act(0)
        run.moves.offload(FIRST, lambda: [torch.full((3,), 7, dtype=torch.uint8)])
        run.act(1)
        run.act(2)
        for block in back:
            block.zero_()
        run.moves.reload(FIRST, back.extend)
        run.moves.await_reload(SECOND)
        run.act(3)
        run.moves.await_reload(FIRST)
        run.moves.await_reload(FIRST)
    assert run.done == ["F0", "copies", "F1", "waits for 1", "F2", "copies", "F3", "waits for 2"]
    assert [block.tolist() for block in back] == [[7, 7, 7]]


@pytest.mark.parametrize("overlap", [True, False])
def test_slices_that_are_away_at_different_times_share_memory_of_the_host(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves, kept = Rehearsal().moves, []
    given: list[Tensor] = []
    host_memory = moves._host_memory
    monkeypatch.setattr(moves, "_host_memory", lambda size: given.append(host_memory(size)) or given[-1])
    moves.offload(FIRST, lambda: [torch.full((3,), 1, dtype=torch.uint8)])
    if not overlap:
        moves.reload(FIRST, kept.extend)
    moves.offload(SECOND, lambda: [torch.full((3,), 2, dtype=torch.uint8)])
    if overlap:
        moves.reload(FIRST, kept.extend)
    moves.reload(SECOND, kept.extend)
    assert (given[0] is given[1]) == (not overlap)
    assert [block.tolist() for block in kept] == [[1] * 3, [2] * 3]


def test_a_step_after_one_that_failed_waits_for_its_copies() -> None:
    run = Rehearsal()
    for _ in range(2):
        run.done = []
        run.moves.offload(FIRST, lambda: [torch.ones(3, dtype=torch.uint8)])
        run.moves.reload(FIRST, lambda _: None)
    for _ in range(2):
        run.moves.begin()
        run.act(0)
    assert run.done == ["copies", "copies", "waits for 1", "waits for 2", "F0", "F0"]


def test_a_slice_that_saves_nothing_is_moved_without_a_copy() -> None:
    run = Rehearsal()
    run.moves = RecordedMoves(lambda _: pytest.fail("recorded nothing"), run, torch.device("cpu"))
    for _ in range(2):
        run.moves.offload(FIRST, list)
        run.moves.reload(FIRST, lambda blocks: None if blocks == [] else pytest.fail(f"{blocks}"))
