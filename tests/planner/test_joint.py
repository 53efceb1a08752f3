"""The joint search finds plans that run, keep to memory limits and beat what they are chosen from.

A plan spreads the head's rows over the ranks where that makes the simulated step shorter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.array_types import Floats, Ints
from slipstream.cost import OPS, Costs, LinkTime, Numbers, Work, unit_bounds
from slipstream.errors import SlipstreamError
from slipstream.planner.cuts import Cuts
from slipstream.planner.find_plan import find_plan
from slipstream.planner.joint import JointPlan, JointProblem, OutOfMemoryError
from slipstream.planner.joint.finalists import FinalistSearch
from slipstream.planner.joint.joint_search import placements
from slipstream.planner.joint.placement_search import PlacementSearch, QuickOrder
from slipstream.planner.joint.problem import MemoryAccount
from slipstream.planner.joint.vocabulary_search import spread_costs
from slipstream.planner.order.makespan_bounds import rank_bounds
from slipstream.planner.order.order_search import find_order
from slipstream.planner.plan import OPEN, Plan
from slipstream.schedule import Action, Op, Schedule, one_f_one_b, validate
from slipstream.simulator import result_seconds, simulate
from support.examples import examples
from support.parameters import first_of
from support.plain_costs import SHARES


@dataclass(frozen=True)
class ToyCosts(Costs):
    """Layers of an attention half, quadratic in the tokens, and a feed-forward half; and a head."""

    num_layers: int = 4
    head: float = 0.75
    attention: float = 0.3
    overhead: float = 2.0
    latency: float = 0.5
    bandwidth: float | None = None
    handling: float = 0.0
    units_per_layer: int = 2

    @property
    def parts(self) -> Sequence[int]:
        return (2, *[0, 1] * self.num_layers, 3)

    def link(self, num_ranks: int, replicas: int = 1) -> LinkTime:
        return LinkTime(self.latency, self.bandwidth)

    def each_seconds(self, work: Work) -> Floats:
        tokens = work.lengths.astype(float)
        scores = (tokens * work.contexts + tokens**2 / 2) / 256
        rows = [tokens * 0.3 + self.attention * scores, tokens * 0.6, tokens * 0.01, tokens * self.head]
        return np.array(rows) * SHARES[work.op]

    def fixed_seconds(self, work: Work) -> Floats:
        return np.full(len(work.lengths), self.overhead)

    def each_activation(self, lengths: Ints) -> Floats:
        return np.outer(np.full(4, 9.0), lengths)

    def fixed_activation(self, lengths: Ints) -> Floats:
        return lengths * 1.0

    @property
    def each_context(self) -> Floats:
        return np.full(4, 1.0)

    @property
    def each_number(self) -> Numbers:
        return Numbers(*np.full((2, 4), 62.5), np.zeros(4))

    def message_bytes(self, length: Any) -> Any:
        return length * 4.0

    def handling_seconds(self, length: Any) -> Any:
        return self.handling * np.asarray(length, float)


def problem(num_ranks: int = 2, seq_len: int = 512, **settings: object) -> JointProblem:
    effort = settings.pop("effort", 3e6)
    costs = settings.pop("costs", ToyCosts())
    return JointProblem(costs, seq_len, num_ranks, effort=effort, **settings)  # type: ignore[arg-type]


@cache
def found() -> JointPlan:
    return find_plan(problem())


@cache
def found_of_two() -> JointPlan:
    """The plan of two microbatches of which nothing is given."""
    return find_plan(problem(num_microbatches=2))


@cache
def found_of_four() -> JointPlan:
    """The plan of four microbatches without a limit."""
    return find_plan(problem(num_microbatches=4))


def test_the_plan_is_a_valid_schedule_of_the_whole_model_and_sequence() -> None:
    """And beats equal stages and slices in their best order."""
    plan = found()
    validate(plan.schedule)
    assert sum(plan.partition) == 4
    assert sum(plan.slices) == 512
    assert len(plan.partition) == plan.schedule.num_stages
    assert plan.schedule.num_slices == len(plan.slices)
    assert plan.ideal <= plan.bound <= plan.seconds
    equal = problem().units((64,) * 8).table((0, 5, 10))
    assert plan.seconds < simulate(find_order([0, 1], 1, 8, equal), equal).makespan


def test_what_is_faster_than_it_must_be_is_found_still() -> None:
    """Slices and cuts are passed over only where no plan on them is fast enough."""
    task, plan = problem(num_microbatches=4), found_of_four()
    assert find_plan(replace(task, most_seconds=1.001 * plan.seconds)).seconds <= plan.seconds
    with pytest.raises(SlipstreamError, match="nothing was found that fits and takes less"):
        find_plan(replace(task, most_seconds=plan.ideal))


def test_messages_take_time_of_the_stages_at_their_ends() -> None:
    """F takes a message and sends one, except at the ends of the pipeline; W has none."""
    slices, bounds = (64, 128), (0, 3, 6, 10)
    quiet, handled = (problem(costs=ToyCosts(handling=each)).units(slices) for each in (0.0, 0.25))
    for op in (Op.F, Op.B, Op.I):
        more = handled.stage_seconds(op, bounds) - quiet.stage_seconds(op, bounds)
        np.testing.assert_allclose(more, [[16, 32], [32, 64], [16, 32]])
        np.testing.assert_allclose(handled.stage_seconds(op, (0, 10)), quiet.stage_seconds(op, (0, 10)))
    np.testing.assert_allclose(handled.stage_seconds(Op.W, bounds), quiet.stage_seconds(Op.W, bounds))


@pytest.mark.more
def test_a_heavy_head_gets_fewer_layers_beside_it_than_equal_layers_would() -> None:
    light, heavy = (find_plan(problem(costs=ToyCosts(head=head))) for head in (0.1, 3.0))
    assert light.seconds / light.ideal < 1.1
    by_rank = [0.0, 0.0]
    for rank, layers in zip(heavy.schedule.placement, heavy.partition, strict=True):
        by_rank[rank] += layers
    assert by_rank[heavy.schedule.placement[-1]] < by_rank[heavy.schedule.placement[0]]


@pytest.mark.more
def test_the_same_problem_gives_the_same_plan_and_its_table_says_what_was_compared() -> None:
    plan = find_plan(problem())
    assert plan == found()
    lines = plan.table().splitlines()
    assert lines[0].split() == ["stages", "on", "ranks", "layers", "slices", "step", "over", "ideal"]
    assert len(lines) >= 1 + 1 + len(plan.rejected)
    assert plan.exact is not None
    assert plan.exact.seconds >= plan.seconds
    assert plan.exact.schedule.placement == plan.schedule.placement
    assert "dynamic program" in lines[-1]


@pytest.mark.more
def test_more_ranks_and_microbatches() -> None:
    plan = find_plan(problem(num_ranks=3, num_microbatches=3))
    validate(plan.schedule)
    assert plan.schedule.num_microbatches == 3
    assert set(plan.schedule.placement) == {0, 1, 2}


@pytest.mark.more
def test_a_memory_limit_is_kept_and_forwards_run_again_where_nothing_else_fits() -> None:
    task, free = problem(num_microbatches=4), found_of_four()
    limit = 0.6 * max(peaks(task, free))
    limited = find_plan(replace(task, memory_limit=limit))
    assert max(peaks(task, limited)) <= limit
    assert limited.seconds >= free.bound
    again = find_plan(problem(memory_limit=25_000))
    assert again.recompute != "none"
    assert "computed again" in again.table()


def account(task: JointProblem, more: float) -> MemoryAccount:
    """Counts what the search does, and some bytes more for each stage and slice of a rank, as messages take."""

    def peaks(plan: Plan) -> list[float]:
        units = task.units(plan.slices, plan.recompute)
        bounds = bounds_of(task, plan.partition)
        assert isinstance(plan.schedule, Schedule)
        ranks = plan.schedule.placement
        held = simulate(plan.schedule, units.table(bounds)).peak_memory + np.bincount(ranks, np.diff(bounds) * 1000.0)
        computed = [max(units.computed_again(bounds)[np.array(ranks) == rank]) for rank in range(task.num_ranks)]
        total: Floats = held + computed + more * len(plan.slices) * np.bincount(ranks)
        return [float(each) for each in total]

    return peaks


@pytest.mark.more
@pytest.mark.parametrize("share", [0.97, 0.6])
def test_the_account_decides_what_fits(share: float) -> None:
    """It holds more than the search knows of; backwards are split under a limit, too."""
    task, free = problem(num_microbatches=4), found_of_four()
    counted = account(task, 700.0)
    limit = share * max(counted(free.plan))
    plan = find_plan(replace(task, memory_limit=limit, account=counted))
    for each in (plan, *plan.rejected):
        assert max(counted(each.plan)) <= limit
    assert plan.seconds >= free.bound
    assert Op.W in plan.schedule.ops


@pytest.mark.more
def test_what_would_fit_is_said_where_nothing_does() -> None:
    counted = account(problem(), 700.0)
    with pytest.raises(
        OutOfMemoryError, match=r"limit=3000 bytes.*The least that was found is .* on rank \d.*more ranks"
    ) as why:
        find_plan(problem(memory_limit=3000, account=counted))
    least = int(re.findall(r"Give memory.limit=(\d+)", str(why.value))[0])
    plan = find_plan(problem(memory_limit=least, account=counted))
    assert max(counted(plan.plan)) <= least


def peaks(task: JointProblem, plan: JointPlan) -> list[float]:
    """The bytes of weights and of activations that each rank holds at most."""
    bounds = bounds_of(task, plan.partition)
    timeline = simulate(plan.schedule, task.units(plan.slices).table(bounds))
    state = np.bincount(plan.schedule.placement, np.diff(bounds) * 1000.0)
    return [float(a + b) for a, b in zip(timeline.peak_memory, state, strict=True)]


def bounds_of(task: JointProblem, partition: tuple[float, ...]) -> tuple[int, ...]:
    ends = np.cumsum([2 * count for count in partition]).astype(int) + 1
    return (0, *ends[:-1].tolist(), task.num_units)


def test_slices_are_as_long_as_is_allowed_even_where_that_makes_them_many() -> None:
    task = problem(seq_len=64 * 40 + 10, cuts=Cuts(longest_slice=70), effort=3e5)
    plan = find_plan(task)
    assert len(plan.slices) == 41
    assert max(plan.slices) == 64
    many = task.units((64,) * 40 + (10,)).unit_work().sum() / 2
    assert plan.ideal == pytest.approx(many)
    with pytest.raises(SlipstreamError, match=r"longest_slice=63.*granularity=64"):
        find_plan(problem(cuts=Cuts(longest_slice=63)))


@dataclass(frozen=True)
class SteepCosts(ToyCosts):
    """Longer slices cost more for each of their tokens, as where they outgrow a cache."""

    def each_seconds(self, work: Work) -> Floats:
        return super().each_seconds(work) * (1 + work.lengths / 64)


def test_no_plan_is_shorter_than_the_ideal() -> None:
    plan = find_plan(problem(costs=SteepCosts(overhead=0.0), effort=1e6))
    assert len(plan.slices) > 1
    for each in (plan, *plan.rejected):
        assert each.ideal == plan.ideal <= each.seconds


@pytest.mark.more
def test_the_slices_of_the_dynamic_program_are_no_more_than_are_allowed() -> None:
    plan = find_plan(
        problem(num_ranks=4, seq_len=4096, cuts=Cuts(most_slices=5), costs=ToyCosts(overhead=0.01), effort=1e6)
    )
    assert plan.exact is not None
    assert len(plan.exact.slices) <= 5


def test_the_finals_prefer_what_is_shorter_in_its_best_order() -> None:
    """The quick orders, by which candidates are improved, would choose another."""
    given = Plan(placement=(0, 1, 0, 1), recompute="none")
    task = problem(costs=ToyCosts(num_layers=6, head=2.0), seq_len=1024, effort=2e7, given=given)
    searches = [PlacementSearch(task, lambda used: None)]
    searches[0].run(np.inf, 1e7)
    finals = FinalistSearch(searches)
    finals.run()
    (first,), (last,) = [each.best for each in searches], [*finals.best.values()]
    assert first is not None
    assert last is not None
    seconds = {each: searches[0].seconds_in_order(each, 1e6) for each in (first, last)}
    assert seconds[last] < seconds[first]
    assert searches[0].bound(last) <= seconds[last] < searches[0].known[first]


def test_progress_is_told_by_the_effort() -> None:
    told: list[int] = []
    find_plan(problem(effort=3e5), lambda task, percent, of: told.append(percent))
    assert told == sorted(told)
    assert 0 <= told[0] < told[-1] <= 100


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_rank_has_a_stage_in_every_placement(num_ranks: int) -> None:
    for placement in placements(num_ranks, 10):
        assert set(placement) == set(range(num_ranks))
        assert len(placement) <= 10


def test_the_bound_of_a_lone_microbatch_is_its_way_through_all_stages() -> None:
    placement, seconds = (0, 1, 0, 1), {op: np.array([[1.0], [2.0], [3.0], [4.0]]) for op in OPS}
    # On rank 1 the last stage waits for the forwards of all others, though the rank has less work than that.
    done, sent = rank_bounds(seconds, np.array(placement), [0], np.zeros(1), split=False)
    assert done.max() < sent.max() == 2 * (1 + 2 + 3 + 4)


def test_of_orders_that_take_as_long_the_one_that_holds_less_is_taken() -> None:
    """By itself the order search finds one here that holds four times as much."""
    wanted = problem(num_microbatches=16)
    plan = find_plan(wanted)
    table = wanted.units(plan.slices).table(unit_bounds(plan.partition, 4, 2))
    fastest = find_order(plan.schedule.placement, 16, len(plan.slices), table, effort=0.1 * wanted.effort)
    taken, shortest = (simulate(schedule, table) for schedule in (plan.schedule, fastest))
    assert taken.makespan == pytest.approx(plan.seconds)
    assert taken.makespan <= 1.001 * shortest.makespan
    assert max(taken.peak_memory) < 0.5 * max(shortest.peak_memory)


@examples(30)
@given(
    st.sampled_from([(0, 1), (0, 1, 0), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2)]),
    st.lists(st.sampled_from([64, 128, 192]), min_size=1, max_size=4),
    st.integers(1, 2),
    st.data(),
)
def test_bounds_and_quick_orders_enclose_the_best_order(
    placement: tuple[int, ...], slices: list[int], microbatches: int, data: st.DataObject
) -> None:
    costs = ToyCosts()
    inner = data.draw(
        st.lists(st.integers(1, 9), min_size=len(placement) - 1, max_size=len(placement) - 1, unique=True)
    )
    bounds = (0, *sorted(inner), 10)
    units = problem(costs=costs).units(tuple(slices))
    table = units.table(bounds)
    found = find_order(placement, microbatches, len(slices), table, effort=2e5)
    seconds = {op: units.stage_seconds(op, bounds) for op in OPS}
    least = np.max(rank_bounds(seconds, np.array(placement), [0], units.message_seconds, microbatches))
    quick = min(QuickOrder(placement, microbatches, len(slices), True).seconds(units, bounds, None).values())
    best = simulate(found, table).makespan
    assert least <= best * (1 + 1e-9)
    assert least * (1 - 1e-9) <= quick <= 2 * best


# --- a spread head ---------------------------------------------------------------------------------------------------

HEAVY = ToyCosts(num_layers=6, head=7.0, overhead=1.0)


@pytest.mark.parametrize("tied", [*first_of([True], 0), *first_of([False], 0, "grid")])
def test_a_heavy_head_is_spread(tied: bool) -> None:
    """With it a tied embedding: every rank then looks at every token, as the first one does for a whole embedding."""
    task = problem(costs=HEAVY, tied=tied)
    plan = find_plan(replace(task, may_spread=True))
    assert plan.other_head is not None
    assert (plan.head, plan.other_head.head) == ("spread", "whole")
    assert plan.other_head == find_plan(task)
    assert plan.seconds < 1.05 * plan.ideal < plan.other_head.seconds
    assert plan.ideal <= plan.bound <= plan.seconds
    validate(plan.schedule)
    assert (plan.schedule.spreads_embedding, plan.other_head.schedule.spreads_embedding) == (tied, False)
    cost = spread_costs(task, plan.partition, plan.slices)
    assert simulate(plan.schedule, cost).makespan == plan.seconds
    lines = plan.table().splitlines()
    assert [line.split()[-1] for line in (lines[0], lines[1])] == ["head", "spread"]
    assert f"whole, on one rank, a step takes +{plan.other_head.seconds / plan.seconds - 1:.1%}" in lines[-1]
    for op, like in ((Op.E, Op.F), (Op.EW, Op.W)) if tied else ():
        embedding = float(HEAVY.each_seconds(Work.of_slices(like, plan.slices))[HEAVY.parts[0], 0])
        assert {cost.seconds(Action(op, g, 0, 0)) for g in plan.schedule.vocabulary_stages} == {embedding}


@dataclass(frozen=True)
class CostlyLogits(ToyCosts):
    """A head whose tokens take the longer the more of them there are in a slice."""

    def each_seconds(self, work: Work) -> Floats:
        units = super().each_seconds(work)
        return np.concatenate([units[:-1], units[-1:] * (0.25 + work.lengths / 256)])


@pytest.mark.more
def test_work_counts_in_the_slices_of_the_plan() -> None:
    """In one slice all work takes so long that a whole head's plan is shorter than an equal share of it."""
    task = problem(costs=CostlyLogits(num_layers=6, head=7.0, overhead=1.0))
    plan = find_plan(replace(task, may_spread=True))
    assert plan.other_head is not None
    assert plan.head == "spread"


@pytest.mark.more
def test_a_spread_head_loses_where_actions_cost_much() -> None:
    plan = find_plan(problem(costs=ToyCosts(num_layers=6, head=2.0, overhead=200.0), may_spread=True))
    assert plan.other_head is not None
    assert (plan.head, plan.other_head.head) == ("whole", "spread")
    assert "with its rows spread over the ranks a step takes +" in plan.table()


@pytest.mark.parametrize("head", [*first_of([0.75], 0), *first_of([0.1], 0, "grid")])
def test_a_light_head_is_no_question(head: float) -> None:
    task = problem(costs=ToyCosts(num_layers=8, head=head))
    plan = find_plan(replace(task, may_spread=True))
    assert plan == find_plan(task)
    assert "head" not in plan.table()


def test_what_is_asked_for_is_what_is_planned() -> None:
    task = problem(costs=HEAVY)
    for vocabulary in ("whole", "spread"):
        plan = find_plan(replace(task, given=Plan(vocabulary=vocabulary)))
        assert (plan.head, plan.other_head) == (vocabulary, None)


def test_all_parts_together_cost_what_the_head_does_and_their_actions_besides() -> None:
    """The seconds of V's and VW's on all ranks are those of the head's F, I and W."""
    task = problem(costs=HEAVY, num_ranks=4)
    slices = (200, 312)
    cost = spread_costs(task, (2, 2, 2, 0), slices)
    for index, (length, context) in enumerate(((200, 0), (312, 200))):
        works = [Work(op, np.array([length]), np.array([context])) for op in (Op.F, Op.I, Op.W)]
        head, fixed = sum(float(HEAVY.each_seconds(work)[-1, 0]) for work in works), HEAVY.overhead
        parts = [cost.seconds(Action(op, g, 0, index)) for op in (Op.V, Op.VW) for g in range(4)]
        assert sum(parts) == pytest.approx(head + 8 * fixed)
        assert cost.seconds(Action(Op.L, 3, 0, index)) == fixed
        assert cost.seconds(Action(Op.F, 3, 0, index)) == fixed


def test_a_part_of_a_slice_is_two_tensors_and_the_sums_are_none() -> None:
    cost = spread_costs(problem(costs=ToyCosts(latency=0.5, bandwidth=8.0)), (2, 2), (256, 256))
    sent = 256 * 4 / 8
    wanted = {Op.F: 0.5 + sent, Op.V: 0.5 + 2 * sent, Op.L: 0.5}
    assert {op: result_seconds(cost, Action(op, 1, 0, 0), 1, 0) for op in wanted} == wanted


@pytest.mark.more
def test_one_more_microbatch_is_in_flight_where_memory_allows_it() -> None:
    """By the account of the whole plan, which here counts the microbatches between their forward and backward."""
    spread = Plan(vocabulary="spread")
    cuts = Cuts(most_slices=1)
    task = problem(num_ranks=4, costs=HEAVY, num_microbatches=8, cuts=cuts, effort=1e5, given=spread)
    free = find_plan(task)

    def account(plan: Plan) -> list[float]:
        assert isinstance(plan.schedule, Schedule)
        rows = plan.schedule.actions
        changes = [[(action.op is Op.F) - (action.op in (Op.B, Op.I)) for action in row] for row in rows]
        return [float(np.cumsum(row).max()) for row in changes]

    most = max(account(free.plan))
    limited = find_plan(replace(task, memory_limit=most - 1, account=account))
    assert max(account(limited.plan)) < most
    assert free.seconds < limited.seconds


GIVEN_CHOICES: dict[str, dict[str, Any]] = {
    "a name": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved-1f1b", "stages_per_rank": 2},
    "a v": {"schedule": "zb-v"},
    "an order": {"schedule": one_f_one_b(2, 2, 4)},
    "stages a rank": {"stages_per_rank": 2},
    "a placement": {"placement": (1, 0, 1)},
    "a cut": {"partition": (1.5, 2.5)},
    "slices": {"slices": (256, 128, 128)},
    "slices and an order": {"slices": (200, 200, 112), "schedule": "gpipe"},
    "slices and a cut": {"slices": (200, 200, 112), "partition": (1, 1, 1, 1)},
    "all": {"slices": (512,), "schedule": "1f1b", "partition": (3, 1), "recompute": "stage"},
}


@pytest.mark.parametrize("name", GIVEN_CHOICES)
def test_what_is_given_is_kept_and_the_rest_is_searched_for(name: str) -> None:
    given = Plan(**GIVEN_CHOICES[name])
    asked = problem(num_microbatches=2, given=given, effort=3e5)
    plan = find_plan(asked)
    validate(plan.schedule)
    placement = plan.schedule.placement
    assert given.slices in (OPEN, plan.slices)
    assert given.partition in (OPEN, plan.partition)
    assert given.placement in (OPEN, placement)
    assert given.stages_per_rank in (OPEN, max(map(placement.count, placement)))
    assert plan.recompute == ("none" if given.recompute is OPEN else given.recompute)
    if given.schedule is not OPEN:
        assert plan.schedule == asked.order(placement, len(plan.slices))
    bounds = unit_bounds(plan.partition, 4, 2)
    cost = asked.units(plan.slices, plan.recompute).table(bounds)
    assert plan.seconds == pytest.approx(simulate(plan.schedule, cost).makespan, rel=1e-9)
    assert found_of_two().seconds <= plan.seconds * (1 + 1e-9)


def test_a_limit_is_kept_with_a_given_order_too() -> None:
    given = Plan(schedule="gpipe")
    asked = problem(num_microbatches=2, given=given, effort=3e5)
    plan = find_plan(asked)

    def held(plan: Plan) -> list[float]:
        return [max(plan.partition) * sum(plan.slices) * (1 if plan.recompute == "none" else 0.1)] * 2

    limit = 0.5 * max(held(plan.plan))
    within = find_plan(replace(asked, memory_limit=limit, account=held))
    assert within.recompute != "none"
    assert within.schedule.name == plan.schedule.name
    with pytest.raises(OutOfMemoryError, match="nothing that was searched fits"):
        find_plan(replace(asked, memory_limit=limit, account=held, given=replace(given, recompute="none")))


def test_stages_that_no_placement_has_are_refused() -> None:
    asked = problem(given=Plan(schedule="1f1b", partition=(1, 1, 2)))
    with pytest.raises(SlipstreamError, match="no placement on 2 ranks has as many stages"):
        find_plan(asked)
    with pytest.raises(SlipstreamError, match=r"stages on the ranks \[0, 1, 1, 0\], but placement=\[0, 1, 0, 1\]"):
        find_plan(problem(given=Plan(schedule="zb-v", placement=(0, 1, 0, 1))))
