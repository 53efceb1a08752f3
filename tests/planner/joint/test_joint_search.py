"""The joint search finds plans that run, that keep to memory limits, and that beat what it chooses from."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.array_types import Floats, Ints
from slipstream.cost import OPS
from slipstream.errors import SlipstreamError
from slipstream.planner.joint import JointPlan, JointProblem, OutOfMemoryError, find_joint_plan
from slipstream.planner.joint.joint_search import FinalistSearch, placements
from slipstream.planner.joint.placement_search import PlacementSearch, QuickOrder
from slipstream.planner.joint.problem import MemoryAccount
from slipstream.planner.joint.unit_costs import SlicedUnits
from slipstream.planner.order.makespan_bounds import rank_bounds
from slipstream.planner.order.order_search import find_order
from slipstream.schedule import Op, Schedule, validate
from slipstream.simulator import simulate
from support.examples import examples

SHARES = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.2, Op.W: 0.8}


@dataclass(frozen=True)
class ToyCosts:
    """Layers of an attention half, quadratic in the tokens, and a feed-forward half; and a head."""

    num_layers: int = 4
    head: float = 0.75
    attention: float = 0.3
    overhead: float = 2.0
    units_per_layer: int = 2
    num_frozen_units: int = 0
    latency: float = 0.5
    bandwidth: float | None = None
    handling: float = 0.0

    def seconds(self, op: Op, lengths: Ints, contexts: Ints) -> tuple[Floats, Floats]:
        tokens = lengths.astype(float)
        scores = (tokens * contexts + tokens**2 / 2) / 256
        halves = [tokens * 0.3 + self.attention * scores, tokens * 0.6] * self.num_layers
        rows = np.array([tokens * 0.01, *halves, tokens * self.head])
        return rows * SHARES[op], np.full(len(lengths), self.overhead)

    def activation_bytes(self, lengths: Ints) -> tuple[Floats, Floats]:
        return np.outer(np.full(2 * self.num_layers + 2, 10.0), lengths), lengths * 1.0

    def kept_bytes(self, lengths: Ints) -> tuple[Floats, Floats]:
        return np.outer(np.full(2 * self.num_layers + 2, 1.0), lengths), lengths * 1.0

    def state_bytes(self) -> Floats:
        return np.full(2 * self.num_layers + 2, 1000.0)

    def message_bytes(self, lengths: Ints) -> Floats:
        return lengths * 4.0

    def handling_seconds(self, lengths: Ints) -> Floats:
        return self.handling * lengths.astype(float)


def problem(num_ranks: int = 2, seq_len: int = 512, **settings: object) -> JointProblem:
    effort = settings.pop("effort", 3e6)
    costs = settings.pop("costs", ToyCosts())
    return JointProblem(costs, seq_len, num_ranks, effort=effort, **settings)  # type: ignore[arg-type]


def test_the_plan_is_a_valid_schedule_of_the_whole_model_and_sequence() -> None:
    plan = find_joint_plan(problem())
    validate(plan.schedule)
    assert sum(plan.partition) == 4
    assert sum(plan.slices) == 512
    assert len(plan.partition) == plan.schedule.num_stages
    assert plan.schedule.num_slices == len(plan.slices)
    assert plan.ideal <= plan.bound <= plan.seconds


def test_what_is_faster_than_it_must_be_is_found_still() -> None:
    """Slices and cuts are passed over only where no plan on them is fast enough."""
    task = problem(num_microbatches=4)
    plan = find_joint_plan(task)
    assert find_joint_plan(replace(task, most_seconds=1.001 * plan.seconds)).seconds <= plan.seconds
    with pytest.raises(SlipstreamError, match="nothing was found that fits and takes less"):
        find_joint_plan(replace(task, most_seconds=plan.ideal))


def test_messages_take_time_of_the_stages_at_their_ends() -> None:
    """F takes a message and sends one, except at the ends of the pipeline; W has none."""
    slices, bounds = (64, 128), (0, 3, 6, 10)
    quiet, handled = (SlicedUnits(ToyCosts(handling=each), slices) for each in (0.0, 0.25))
    for op in (Op.F, Op.B, Op.I):
        more = handled.stage_seconds(op, bounds) - quiet.stage_seconds(op, bounds)
        np.testing.assert_allclose(more, [[16, 32], [32, 64], [16, 32]])
        np.testing.assert_allclose(handled.stage_seconds(op, (0, 10)), quiet.stage_seconds(op, (0, 10)))
    np.testing.assert_allclose(handled.stage_seconds(Op.W, bounds), quiet.stage_seconds(Op.W, bounds))


@pytest.mark.more
def test_a_heavy_head_gets_fewer_layers_beside_it_than_equal_layers_would() -> None:
    light, heavy = (find_joint_plan(problem(costs=ToyCosts(head=head))) for head in (0.1, 3.0))
    assert light.seconds / light.ideal < 1.1
    by_rank = [0.0, 0.0]
    for rank, layers in zip(heavy.schedule.placement, heavy.partition, strict=True):
        by_rank[rank] += layers
    assert by_rank[heavy.schedule.placement[-1]] < by_rank[heavy.schedule.placement[0]]


def test_it_beats_equal_stages_and_slices_in_their_best_order() -> None:
    task = problem()
    plan = find_joint_plan(task)
    equal = SlicedUnits(task.costs, (64,) * 8).table((0, 5, 10))
    assert plan.seconds < simulate(find_order([0, 1], 1, 8, equal), equal).makespan


@pytest.mark.more
def test_the_same_problem_gives_the_same_plan() -> None:
    assert find_joint_plan(problem()) == find_joint_plan(problem())


@pytest.mark.more
def test_more_ranks_and_microbatches() -> None:
    plan = find_joint_plan(problem(num_ranks=3, num_microbatches=3))
    validate(plan.schedule)
    assert plan.schedule.num_microbatches == 3
    assert set(plan.schedule.placement) == {0, 1, 2}


@pytest.mark.more
def test_a_memory_limit_is_kept() -> None:
    task = problem(num_microbatches=4)
    free = find_joint_plan(task)
    peak = max(_peaks(task, free))
    limited = find_joint_plan(problem(num_microbatches=4, memory_limit=0.6 * peak))
    assert max(_peaks(task, limited)) <= 0.6 * peak
    assert limited.seconds >= free.bound


@pytest.mark.more
def test_forwards_run_again_where_nothing_else_fits() -> None:
    plan = find_joint_plan(problem(memory_limit=25_000))
    assert plan.recompute != "none"
    assert "computed again" in plan.table()


def account(task: JointProblem, more: float) -> MemoryAccount:
    """Counts what the search does, and some bytes more for each stage and slice of a rank, as messages take."""

    def peaks(partition: tuple[float, ...], slices: tuple[int, ...], schedule: Schedule, again: str) -> list[float]:
        units = SlicedUnits(task.costs, slices, again)
        bounds = _bounds(task, partition)
        ranks = schedule.placement
        held = simulate(schedule, units.table(bounds)).peak_memory + np.bincount(ranks, np.diff(bounds) * 1000.0)
        computed = [max(units.computed_again(bounds)[np.array(ranks) == rank]) for rank in range(task.num_ranks)]
        total: Floats = held + computed + more * len(slices) * np.bincount(ranks)
        return [float(each) for each in total]

    return peaks


@pytest.mark.more
@pytest.mark.parametrize("share", [0.97, pytest.param(0.6, marks=pytest.mark.more)])
def test_the_account_decides_what_fits(share: float) -> None:
    """It holds more than the search knows of; backwards are split under a limit, too."""
    task = problem(num_microbatches=4)
    counted = account(task, 700.0)
    free = find_joint_plan(task)
    limit = share * max(counted(free.partition, free.slices, free.schedule, "none"))
    plan = find_joint_plan(problem(num_microbatches=4, memory_limit=limit, account=counted))
    for each in (plan, *plan.rejected):
        assert max(counted(each.partition, each.slices, each.schedule, each.recompute)) <= limit
    assert plan.seconds >= free.bound
    assert Op.W in plan.schedule.ops


@pytest.mark.more
def test_what_would_fit_is_said_where_nothing_does() -> None:
    counted = account(problem(), 700.0)
    with pytest.raises(
        OutOfMemoryError, match=r"limit=3000 bytes.*The least that was found is .* on rank \d.*more ranks"
    ) as why:
        find_joint_plan(problem(memory_limit=3000, account=counted))
    least = int(re.findall(r"Give memory.limit=(\d+)", str(why.value))[0])
    plan = find_joint_plan(problem(memory_limit=least, account=counted))
    assert max(counted(plan.partition, plan.slices, plan.schedule, plan.recompute)) <= least


def _peaks(task: JointProblem, plan: JointPlan) -> list[float]:
    """The bytes of weights and of activations that each rank holds at most."""
    bounds = _bounds(task, plan.partition)
    timeline = simulate(plan.schedule, SlicedUnits(task.costs, plan.slices).table(bounds))
    state = np.bincount(plan.schedule.placement, np.diff(bounds) * 1000.0)
    return [float(a + b) for a, b in zip(timeline.peak_memory, state, strict=True)]


def _bounds(task: JointProblem, partition: tuple[float, ...]) -> tuple[int, ...]:
    ends = np.cumsum([2 * count for count in partition]).astype(int) + 1
    return (0, *ends[:-1].tolist(), task.num_units)


@pytest.mark.more
def test_the_table_says_what_was_compared() -> None:
    plan = find_joint_plan(problem())
    lines = plan.table().splitlines()
    assert lines[0].split() == ["stages", "on", "ranks", "layers", "slices", "step", "over", "ideal"]
    assert len(lines) >= 1 + 1 + len(plan.rejected)
    assert plan.exact is not None
    assert plan.exact.seconds >= plan.seconds
    assert plan.exact.schedule.placement == plan.schedule.placement
    assert "dynamic program" in lines[-1]


def test_slices_are_as_long_as_is_allowed_even_where_that_makes_them_many() -> None:
    task = problem(seq_len=64 * 40 + 10, longest_slice=70, effort=3e5)
    plan = find_joint_plan(task)
    assert len(plan.slices) == 41
    assert max(plan.slices) == 64
    many = SlicedUnits(task.costs, (64,) * 40 + (10,)).unit_work().sum() / 2
    assert plan.ideal == pytest.approx(many)
    with pytest.raises(SlipstreamError, match=r"longest_slice=63.*granularity=64"):
        find_joint_plan(problem(longest_slice=63))


@dataclass(frozen=True)
class SteepCosts(ToyCosts):
    """Longer slices cost more for each of their tokens, as where they outgrow a cache."""

    def seconds(self, op: Op, lengths: Ints, contexts: Ints) -> tuple[Floats, Floats]:
        units, fixed = super().seconds(op, lengths, contexts)
        return units * (1 + lengths / 64), fixed


def test_no_plan_is_shorter_than_the_ideal() -> None:
    plan = find_joint_plan(problem(costs=SteepCosts(overhead=0.0), effort=1e6))
    assert len(plan.slices) > 1
    for each in (plan, *plan.rejected):
        assert each.ideal == plan.ideal <= each.seconds


@pytest.mark.more
def test_the_slices_of_the_dynamic_program_are_no_more_than_are_allowed() -> None:
    plan = find_joint_plan(problem(num_ranks=4, seq_len=4096, most_slices=5, costs=ToyCosts(overhead=0.01), effort=1e6))
    assert plan.exact is not None
    assert len(plan.exact.slices) <= 5


def test_the_finals_prefer_what_is_shorter_in_its_best_order() -> None:
    """The quick orders, by which candidates are improved, would choose another."""
    task = problem(costs=ToyCosts(num_layers=6, head=2.0), seq_len=1024, effort=2e7)
    searches = [PlacementSearch(task, (0, 1, 0, 1), False, lambda used: None)]
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
    shares: list[float] = []
    find_joint_plan(problem(effort=3e5), shares.append)
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] <= 1


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
    units = SlicedUnits(costs, tuple(slices))
    table = units.table(bounds)
    found = find_order(placement, microbatches, len(slices), table, effort=2e5)
    seconds = {op: units.stage_seconds(op, bounds) for op in OPS}
    least = np.max(rank_bounds(seconds, np.array(placement), [0], units.message_seconds, microbatches))
    quick = min(QuickOrder(placement, microbatches, len(slices), True).seconds(units, bounds).values())
    best = simulate(found, table).makespan
    assert least <= best * (1 + 1e-9)
    assert least * (1 - 1e-9) <= quick <= 2 * best
