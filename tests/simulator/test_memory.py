"""The account of memory has the right lifetime for every kind of bytes, and pools of message buffers."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import SlipstreamError
from slipstream.schedule import (
    Op,
    Schedule,
    add_communication,
    add_offload,
    add_recompute,
    forward_only,
    freeze_stages,
    gpipe,
    make_schedule,
    one_f_one_b,
    send_windows,
    sent_result,
    spread_vocabulary,
    with_far_messages,
)
from slipstream.simulator import Footprint, MemoryKind, MemoryTable, StageSlice, UnitCost, memory_of, simulate
from slipstream.simulator.memory_account import _head_buffers, order_bytes
from support.examples import examples
from support.schedules import named_schedules

ONLY_ACTIVATIONS = {Op.F: 1, Op.B: -1, Op.I: 0, Op.W: -1, Op.OFFLOAD: -1, Op.RELOAD: 1}


def footprints(
    num_stages: int, num_slices: int, leaves: dict[Op, int], peaks: dict[Op, int] | None = None
) -> dict[tuple[StageSlice, Op], Footprint]:
    """The same for every stage and slice; a peak is what is left, or nothing, unless given."""
    units = [
        StageSlice(stage, index, recomputed, offloaded)
        for stage in range(num_stages)
        for index in range(num_slices)
        for recomputed in (False, True)
        for offloaded in (False, True)
    ]
    return {
        (unit, op): Footprint(size, (peaks or {}).get(op, max(size, 0)))
        for unit in units
        for op, size in leaves.items()
    }


def table(num_stages: int, num_slices: int, **more: object) -> MemoryTable:
    return MemoryTable(footprints(num_stages, num_slices, ONLY_ACTIVATIONS), **more)  # type: ignore[arg-type]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any schedule by name, with frozen stages, recomputation and offloading."""
    schedule = draw(named_schedules(most_stages=3))
    schedule = freeze_stages(schedule, draw(st.integers(0, schedule.num_stages - 1)))
    if draw(st.booleans()):
        schedule = add_recompute(schedule)
    if draw(st.booleans()):
        schedule = add_offload(schedule, draw(st.sampled_from([0.5, 1.0])))
    return schedule


def footprints_of(schedule: Schedule, kept: int) -> dict[tuple[StageSlice, Op], Footprint]:
    """A slice leaves 10 bytes, of which recomputation keeps `kept`."""
    sizes = dict.fromkeys(Op, 0) | {Op.F: 10, Op.B: -10, Op.W: -10, Op.OFFLOAD: -10, Op.RELOAD: 10}
    found = footprints(schedule.num_stages, schedule.num_slices, sizes)
    for unit, op in list(found):
        if unit.recomputed:
            size = {Op.F: kept, Op.RELOAD: kept, Op.OFFLOAD: -kept, Op.R: 10 - kept}.get(op, sizes[op])
            found[unit, op] = Footprint(size, max(size, 0))
        if unit.stage < schedule.num_frozen_stages:
            found[unit, op] = Footprint(0, 0)
    return found


@examples(60)
@given(schedules())
def test_activations_are_the_simulators(schedule: Schedule) -> None:
    """Two countings of the same, one along times, one along rows; with recomputation and offloading."""
    kept = 2
    ranks = memory_of(schedule, MemoryTable(footprints_of(schedule, kept)))
    assert tuple(rank.peak for rank in ranks) == simulate(schedule, UnitCost(activation=10, kept=kept)).peak_memory
    assert all(rank.moments[-1].after == 0 for rank in ranks)


@examples(60)
@given(schedules(), st.data())
def test_an_order_holds_what_it_holds_lowered(schedule: Schedule, data: st.DataObject) -> None:
    """Buffers of messages and all, by kind or not; and on the host is what is offloaded and not reloaded yet."""
    size, stages = st.integers(0, 20), range(schedule.num_stages)
    sizes = [{stage: data.draw(size) for stage in stages} for _ in range(4)]
    gradients = {(stage, op): data.draw(size) for stage in stages for op in (Op.B, Op.W)}
    found = footprints_of(schedule, kept=2)
    first = {(unit, op): found[unit, op].peak + data.draw(size) for unit, op in found if op in (Op.B, Op.W)}
    messages = data.draw(st.lists(st.integers(0, 5), min_size=schedule.num_slices, max_size=schedule.num_slices))
    table = MemoryTable(
        found, first, sizes[0], sizes[1], messages, data.draw(st.integers(0, 2)), sizes[2], gradients, sizes[3]
    )
    account, lowered = order_bytes(schedule, table), add_communication(schedule)
    assert [rank.moments for rank in account.memory()] == [rank.moments for rank in memory_of(lowered, table)]
    peaks = [rank.peak for rank in account.memory()]
    assert account.rank_peaks().tolist() == order_bytes(lowered, table).rank_peaks().tolist() == peaks
    for row, away in zip(schedule.actions, account.host_peaks(), strict=True):
        moved = [-found[StageSlice.of(a, schedule), a.op].leaves for a in row if a.op in (Op.OFFLOAD, Op.RELOAD)]
        assert away == max(accumulate(moved, initial=0))


@examples(60)
@given(named_schedules(most=7, ragged=True), st.randoms(use_true_random=False))
def test_each_microbatch_is_counted_by_its_table_and_all_is_free_in_the_end(
    schedule: Schedule, dice: random.Random
) -> None:
    """A table for all is that table for each."""

    def sized(num_slices: int, size: float) -> MemoryTable:
        leaves = {op: size * change for op, change in ONLY_ACTIVATIONS.items()}
        stages = dict.fromkeys(range(schedule.num_stages), 10 * size)
        units = footprints(schedule.num_stages, num_slices, leaves)
        return MemoryTable(units, context=stages, context_gradients=stages, message_bytes=[size] * num_slices)

    sizes = [float(dice.randint(1, 9)) for _ in schedule.slice_counts]
    tables = [sized(count, size) for count, size in zip(schedule.slice_counts, sizes, strict=True)]
    for rank, memory in enumerate(memory_of(schedule, tables)):
        first = next(moment for moment in memory.moments if moment.action.op is Op.F)
        end = memory.moments[-1].after
        assert end <= min(moment.most for moment in memory.moments)
        largest = max((10 + count) * size for count, size in zip(schedule.slice_counts, sizes, strict=True))
        assert memory.peak - end >= largest * (rank in schedule.placement)  # a microbatch is held as a whole
        assert first.most >= end
    if not schedule.is_ragged:
        one = sized(schedule.num_slices, 3.0)
        several, alike = memory_of(schedule, [one] * schedule.num_microbatches), memory_of(schedule, one)
        assert [rank.moments for rank in several] == [rank.moments for rank in alike]


def test_a_message_is_held_until_it_is_sent() -> None:
    """A schedule that is given with its sends has them where it likes: here the first a forward late."""
    schedule, given_table = Schedule.parse(LATE), table(2, 2, message_bytes=[5, 7])
    first, _ = memory_of(schedule, given_table)
    assert [m.during[MemoryKind.MESSAGES] - pools(schedule, given_table)[0] for m in first.moments[:5]] == [
        0, 5, 12, 7, 0,
    ]  # fmt: skip
    assert order_bytes(schedule, given_table).rank_peaks()[0] == first.peak == first.moments[2].most


LATE = """
schedule: late
placement: 0 1
microbatches: 1
slices: 2
rank 0: 0F0.0 0F0.1 0SEND_F0.0 0SEND_F0.1 0RECV_B0.1 0B0.1 0RECV_B0.0 0B0.0
rank 1: 1RECV_F0.0 1F0.0 1RECV_F0.1 1F0.1 1B0.1 1SEND_B0.1 1B0.0 1SEND_B0.0
"""


def test_the_simulator_draws_all_that_is_held() -> None:
    """Parameters always; the workspace of an action while it runs."""
    sizes, peaks = {Op.F: 3, Op.B: -3}, {Op.F: 5, Op.B: 2}
    given_table = MemoryTable(footprints(1, 2, sizes, peaks), parameters={0: 100})
    timeline = simulate(gpipe(1, 1, 2), UnitCost(), given_table)
    assert timeline.memory == (((0, 105), (1, 103), (1, 108), (2, 106), (2, 108), (4, 103), (4, 105), (6, 100)),)
    assert timeline.peak_memory == (108,)


def test_context_lives_from_the_first_forward_to_the_last_backward() -> None:
    schedule = gpipe(1, 2, 2)  # F0.0 F0.1 F1.0 F1.1 B1.1 B1.0 B0.1 B0.0, or the microbatches in order
    first = [(action.op, action.microbatch, action.slice) for action in schedule.actions[0]].index((Op.F, 1, 0))
    (rank,) = memory_of(schedule, table(1, 2, context={0: 10}, context_gradients={0: 20}))
    context, gradients = (
        [moment.during[kind] for moment in rank.moments] for kind in (MemoryKind.CONTEXT, MemoryKind.CONTEXT_GRADIENTS)
    )
    assert context[: first + 1] == [0, 10, 10]
    assert context[3:] == [20, 20, 20, 10, 10]
    assert gradients == [0, 0, 0, 0, 0, 20, 0, 20]


def on_one_rank(row: str) -> Schedule:
    """One microbatch, of slices and stages as the row's actions have them."""
    slices, stages = 1 + ("0.1" in row), 1 + ("1F" in row)
    head = f"schedule: one\nplacement: {' '.join('0' * stages)}\nmicrobatches: 1\nslices: {slices}"
    return Schedule.parse(f"{head}\nrank 0: {row}")


SPLIT = on_one_rank("0F0.0 0F0.1 0I0.1 0I0.0 0W0.1 0W0.0")


def test_what_i_leaves_is_ws_input_until_w() -> None:
    """F leaves 7, I frees 4 of it, so W's inputs are 3."""
    (rank,) = memory_of(SPLIT, MemoryTable(footprints(1, 2, {Op.F: 7, Op.I: -4, Op.W: -3})))
    held = [(m.during[MemoryKind.ACTIVATIONS], m.during[MemoryKind.WEIGHT_INPUTS]) for m in rank.moments]
    assert held == [(0, 0), (7, 0), (14, 0), (7, 3), (0, 6), (0, 3)]
    assert rank.moments[-1].after == 0


def test_gradients_come_with_the_first_backward_of_their_kind() -> None:
    """The first W makes 50 more than later ones, at its peak as well; I makes those of the norms."""
    units = footprints(1, 2, {Op.F: 7, Op.I: -4, Op.W: -3}, {Op.W: 6})
    given_table = MemoryTable(
        units, first={(StageSlice(0, 1), Op.W): 52}, gradients={(0, Op.I): 1, (0, Op.W): 50}, optimizer={0: 1000}
    )
    (rank,) = memory_of(SPLIT, given_table)
    assert [m.most - 1000 for m in rank.moments] == [7, 14, 14 + 1, 10 + 1, 6 + 1 + 52, 3 + 51 + 6]
    assert rank.moments[-1].after == 1051
    assert rank.worst.action.op is Op.W
    assert rank.peak == 1060


@pytest.mark.parametrize(
    ("row", "held"),
    [
        # Hidden states stay until the second stage's backward, gradients until the first's.
        ("0F0 1F0 1B0 0B0", [0, 5, 5, 5]),
        # A gradient that was handed over is one of W's factors.
        ("0F0 1F0 1I0 0I0 1W0 0W0", [0, 5, 5, 5, 5, 5]),
        # F lets go of an input that is offloaded; its copy is one of the second stage's activations.
        ("0F0 1F0 1OFFLOAD0 1RELOAD0 1B0 0B0", [0, 5, 0, 0, 0, 5]),
    ],
)
def test_results_wait_for_the_next_stage_of_the_same_rank(row: str, held: list[int]) -> None:
    (rank,) = memory_of(on_one_rank(row), table(2, 1, message_bytes=[5]))
    assert [m.during[MemoryKind.MESSAGES] for m in rank.moments] == held
    assert rank.moments[-1].after == 0


def test_what_comes_back_from_the_host_is_activations_at_once() -> None:
    """F leaves 7, which are away for a while."""
    sizes = {Op.F: 7, Op.OFFLOAD: -7, Op.RELOAD: 7, Op.B: -7}
    (rank,) = memory_of(on_one_rank("0F0 0OFFLOAD0 0RELOAD0 0B0"), MemoryTable(footprints(1, 1, sizes, {Op.RELOAD: 7})))
    reload = next(moment for moment in rank.moments if moment.action.op is Op.RELOAD)
    during = reload.during
    assert (during[MemoryKind.ACTIVATIONS], during[MemoryKind.WORKSPACE], reload.after) == (7, 0, 7)


def test_offloaded_memory_is_free_an_action_later_in_a_step_of_graphs() -> None:
    """A slice's forward leaves 1: beside it there is the one before, whose copy runs meanwhile."""
    schedule = add_offload(gpipe(1, 2, 3), 1.0)
    peaks = [memory_of(schedule, table(1, 3), frees_late=late)[0] for late in (False, True)]
    early, late = ([moment.most for moment in found.moments if moment.action.op is Op.F] for found in peaks)
    assert [b - a for a, b in zip(early, late, strict=True)] == [0, 1, 1, 1, 1, 1]
    assert all(found.moments[-1].after == 0 for found in peaks)


def pools(schedule: Schedule, given_table: MemoryTable) -> list[float]:
    """The buffers of messages of each rank: before its first action nothing else waits."""
    return [rank.moments[0].during[MemoryKind.MESSAGES] for rank in memory_of(schedule, given_table)]


def test_the_pool_of_two_ranks_by_hand() -> None:
    """1F1B of two ranks and three microbatches. A buffer holds a payload of 10 and a header of 1.

    Rank 1: the input of each microbatch, and the next one's, which comes before its backward ends; and a window of
    8 gradients, of which only 3 are sent. Rank 0: up to 3 sends, and the gradients one by one.
    """
    schedule = add_communication(one_f_one_b(2, 3, 1))
    given_table = table(2, 1, message_bytes=[10], header_bytes=1)
    in_use = [0, 0]
    for rank, row in enumerate(schedule.actions):
        used = 0
        for action in row:
            used += action.op in (Op.SEND_F, Op.SEND_B, Op.RECV_F, Op.RECV_B)  # fewer than the window of 8
            in_use[rank] = max(in_use[rank], used)
            used -= action.op is Op.B
    assert pools(schedule, given_table) == [11 * most for most in in_use]


MANY = add_communication(one_f_one_b(2, 20, 1))


@pytest.mark.parametrize(
    ("schedule", "message_bytes", "rank", "pool"),
    [
        (MANY, [1], 0, 8 + 2),  # sends on their way, and what was received: for one backward, and already for the next
        (MANY, [1], 1, 8 + 2),
        (gpipe(2, 20), [1], 1, 20),  # every input stays until its backward, whose gradient takes the buffer
        (gpipe(2, 1, 2), [10, 30], 0, 2 * (10 + 30)),  # slices of other lengths have buffers of their own
        (gpipe(3, 6), [10], 1, 140),
        (freeze_stages(gpipe(3, 6), 2), [10], 1, 60),  # two inputs and four outputs on their way: no input stays
    ],
    ids=["window of the first rank", "window of the last rank", "inputs", "lengths", "trained", "frozen"],
)
def test_pools(schedule: Schedule, message_bytes: list[int], rank: int, pool: int) -> None:
    given_table = table(schedule.num_stages, schedule.num_slices, message_bytes=message_bytes)
    assert pools(schedule, given_table)[rank] == pool


def test_sends_beyond_the_window_use_buffers_again_and_inputs_on_the_host_leave_theirs() -> None:
    assert set(send_windows(MANY).values()) == {8}
    # The last slice has no time to be moved.
    assert pools(add_offload(gpipe(2, 20)), table(2, 1, message_bytes=[1]))[1] <= 8 + 2 + 1


def test_a_frozen_stage_keeps_a_microbatch_s_context_until_its_last_forward() -> None:
    """Two stages a rank, the first three frozen: rank 0 has the stages 0 and 2, rank 1 the stages 1 and 3."""
    schedule = freeze_stages(make_schedule("interleaved-1f1b", 2, 4, 2, 2), 3)
    found = MemoryTable(footprints_of(schedule, 0), context=dict.fromkeys(range(4), 5), message_bytes=[7, 7])
    first, _ = memory_of(schedule, found)
    assert {moment.during[MemoryKind.ACTIVATIONS] for moment in first.moments} == {0}
    forwards = [moment for moment in first.moments if moment.action.op is Op.SEND_F]
    held = {(each.action.stage, each.action.slice): each.during[MemoryKind.CONTEXT] for each in forwards}
    assert held == {(stage, index): 5 * (index == 0) for stage in (0, 2) for index in range(2)}
    assert first.moments[-1].after == pools(schedule, found)[0]


def test_an_evaluation_keeps_a_microbatch_s_context_until_its_last_forward() -> None:
    schedule = forward_only(gpipe(2, 3, 2))
    account = memory_of(schedule, MemoryTable(footprints_of(schedule, 0), context=dict.fromkeys(range(2), 5)))
    for rank in account:
        held = [moment.during[MemoryKind.CONTEXT] for moment in rank.moments if moment.action.op is Op.F]
        assert held == [0, 5] * 3  # none is left of an earlier microbatch


def test_a_unit_that_the_table_lacks() -> None:
    with pytest.raises(SlipstreamError, match=r"No bytes for B of StageSlice\(stage=0, slice=0.*add footprints\["):
        memory_of(gpipe(1, 1, 1), MemoryTable(footprints(1, 1, {Op.F: 1})))


@pytest.mark.parametrize("embedding", [False, True])
def test_buffers_of_a_spread_head_come_back(embedding: bool) -> None:
    """All but those of sends that nothing tells of: L's, and the last gradients of the first stage's input."""
    schedule = with_far_messages(add_communication(spread_vocabulary(one_f_one_b(3, 4, 2), embedding=embedding)))
    sizes = {Op.F: 1.0, Op.V: 100.0, Op.L: 1e4, Op.E: 1e6, Op.B: 1e6}
    for rank in range(3):
        changes = [change for _, changes in _head_buffers(schedule, rank) for change in changes]
        left = sum(sizes[sent_result(send, schedule).op] * change for send, change in changes)
        assert left % 1e4 == 0  # none of F and V
        assert left % 1e6 == (8 * 2 * 1e4 if rank == 2 else 0)
        assert (left >= 1e6) == (embedding and rank == 0)
