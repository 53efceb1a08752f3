"""Passes save the memory that they promise, and their schedules run."""

from __future__ import annotations

import inspect
import random
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.schedule import (
    BACKWARDS,
    SCHEDULES,
    VOCABULARY,
    Action,
    Op,
    Schedule,
    ScheduleError,
    add_communication,
    add_offload,
    add_recompute,
    check_communication,
    forward_only,
    gpipe,
    in_flushes,
    make_schedule,
    one_f_one_b,
    predecessors,
    split_backwards,
    spread_vocabulary,
    validate,
)
from slipstream.simulator import TableCost, simulate
from slipstream.simulator.costs import UnitCost
from slipstream.simulator.time_kernel import run_rows
from support.examples import examples

NAMED = [
    make_schedule(name, 2, m, s, SCHEDULES[name].stages_per_rank.start)
    for name in SCHEDULES
    for m, s in ((1, 4), (4, 1), (4, 4))
]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """A random order over a random placement, backwards whole or split."""
    num_stages, num_ranks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    placement = tuple(draw(st.integers(0, num_ranks - 1)) for _ in range(num_stages))
    m, s = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    units = product(range(num_stages), range(m), range(s))
    backward = st.sampled_from([(Op.B,), (Op.I, Op.W)])
    left = [Action(op, *unit) for unit in units for op in (Op.F, *draw(backward))]

    def schedule(order: list[Action]) -> Schedule:
        rows = [tuple(a for a in order if placement[a.stage] == rank) for rank in range(num_ranks)]
        return Schedule("random", tuple(rows), placement, m, s)

    rules, generator = schedule(left), random.Random(draw(st.integers(0, 2**32)))
    done: list[Action] = []
    while left:
        done.append(generator.choice([a for a in left if set(predecessors(a, rules)) <= set(done)]))
        left.remove(done[-1])
    return schedule(done)


def without(schedule: Schedule, *ops: Op) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(action for action in row if action.op not in ops) for row in schedule.actions)


def just_before(schedule: Schedule) -> Schedule:
    """The plain way: R right before the backward, unless that directly follows its forward."""

    def rewritten(row: tuple[Action, ...]) -> Iterator[Action]:
        for index, action in enumerate(row):
            if action.op in (Op.B, Op.I) and row[index - 1] != action.with_op(Op.F):
                yield action.with_op(Op.R)
            yield action

    return replace(schedule, actions=tuple(tuple(rewritten(row)) for row in schedule.actions))


def most_whole(schedule: Schedule) -> int:
    """Most slices of a rank at once that have all their activations: recomputed ones, and those without an R."""
    most = 0
    for row in schedule.actions:
        whole: set[tuple[int, int, int]] = set()
        for action in row:
            unit = (action.stage, action.microbatch, action.slice)
            if action.op is Op.R or (action.op is Op.F and action.with_op(Op.R) not in row):
                whole.add(unit)
            elif action.op in (Op.B, Op.I):
                whole.discard(unit)
            most = max(most, len(whole))
    return most


def test_recomputation_of_a_flush() -> None:
    schedule = add_recompute(gpipe(2, 1, 3))
    assert simulate(schedule, UnitCost()).to_text().splitlines() == [
        "rank 0  F0.0 F0.1 F0.2                B0.2----- R0.1 B0.1----- R0.0 B0.0-----",
        "rank 1       F0.0 F0.1 F0.2 B0.2----- R0.1 B0.1----- R0.0 B0.0-----",
    ]


def test_recomputation_fills_a_wait_before_another_action() -> None:
    """Rank 0 waits for F1's input's backward: with two slices alive R1.0 stands there, ahead of B0.0."""
    rows = ((Action.parse("0F0"), Action.parse("0F1"), *map(Action.parse, ("0B0", "0B1"))),)
    rows += (tuple(map(Action.parse, ("1F0", "1F1", "1B0", "1B1"))),)
    schedule = Schedule("flush", rows, (0, 1), 2, 1)
    assert [str(a) for a in add_recompute(schedule).actions[0]] == [
        *("0F0.0", "0F1.0", "0R0.0", "0B0.0", "0R1.0", "0B1.0")
    ]
    assert [str(a) for a in add_recompute(schedule, alive=2).actions[0]] == [
        *("0F0.0", "0F1.0", "0R0.0", "0R1.0", "0B0.0", "0B1.0")
    ]


@pytest.mark.parametrize("schedule", NAMED, ids=lambda schedule: schedule.name)
def test_every_named_schedule_takes_both_and_runs(schedule: Schedule) -> None:
    for alive, share in ((1, 0.5), (2, 1.0)):
        smaller = add_offload(add_recompute(schedule, alive=alive), share)
        assert without(smaller, Op.R, Op.OFFLOAD, Op.RELOAD) == schedule.actions
        check_communication(add_communication(smaller))


@examples(150)
@given(schedules(), st.integers(1, 3), st.data())
def test_recomputation_is_complete_bounded_and_never_later(schedule: Schedule, alive: int, data: st.DataObject) -> None:
    recomputed = add_recompute(schedule, alive=alive)
    assert add_recompute(schedule, alive=alive, run=run_rows) == recomputed
    validate(recomputed)
    assert without(recomputed, Op.R) == schedule.actions
    plain = just_before(schedule)
    assert sorted(map(str, recomputed.positions)) == sorted(map(str, plain.positions))
    assert most_whole(recomputed) <= max(alive, most_whole(plain))
    assert simulate(recomputed, UnitCost()).makespan <= simulate(plain, UnitCost()).makespan
    stages = data.draw(st.sets(st.integers(0, schedule.num_stages - 1)))
    some = {action.stage for action in add_recompute(schedule, stages).positions if action.op is Op.R}
    assert some <= stages


@examples(150)
@given(schedules(), st.floats(0, 1) | st.just(1.0), st.integers(0, 3), st.booleans())
def test_offload_takes_those_that_wait_longest(schedule: Schedule, share: float, ahead: int, again: bool) -> None:
    if again:
        schedule = add_recompute(schedule)
    moved = add_offload(schedule, share, ahead)
    validate(moved)
    assert add_offload(schedule, share, ahead, run=run_rows) == moved
    assert without(moved, Op.OFFLOAD, Op.RELOAD) == schedule.actions
    spans = {span.action: span for span in simulate(schedule, UnitCost()).spans}
    for row, original in zip(moved.actions, schedule.actions, strict=True):
        waits = {}
        for forward in original:
            if forward.op is Op.F:
                users = [a for a in original if a.op in (Op.R, Op.B, Op.I) and a.with_op(Op.F) == forward]
                between = original.index(users[0]) - original.index(forward) - 1
                if between > ahead:
                    waits[forward] = spans[users[0]].start - spans[forward].end
        chosen = {a.with_op(Op.F) for a in row if a.op is Op.OFFLOAD}
        assert chosen <= set(waits)
        assert len(chosen) == min(len(waits), round(share * sum(a.op is Op.F for a in original)))
        stay = [wait for forward, wait in waits.items() if forward not in chosen]
        assert min((waits[forward] for forward in chosen), default=0) >= max(stay, default=0) or not chosen
        for forward in chosen:
            assert row[row.index(forward) + 1].op is Op.OFFLOAD


def test_reloads_stand_ahead_of_their_backwards() -> None:
    schedule = add_offload(gpipe(1, 1, 3))
    text = "0F0.0 0OFFLOAD0.0 0F0.1 0OFFLOAD0.1 0F0.2 0RELOAD0.1 0B0.2 0RELOAD0.0 0B0.1 0B0.0"
    assert " ".join(map(str, schedule.actions[0])) == text


def test_memory_of_recomputation() -> None:
    """Of 10 a slice keeps 1; the last one keeps all. Peak: two kept, one whole."""
    schedule = add_recompute(gpipe(1, 1, 3))
    timeline = simulate(schedule, UnitCost(activation=10, kept=1))
    assert [size for _, size in timeline.memory[0]] == [1, 2, 12, 2, 11, 1, 10, 0]
    assert simulate(gpipe(1, 1, 3), UnitCost(activation=10, kept=1)).peak_memory == (30,)


def test_memory_of_offload() -> None:
    schedule = add_offload(gpipe(1, 1, 3))
    timeline = simulate(schedule, UnitCost(activation=10))
    assert [size for _, size in timeline.memory[0]] == [10, 0, 10, 0, 10, 20, 10, 20, 10, 0]
    both = simulate(add_offload(add_recompute(gpipe(1, 1, 3))), UnitCost(activation=10, kept=1))
    assert [size for _, size in both.memory[0]] == [1, 0, 1, 0, 10, 11, 1, 10, 11, 1, 10, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda: add_recompute(add_communication(gpipe(2, 1, 2))),
            "gpipe has sends and receives already; add R before",
        ),
        (lambda: add_recompute(add_recompute(gpipe(2, 1, 2))), r"gpipe has 0R0\.0 already, so R can't be added"),
        (lambda: add_recompute(forward_only(gpipe(2, 1, 2))), "gpipe has no backward that R could serve"),
        (lambda: add_recompute(gpipe(2), alive=0), "num_microbatches"),
        (lambda: add_recompute(gpipe(2, 1), alive=0), "alive=0: a number of slices, 1 or more"),
        (lambda: add_offload(add_communication(one_f_one_b(2, 1, 2))), "add OFFLOAD before they are"),
        (lambda: add_offload(add_offload(gpipe(2, 1, 3))), r"has 0OFFLOAD0\.0 already"),
        (lambda: add_offload(forward_only(gpipe(2, 1, 2))), "no backward that OFFLOAD could serve"),
        (lambda: add_offload(gpipe(2, 1, 2), share=1.5), r"share=1\.5, ahead=1: a share from 0 to 1"),
        (lambda: add_offload(gpipe(2, 1, 2), ahead=-1), r"share=1\.0, ahead=-1: .* 0 or more actions ahead"),
    ],
)
def test_refusals(change: object, message: str) -> None:
    with pytest.raises((ScheduleError, TypeError), match=message):
        change()  # type: ignore[operator]


def test_split_backwards_recompute_before_the_input_gradient() -> None:
    schedule = add_recompute(split_backwards(gpipe(2, 1, 2)))
    assert " ".join(map(str, schedule.actions[1])) == "1F0.0 1F0.1 1I0.1 1W0.1 1R0.0 1I0.0 1W0.0"


def test_the_picture_of_flushes_is_the_timeline() -> None:
    lines = [line for line in inspect.getdoc(in_flushes).splitlines() if line.startswith("    rank ")]
    picture = textwrap.dedent("\n".join(lines))
    assert simulate(in_flushes(gpipe(2, 2), 2), UnitCost(backward=1)).to_text() == picture


@examples(60)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
def test_memory_is_one_flushs_and_the_step_no_longer_than_flushes_in_a_row(
    name: str, p: int, m: int, s: int, num_flushes: int
) -> None:
    once = make_schedule(name, p, m, s, max(v for v in (1, 2) if v in SCHEDULES[name].stages_per_rank))
    repeated = in_flushes(once, num_flushes)
    check_communication(add_communication(repeated))
    assert repeated.num_microbatches == num_flushes * m
    one, all_of_them = simulate(once, UnitCost()), simulate(repeated, UnitCost())
    assert all_of_them.peak_memory == one.peak_memory
    assert all_of_them.makespan <= num_flushes * one.makespan
    assert num_flushes > 1 or repeated == once


def test_gradients_are_reduced_once_and_documents_repeat() -> None:
    plain = one_f_one_b(2, 2, 2)
    rows = tuple((*row, Action(Op.REDUCE_GRAD, rank)) for rank, row in enumerate(plain.actions))
    schedule = in_flushes(replace(plain, actions=rows, reach=((0, 0), (0, 1))), 2)
    validate(schedule)
    assert schedule.reach == ((0, 0), (0, 1), (0, 0), (0, 1))
    for rank, row in enumerate(schedule.actions):
        assert [action.op for action in row].index(Op.REDUCE_GRAD) == len(row) - 1
        assert [a.microbatch for a in row if a.op is Op.F] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert row[-1] == Action(Op.REDUCE_GRAD, rank)


def test_flushes_that_are_refused() -> None:
    with pytest.raises(ScheduleError, match="num_flushes=0: give 1 or more"):
        in_flushes(gpipe(2, 2), 0)
    with pytest.raises(ScheduleError, match="gpipe has sends and receives already; repeat it before"):
        in_flushes(add_communication(gpipe(2, 2)), 2)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("num_ranks", "num_microbatches", "num_slices"), [(2, 12, 2), (3, 6, 3)])
def test_few_lookups_wait_for_the_first_stage_and_few_gradients_behind_it(
    name: str, num_ranks: int, num_microbatches: int, num_slices: int
) -> None:
    """At most two slices a rank, and the one at hand."""
    schedule = make_schedule(
        name, num_ranks, num_microbatches, num_slices, stages_per_rank=SCHEDULES[name].stages_per_rank.start
    )
    spread = spread_vocabulary(schedule, embedding=True)
    validate(spread)
    for before, after in zip(schedule.actions, spread.actions, strict=True):
        assert tuple(action for action in after if action.op not in VOCABULARY) == before
    looked_up = gradients = 0
    for action in spread.actions[schedule.placement[0]]:
        looked_up += (action.op is Op.E) - (action.op is Op.F and action.stage == 0)
        gradients += (action.op in BACKWARDS - {Op.W} and action.stage == 0) - (action.op is Op.EW)
        assert 0 <= looked_up <= 2 * num_ranks + 1
        assert 0 <= gradients <= 2 * num_ranks + 1
    assert looked_up == gradients == 0


def test_lookups_are_made_in_the_order_of_the_first_stage() -> None:
    schedule = make_schedule("1f1b", 2, 6, 2)
    for row in spread_vocabulary(schedule, embedding=True).actions:
        lookups = [action[2:] for action in row if action.op is Op.E]
        assert lookups == [action[2:] for action in schedule.actions[0] if action.op is Op.F]


# Seconds of each action of a model of which a rank's rows of the head are a quarter of the work of its layers.
SHARED_HEAD = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.0, Op.W: 1.0, Op.V: 0.5, Op.L: 0.0, Op.VW: 0.25}


def shared_head_cost(num_stages: int) -> TableCost:
    times = {(g, 0, op): seconds for g in range(num_stages) for op, seconds in SHARED_HEAD.items()}
    return TableCost(times=times, message_bytes=[0.0], latency=0.0, bandwidth=None)


def in_flight(row: tuple[Action, ...]) -> int:
    """The most microbatches of which a rank holds activations."""
    alive = most = 0
    for action in row:
        alive += (action.op is Op.F) - (action.op in (Op.B, Op.I))
        most = max(most, alive)
    return most


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(4, 16), (8, 128)])
def test_one_more_microbatch_in_flight_hides_the_exchange(num_ranks: int, num_microbatches: int) -> None:
    """As in the published algorithm: at most p + 1. In 1F1B's own order each rank waits for V and L of each microbatch.
    The second case has more waiting parts than a search through all of them at every action would end on."""
    schedule, cost = make_schedule("1f1b", num_ranks, num_microbatches), shared_head_cost(num_ranks)
    seconds = []
    for ahead in (0, 1):
        spread = spread_vocabulary(schedule, cost.seconds, ahead=ahead)
        validate(spread)
        seconds.append(simulate(spread, cost).makespan)
        assert [in_flight(row) for row in spread.actions] == [num_ranks - rank + ahead for rank in range(num_ranks)]
        for stage, (before, after) in enumerate(zip(schedule.actions, spread.actions, strict=True)):
            for ops in ((Op.F,), (Op.B, Op.I)):
                order = [[each for each in row if each.op in ops and each.stage == stage] for row in (before, after)]
                assert order[0] == order[1]
    busy = num_microbatches * sum(SHARED_HEAD[op] for op in (Op.F, Op.B, Op.V, Op.VW))
    assert seconds[1] < busy + 6 * num_ranks
    assert seconds[0] > 1.1 * seconds[1]


def test_an_order_that_cannot_run_ahead_is_refused() -> None:
    with pytest.raises(ScheduleError, match="wait for each other"):
        spread_vocabulary(make_schedule("v-half", 4, 8, 2, stages_per_rank=2), ahead=1)
