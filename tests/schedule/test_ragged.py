"""Schedules whose microbatches differ in their number of slices: generated, changed by passes, simulated, searched."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import MicrobatchCost, TableCost, find_order, simulate, step_lower_bound
from slipstream.schedule import (
    SCHEDULES,
    Action,
    Op,
    Schedule,
    ScheduleError,
    add_communication,
    add_offload,
    add_recompute,
    add_reductions,
    check_communication,
    forward_only,
    in_flushes,
    join_backwards,
    make_schedule,
    split_backwards,
    validate,
)
from slipstream.schedule.action_arrays import ActionArrays
from slipstream.simulator import Footprint, MemoryTable, StageSlice, memory_of
from slipstream.simulator.simulation import end_times
from support.examples import examples


@st.composite
def ragged_schedules(draw: st.DrawFn, most_ranks: int = 6, most: int = 7) -> Schedule:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    stages_per_rank = draw(st.sampled_from([v for v in range(1, 5) if v in SCHEDULES[name].stages_per_rank]))
    unequal = st.lists(st.integers(1, most), min_size=1, max_size=most)
    counts = draw(unequal | st.builds(lambda m, s: [s] * m, st.integers(1, most), st.integers(1, most)))
    return make_schedule(name, draw(st.integers(1, most_ranks)), len(counts), counts, stages_per_rank)


def costs_of(schedule: Schedule, seed: int) -> MicrobatchCost:
    """Other random times, messages and activations in every microbatch; a whole backward takes its halves' time."""
    dice = random.Random(seed)
    latency, bandwidth = dice.choice([0, 2]), dice.choice([None, 0.5, 5.0])
    tables = []
    for count in schedule.slice_counts:
        times: dict[tuple[int, int, Op], float] = {}
        for g in range(schedule.num_stages):
            for i in range(count):
                times |= {(g, i, op): dice.randint(1, 9) for op in (Op.F, Op.I, Op.W, Op.R)}
                times[g, i, Op.B] = times[g, i, Op.I] + times[g, i, Op.W]
        sizes = {(g, i): dice.randint(1, 9) for g in range(schedule.num_stages) for i in range(count)}
        messages = [dice.randint(1, 9) for _ in range(count)]
        tables.append(TableCost(times, messages, latency, bandwidth, activations=sizes))
    return MicrobatchCost(tables)


@examples(100)
@given(ragged_schedules())
def test_every_generator_makes_schedules_that_run_lowered_and_are_read_back(schedule: Schedule) -> None:
    validate(schedule)
    for variant in (schedule, split_backwards(schedule), join_backwards(schedule), forward_only(schedule)):
        lowered = add_communication(variant)
        check_communication(lowered)
        assert Schedule.parse(str(lowered)) == lowered


@pytest.mark.more
@examples(80)
@given(ragged_schedules(most_ranks=4), st.integers(1, 3))
def test_passes_take_them(schedule: Schedule, num_flushes: int) -> None:
    for changed in (add_recompute(schedule), add_offload(schedule, 0.5), add_reductions(schedule)):
        validate(changed)
        check_communication(add_communication(changed))
    flushed = in_flushes(schedule, num_flushes)
    validate(flushed)
    assert flushed.slice_counts == schedule.slice_counts * num_flushes


@examples(60)
@given(ragged_schedules(most_ranks=4), st.integers(0, 2**32))
def test_both_simulators_end_every_action_at_the_same_time(schedule: Schedule, seed: int) -> None:
    cost = costs_of(schedule, seed)
    timeline = simulate(schedule, cost)
    ends, seconds = end_times(ActionArrays.of(schedule, alike=False), cost)
    actions = [action for row in schedule.actions for action in row]
    assert ends.tolist() == pytest.approx([timeline.span_of[action].end for action in actions], rel=1e-12)
    assert seconds.tolist() == [cost.seconds(action) for action in actions]
    assert timeline.schedule.slice_counts == schedule.slice_counts
    late = simulate(add_communication(schedule, ahead=10**6), cost)
    assert late.makespan == pytest.approx(timeline.makespan)


def table(schedule: Schedule, num_slices: int, size: float) -> MemoryTable:
    """Every forward keeps `size`, and a slice's whole memory is free after its backward."""
    leaves = {Op.F: size, Op.B: -size, Op.I: 0.0, Op.W: -size}
    units = [StageSlice(g, i) for g in range(schedule.num_stages) for i in range(num_slices)]
    footprints = {(unit, op): Footprint(kept, max(kept, 0)) for unit in units for op, kept in leaves.items()}
    stages = dict.fromkeys(range(schedule.num_stages), 10 * size)
    return MemoryTable(footprints, context=stages, context_gradients=stages, message_bytes=[size] * num_slices)


@examples(60)
@given(ragged_schedules(most_ranks=4), st.randoms(use_true_random=False))
def test_each_microbatch_is_counted_by_its_table_and_all_is_free_in_the_end(
    schedule: Schedule, dice: random.Random
) -> None:
    sizes = [float(dice.randint(1, 9)) for _ in schedule.slice_counts]
    tables = [table(schedule, count, size) for count, size in zip(schedule.slice_counts, sizes, strict=True)]
    for rank, memory in enumerate(memory_of(schedule, tables)):
        stages = [g for g, there in enumerate(schedule.placement) if there == rank]
        first = next(moment for moment in memory.moments if moment.action.op is Op.F)
        end = memory.moments[-1].after
        assert end <= min(moment.most for moment in memory.moments)
        largest = max((10 + count) * size for count, size in zip(schedule.slice_counts, sizes, strict=True))
        assert memory.peak - end >= largest * min(len(stages), 1)  # a microbatch is held as a whole
        assert first.most >= end


def test_equal_tables_are_one_table() -> None:
    schedule = make_schedule("1f1b", 2, 3, 2)
    one = table(schedule, 2, 3.0)
    several, alike = memory_of(schedule, [one] * 3), memory_of(schedule, one)
    assert [rank.moments for rank in several] == [rank.moments for rank in alike]


@pytest.mark.more
@examples(20)
@given(ragged_schedules(most_ranks=3, most=4), st.integers(0, 2**32), st.booleans())
def test_found_orders_keep_to_the_bound_and_beat_the_hand_written(schedule: Schedule, seed: int, split: bool) -> None:
    cost, counts = costs_of(schedule, seed), schedule.slice_counts
    problem = schedule.placement, len(counts), counts, cost
    found = find_order(*problem, split=split, effort=1e4)
    seconds = simulate(found, cost).makespan
    assert found.slice_counts == counts
    hand_written = simulate(schedule if split else join_backwards(schedule), cost).makespan
    assert step_lower_bound(*problem, split=split) <= seconds * (1 + 1e-9)
    assert seconds <= hand_written * (1 + 1e-9)
    least = [
        max(
            sum(cost.activation_bytes(Action(Op.F, g, m, i)) for g in stages for i in range(count))
            for m, count in enumerate(counts)
        )
        for stages in ([g for g, there in enumerate(schedule.placement) if there == r] for r in range(found.num_ranks))
    ]
    frugal = find_order(*problem, split=split, effort=1e4, memory_limit=least)
    assert all(most <= limit for most, limit in zip(simulate(frugal, cost).peak_memory, least, strict=True))
    bound = step_lower_bound(*problem, split=split, memory_limit=least)
    assert bound <= simulate(frugal, cost).makespan * (1 + 1e-9)


def test_the_text_form_has_each_count() -> None:
    schedule = make_schedule("1f1b", 2, 3, [3, 1, 2])
    assert "microbatches: 3\nslices: 3 1 2\nrank 0: 0F0.0 0F0.1 0F0.2 0F1.0 0B0.2 " in str(schedule)
    assert schedule.num_slices == 3
    assert schedule.is_ragged
    assert "slices: 2\n" in str(make_schedule("1f1b", 2, 3, [2, 2, 2]))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"1f1b has 3 microbatches, but num_slices=\[2, 1\] are 2"):
        make_schedule("1f1b", 2, 3, [2, 1])
    with pytest.raises(ScheduleError, match="gpipe needs at least 1 of slices, not 0"):
        make_schedule("gpipe", 2, 2, [2, 0])
    schedule = make_schedule("gpipe", 1, 2, [2, 1])
    with pytest.raises(ScheduleError, match="has slices 2 2 2; give 2 microbatches 1 to 2 slices each"):
        replace(schedule, slice_counts=(2, 2, 2))
    with pytest.raises(ScheduleError, match=r"reach has rows of \[2, 2\] slices; it needs one row of \[2, 1\]"):
        replace(schedule, reach=((0, 0), (0, 0)))
    extra = replace(schedule, actions=((*schedule.actions[0], Action(Op.F, 0, 1, 1)),))
    with pytest.raises(ScheduleError, match=r"0F1\.1 has slice 1, but microbatch 1's are 0 to 0"):
        validate(extra)
    with pytest.raises(ScheduleError, match="Stage 0, microbatch 0, slice 1 has nothing"):
        validate(Schedule.parse("schedule: x\nplacement: 0\nmicrobatches: 2\nslices: 2 1\nrank 0: 0F0.0 0F1.0"))
