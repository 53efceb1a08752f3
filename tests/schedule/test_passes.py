"""Passes save the memory that they promise, and their schedules run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.planner.order.ordering_problem import OrderingProblem
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
    compiled_sweep,
    forward_only,
    generators,
    gpipe,
    in_flushes,
    make_schedule,
    one_f_one_b,
    passes,
    split_backwards,
    spread_vocabulary,
    sweep,
    validate,
)
from slipstream.simulator import TableCost, simulate
from slipstream.simulator.costs import UnitCost
from support.examples import examples
from support.schedules import named_schedules, random_schedules

ORDERS = {"random": random_schedules(plain=True).map(lambda made: made[1]), "named": named_schedules(most_ranks=3)}


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


@pytest.mark.parametrize(
    ("alive", "row"),
    [(1, "0F0.0 0F1.0 0R0.0 0B0.0 0R1.0 0B1.0"), (2, "0F0.0 0F1.0 0R0.0 0R1.0 0B0.0 0B1.0")],
)
def test_recomputation_fills_a_wait_before_another_action(alive: int, row: str) -> None:
    """Rank 0 waits for F1's input's backward: with two slices alive R1.0 stands there, ahead of B0.0."""
    rows = "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1"
    schedule = Schedule.parse(f"schedule: flush\nplacement: 0 1\nmicrobatches: 2\nslices: 1\n{rows}")
    assert " ".join(map(str, add_recompute(schedule, alive=alive).actions[0])) == row


@pytest.mark.parametrize("kind", ORDERS)
@examples(150)
@given(alive=st.integers(1, 3), data=st.data())
def test_recomputation_is_complete_bounded_and_never_later(kind: str, alive: int, data: st.DataObject) -> None:
    schedule = data.draw(ORDERS[kind])
    recomputed = add_recompute(schedule, alive=alive)
    assert add_recompute(schedule, alive=alive, compiled=True) == recomputed
    validate(recomputed)
    check_communication(add_communication(recomputed))
    assert without(recomputed, Op.R) == tuple(schedule.actions)
    plain = just_before(schedule)
    assert sorted(map(str, recomputed.positions)) == sorted(map(str, plain.positions))
    assert most_whole(recomputed) <= max(alive, most_whole(plain))
    assert simulate(recomputed, UnitCost()).makespan <= simulate(plain, UnitCost()).makespan
    stages = data.draw(st.sets(st.integers(0, schedule.num_stages - 1)))
    some = {action.stage for action in add_recompute(schedule, stages).positions if action.op is Op.R}
    assert some <= stages


@pytest.mark.parametrize("kind", ORDERS)
@examples(150)
@given(data=st.data(), share=st.floats(0, 1) | st.just(1.0), ahead=st.integers(0, 3), again=st.booleans())
def test_offload_takes_those_that_wait_longest(
    kind: str, data: st.DataObject, share: float, ahead: int, again: bool
) -> None:
    schedule = data.draw(ORDERS[kind])
    if again:
        schedule = add_recompute(schedule)
    moved = add_offload(schedule, share, ahead)
    validate(moved)
    check_communication(add_communication(moved))
    assert add_offload(schedule, share, ahead, compiled=True) == moved
    assert without(moved, Op.OFFLOAD, Op.RELOAD) == tuple(schedule.actions)
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


@examples(80)
@given(named_schedules(most=7, ragged=True), st.integers(1, 3))
def test_microbatches_may_differ_in_their_number_of_slices(schedule: Schedule, num_flushes: int) -> None:
    for changed in (add_recompute(schedule), add_offload(schedule, 0.5), in_flushes(schedule, num_flushes)):
        validate(changed)
        check_communication(add_communication(changed))
    assert changed.slice_counts == schedule.slice_counts * num_flushes


THREE = gpipe(1, 1, 3)


@pytest.mark.parametrize(
    ("schedule", "row"),
    [
        (add_recompute(gpipe(2, 1, 3)), "0F0.0 0F0.1 0F0.2 0B0.2 0R0.1 0B0.1 0R0.0 0B0.0"),
        (add_recompute(split_backwards(gpipe(2, 1, 2))), "1F0.0 1F0.1 1I0.1 1W0.1 1R0.0 1I0.0 1W0.0"),
        (
            add_offload(THREE),
            "0F0.0 0OFFLOAD0.0 0F0.1 0OFFLOAD0.1 0F0.2 0RELOAD0.1 0B0.2 0RELOAD0.0 0B0.1 0B0.0",
        ),
    ],
    ids=["recomputed", "before the input gradient", "reloaded ahead of the backward"],
)
def test_where_a_pass_puts_its_actions(schedule: Schedule, row: str) -> None:
    assert " ".join(map(str, schedule.actions[int(row[0])])) == row


@pytest.mark.parametrize(
    ("schedule", "kept", "held"),
    [
        (add_recompute(THREE), 1, [1, 2, 12, 2, 11, 1, 10, 0]),  # the last slice keeps all: two kept, one whole
        (THREE, 1, [10, 20, 30, 20, 10, 0]),
        (add_offload(THREE), 0, [10, 0, 10, 0, 10, 20, 10, 20, 10, 0]),
        (add_offload(add_recompute(THREE)), 1, [1, 0, 1, 0, 10, 11, 1, 10, 11, 1, 10, 0]),
    ],
    ids=["recomputed", "neither", "offloaded", "both"],
)
def test_memory_of_recomputation_and_offload(schedule: Schedule, kept: int, held: list[int]) -> None:
    """A slice leaves 10, of which recomputation keeps 1."""
    assert [size for _, size in simulate(schedule, UnitCost(activation=10, kept=kept)).memory[0]] == held


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: add_recompute(add_communication(gpipe(2, 1, 2))), "has sends and receives already; add R before"),
        (lambda: add_recompute(add_recompute(gpipe(2, 1, 2))), r"gpipe has 0R0\.0 already, so R can't be added"),
        (lambda: add_recompute(forward_only(gpipe(2, 1, 2))), "gpipe has no backward that R could serve"),
        (lambda: add_recompute(gpipe(2, 1), alive=0), "alive=0: a number of slices, 1 or more"),
        (lambda: add_offload(add_communication(one_f_one_b(2, 1, 2))), "add OFFLOAD before they are"),
        (lambda: add_offload(add_offload(gpipe(2, 1, 3))), r"has 0OFFLOAD0\.0 already"),
        (lambda: add_offload(forward_only(gpipe(2, 1, 2))), "no backward that OFFLOAD could serve"),
        (lambda: add_offload(gpipe(2, 1, 2), share=1.5), r"share=1\.5, ahead=1: a share from 0 to 1"),
        (lambda: add_offload(gpipe(2, 1, 2), ahead=-1), r"share=1\.0, ahead=-1: .* 0 or more actions ahead"),
        (lambda: in_flushes(gpipe(2, 2), 0), "num_flushes=0: give 1 or more"),
        (lambda: in_flushes(add_communication(gpipe(2, 2)), 2), "has sends and receives already; repeat it before"),
        (lambda: spread_vocabulary(make_schedule("v-min", 5, 8, 1, 2), ahead=1), "wait for each other"),
    ],
)
def test_refusals(change: Callable[[], Schedule], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        change()


@examples(60)
@given(named_schedules(most_ranks=5, most=4, most_stages=2), st.integers(1, 4))
def test_memory_is_one_flushs_and_the_step_no_longer_than_flushes_in_a_row(once: Schedule, num_flushes: int) -> None:
    repeated = in_flushes(once, num_flushes)
    check_communication(add_communication(repeated))
    assert repeated.num_microbatches == num_flushes * once.num_microbatches
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


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("counts", [(2, 12, 2), (3, 6, 3)])
def test_few_lookups_wait_for_the_first_stage_and_few_gradients_behind_it(
    name: str, counts: tuple[int, int, int]
) -> None:
    """At most two slices a rank, and the one at hand; and they are made in the order of the first stage."""
    schedule = make_schedule(name, *counts, stages_per_rank=SCHEDULES[name].stages_per_rank.start)
    spread = spread_vocabulary(schedule, embedding=True)
    validate(spread)
    home = schedule.placement[0]
    first = [action[2:] for action in schedule.actions[home] if action.op is Op.F and action.stage == 0]
    for before, after in zip(schedule.actions, spread.actions, strict=True):
        assert tuple(action for action in after if action.op not in VOCABULARY) == before
        assert [action[2:] for action in after if action.op is Op.E] == first
    looked_up = gradients = 0
    for action in spread.actions[home]:
        looked_up += (action.op is Op.E) - (action.op is Op.F and action.stage == 0)
        gradients += (action.op in BACKWARDS - {Op.W} and action.stage == 0) - (action.op is Op.EW)
        assert 0 <= looked_up <= 2 * counts[0] + 1
        assert 0 <= gradients <= 2 * counts[0] + 1
    assert looked_up == gradients == 0


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


@examples(40)
@given(st.integers(0, 2**32))
def test_compiled_sweeps_are_the_plain_ones(seed: int) -> None:
    """By priority within slots, by priority within memory, and where gaps are filled."""
    pick = random.Random(seed)
    name, counts = pick.choice(["v-half", "v-min"]), [pick.randint(1, 4) for _ in range(3)]
    problem = OrderingProblem([*range(counts[0])], *counts[1:], UnitCost(link=0.3), [1.5 * counts[2]] * counts[0])
    graph = problem.graph(np.ones(problem.num_units, np.bool_))
    rule = np.random.default_rng(seed).normal(size=len(graph.seconds)), pick.choice([0.0, 2.0]), pick.choice([0.0, 0.5])
    orders = [
        (order.rows, order.lengths, start)
        for order, start in (module.place(graph, *rule) for module in (sweep, compiled_sweep))
    ]
    lists = [[rows.tolist(), lengths.tolist(), start.tolist()] for rows, lengths, start in orders]
    assert lists[0] == lists[1]
    found = []
    for most in (0, 10**9):  # actions of which the order is found without compiled code
        with pytest.MonkeyPatch.context() as patch:
            for module in (generators, passes):
                patch.setattr(module, "_MOST_INTERPRETED", most)
            schedule = make_schedule(name, *counts, stages_per_rank=2)
            found.append((schedule, spread_vocabulary(schedule, embedding=True)))
    assert found[0] == found[1]
