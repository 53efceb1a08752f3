"""No partition of layers into stages is better than the one chosen; nor is one that makes up for a slow rank."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest
from benchmarks.gpipe.balance import block_partition
from hypothesis import given
from hypothesis import strategies as st

from slipstream import SlipstreamError, partition_layers
from slipstream.cost import NO_LINK
from slipstream.planner.joint import SlicedUnits
from slipstream.planner.joint.slowed_step import SlowedStep
from slipstream.schedule import make_schedule
from support.plain_costs import PlainCosts

LOOP = (0, 1, 0, 1)
V = (0, 1, 1, 0)


def stage_sums(values: Sequence[float], counts: Sequence[int]) -> list[float]:
    bounds = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return [sum(values[a:b]) for a, b in pairwise(bounds)]


def rank_sums(values: Sequence[float], counts: Sequence[int], placement: Sequence[int]) -> list[float]:
    sums = [0.0] * (max(placement) + 1)
    for rank, value in zip(placement, stage_sums(values, counts), strict=True):
        sums[rank] += value
    return sums


def every_partition(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for cut in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(b - a for a, b in pairwise((0, *cut, num_layers)))


def value(costs: Sequence[float], counts: Sequence[int], placement: Sequence[int]) -> tuple[float, ...]:
    """What is minimised: the largest, the variance but for constants, then the stages' own variance."""
    ranks, stages = rank_sums(costs, counts, placement), stage_sums(costs, counts)
    return max(ranks), sum(cost**2 for cost in ranks), sum(cost**2 for cost in stages)


@pytest.mark.parametrize("has_several", [False, True])
@given(data=st.data())
def test_min_max_then_min_variance(has_several: bool, data: st.DataObject) -> None:
    """Of the ranks, and then of the stages, of which a rank may have several; the ends' costs count."""
    costs = data.draw(st.lists(st.integers(0, 9), min_size=3 if has_several else 1, max_size=10))
    one_each = st.integers(1, len(costs)).map(lambda num_stages: tuple(range(num_stages)))
    several = st.sampled_from([LOOP, V, (0, 1, 2, 0, 1, 2), (0, 1, 0)]).filter(lambda each: len(each) <= len(costs))
    placement = data.draw(several if has_several else one_each)
    given_placement = None if placement == tuple(range(len(placement))) else placement
    embedding, head = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))
    found = partition_layers(costs, len(placement), embedding=embedding, head=head, placement=given_placement)
    assert sum(found) == len(costs)
    assert min(found) >= 1
    with_ends = list(costs)
    with_ends[0] += embedding
    with_ends[-1] += head
    every = every_partition(len(costs), len(placement))
    assert value(with_ends, found, placement) == min(value(with_ends, counts, placement) for counts in every)


@given(st.data())
def test_memory_is_a_hard_limit(data: st.DataObject) -> None:
    layers = data.draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=4, max_size=8))
    costs, sizes = [cost for cost, _ in layers], [size for _, size in layers]
    placement = data.draw(st.sampled_from([(0, 1, 2, 3), (0, 1, 2), LOOP, V]))
    num_ranks = max(placement) + 1
    limits = data.draw(st.lists(st.integers(1, 40), min_size=num_ranks, max_size=num_ranks))
    every = list(every_partition(len(costs), len(placement)))
    lacks = {
        counts: max(a - b for a, b in zip(rank_sums(sizes, counts, placement), limits, strict=True)) for counts in every
    }
    fitting = [counts for counts in every if lacks[counts] <= 0]
    if fitting:
        found = partition_layers(costs, len(placement), memory=sizes, memory_limit=limits, placement=placement)
        assert lacks[tuple(found)] <= 0
        best = min(value(costs, counts, placement) for counts in fitting)
        assert value(costs, found, placement) == best
        return
    with pytest.raises(SlipstreamError) as refused:
        partition_layers(costs, len(placement), memory=sizes, memory_limit=limits, placement=placement)
    if "alone" not in str(refused.value):
        assert f": {min(lacks.values()):g} too few" in str(refused.value)


@pytest.mark.parametrize(
    ("costs", "ends", "expected"),
    [([1, 1, 1, 1, 1, 1, 1, 3], {}, [5, 3]), ([1] * 8, {"head": 2}, [5, 3]), ([1] * 8, {"embedding": 2}, [3, 5])],
)
def test_heavy_ends_get_fewer_layers(costs: list[float], ends: dict[str, float], expected: list[int]) -> None:
    assert partition_layers(costs, 2, **ends) == expected


def test_placement_decides_whose_head_it_is() -> None:
    loop = partition_layers([2] * 8, 4, head=2, placement=LOOP)  # the head's rank, 1, gets 3 layers or 4
    assert max(rank_sums([2] * 7 + [4], loop, LOOP)) == 10
    v = partition_layers([2] * 8, 4, head=4, placement=V)
    assert rank_sums([2] * 7 + [6], v, V) == [10, 10]


def test_many_layers_and_stages() -> None:
    """80 equal layers on 16 ranks of 4 stages, loop: even to the layer though not every label is kept."""
    placement = tuple(stage % 16 for stage in range(64))
    assert rank_sums([1] * 80, partition_layers([1] * 80, 64, placement=placement), placement) == [5] * 16
    costs = [random.Random(0).randint(50, 99) for _ in range(120)]
    one_each = partition_layers(costs, 16)
    by_rank = partition_layers(costs, 32, placement=[stage % 16 for stage in range(32)])
    assert max(rank_sums(costs, by_rank, [stage % 16 for stage in range(32)])) <= max(stage_sums(costs, one_each))


def test_at_least_as_good_as_torchgpipes_method_on_500_random_models() -> None:
    draw = random.Random(7)
    gains = []
    for _ in range(500):
        num_layers = draw.randint(4, 48)
        num_stages = draw.randint(2, min(8, num_layers))
        costs = [draw.uniform(0.5, 2) if draw.random() < 0.8 else draw.uniform(2, 6) for _ in range(num_layers)]
        if draw.random() < 0.5:
            costs = [1.0] * num_layers
            costs[-1] += draw.uniform(0, 4)
        theirs = max(stage_sums(costs, block_partition(costs, num_stages)))
        ours = max(stage_sums(costs, partition_layers(costs, num_stages)))
        assert ours <= theirs * (1 + 1e-12)
        gains.append(theirs / ours)
    assert sum(gains) / len(gains) > 1.02  # that method is worth beating


def test_memory_may_depend_on_the_stage() -> None:
    in_flight = [[4.0] * 6, [2.0] * 6, [1.0] * 6]  # 1F1B: earlier stages keep more microbatches
    assert partition_layers([1] * 6, 3, memory=in_flight, memory_limit=8) == [2, 2, 2]
    assert partition_layers([1] * 6, 3, memory=in_flight, memory_limit=[4, 8, 8]) == [1, 2, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_stages": 0}, r"0 stages for 3 layers: .* Use 1 to 3 stages"),
        ({"num_stages": 4}, r"4 stages for 3 layers: .* Use 1 to 3 stages"),
        ({"head": -1}, "give finite numbers of 0 or more"),
        ({"placement": [0]}, r"placement=\[0\] for 2 stages"),
        ({"placement": [0, 2]}, r"with ranks 0, 1, \.\.\. that all have a stage"),
        ({"memory": [1, 1, 1]}, "give memory and memory_limit together"),
        ({"memory": [1, 1], "memory_limit": 1}, r"memory has shape \(2,\): .* each of 3 layers"),
        ({"memory": [1, 1, 1], "memory_limit": [1, 1, 1]}, "one number for each of 2"),
        ({"memory": [5, 9, 5], "memory_limit": [7, 8]}, "Layer 1 alone needs 9 bytes, but there are 8: 1 too few"),
        (
            {"memory": [5, 5, 5], "memory_limit": 8},
            r"At best rank \d \(stage \d: layers \d to \d\) needs 10 bytes and has 8: 2 too few\. Use more ranks",
        ),
    ],
)
def test_bad_input_is_explained(options: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"costs": [1, 1, 1], "num_stages": 2, **options}
    with pytest.raises(SlipstreamError, match=message):
        partition_layers(**arguments)  # type: ignore[arg-type]


SLICES = (48, 32, 48)


@pytest.mark.parametrize("units_per_layer", [1, 2])
@pytest.mark.parametrize(("num_ranks", "slowness"), [(2, {1: 1.6}), (3, {0: 2.0}), (3, {1: 1.4}), (3, {})])
def test_the_best_of_all_cuts(num_ranks: int, slowness: dict[int, float], units_per_layer: int) -> None:
    costs = PlainCosts(units_per_layer=units_per_layer)
    units = SlicedUnits(costs, SLICES, costs.link(2))
    step = SlowedStep(units, make_schedule("1f1b", num_ranks, 2, len(SLICES)), slowness)
    even = (12 / num_ranks,) * num_ranks
    cut, seconds = step.best_cut(even)
    ends = combinations([n / units_per_layer for n in range(1, 12 * units_per_layer)], num_ranks - 1)
    every = [tuple(b - a for a, b in pairwise((0, *inner, 12))) for inner in ends]
    assert seconds == pytest.approx(min(map(step.seconds, every)))
    assert step.seconds(cut) == seconds
    assert seconds <= step.seconds(even)
    for rank in slowness:
        assert cut[rank] < even[rank]
        assert seconds < step.seconds(even)


def test_a_slow_rank_takes_so_many_times_as_long() -> None:
    """Of a step that one rank computes next to nothing of, the time is that of the other."""
    units, schedule = SlicedUnits(PlainCosts(), SLICES, NO_LINK), make_schedule("gpipe", 2, 1, len(SLICES))
    fast, slow = (SlowedStep(units, schedule, {0: 1e-6, 1: each}).seconds((6, 6)) for each in (1.0, 3.0))
    assert slow == pytest.approx(3 * fast, rel=1e-3)
