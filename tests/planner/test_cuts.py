"""All slices that cuts offer keep to their rules; given slices that don't are refused with their place."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import SlipstreamError
from slipstream.planner.cuts import ANY_NUMBER, Cuts
from slipstream.planner.find_plan import find_plan
from slipstream.planner.joint import JointProblem
from slipstream.planner.plan import Plan
from slipstream.planner.ragged import StepProblem
from slipstream.planner.slicing.equal_stage_slicing import best_slicing, time_table
from support.examples import examples
from support.step_problems import rates


@st.composite
def rows(draw: st.DrawFn) -> tuple[Cuts, int]:
    """Draws cuts and the tokens of a row that may be cut so."""
    granularity = draw(st.sampled_from([1, 3, 16, 64]))
    longest = draw(st.none() | st.integers(granularity, 20 * granularity))
    most = draw(st.none() | st.integers(1, 12))
    return Cuts(granularity, longest, most_slices=most), draw(st.integers(1, 60 * granularity))


@examples(60)
@given(rows(), st.integers(1, 40), st.integers(1, 8), st.data())
def test_what_is_offered_keeps_to_the_rules(row: tuple[Cuts, int], count: int, few: int, data: st.DataObject) -> None:
    cuts, length = row
    places = cuts.places(length).tolist()
    assert places[0] == 0
    assert places[-1] == length
    even = cuts.even(length, count)
    assert len(even) == min(count, cuts.num_places(length))
    fewest = cuts.fewest(length)
    assert len(fewest) == cuts.counts(length)[0]
    assert cuts.allows(fewest)
    cuts.check(fewest, length)
    number = len(fewest)
    pairs = [(giver, taker) for giver in range(number) for taker in range(number) if giver != taker]
    changed = [*cuts.moved(fewest, few, pairs), *cuts.halved(fewest), *cuts.joined(fewest)]
    for slices in [even, fewest, *changed]:
        assert sum(slices) == length
        assert set(np.cumsum(slices).tolist()) <= {*places}
    for slices in changed:
        assert cuts.allows(slices)
        assert len(slices) in range(1, cuts.counts(length)[-1] + 1)
        assert max(slices) <= (cuts.longest_slice or length)
    fewer = data.draw(st.sampled_from([cuts.every(few), cuts.with_few_places(length, few)]))
    assert set(fewer.places(length).tolist()) <= {*places}
    assert fewer.longest(length) <= cuts.longest(length)


@examples(20)
@given(rows(), st.integers(1, 200))
def test_the_last_slice_is_long_enough_too(row: tuple[Cuts, int], shortest: int) -> None:
    cuts, length = replace(row[0], longest_slice=None, shortest_slice=min(shortest, row[1])), row[1]
    long = cuts.with_long_ends(length)
    assert min(np.diff(long.places(length))) >= cuts.shortest_slice


@examples(20)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=6), st.sampled_from([1, 64]))
def test_places_of_rows_are_those_of_each(lengths: list[int], granularity: int) -> None:
    cuts = Cuts(granularity)
    places, firsts = cuts.places_of_rows(np.array(lengths))
    for row, length in enumerate(lengths):
        assert places[firsts[row] : firsts[row + 1]].tolist() == cuts.places(length)[:-1].tolist()
        within = np.arange(length)
        assert cuts.place_from(within).tolist() == np.searchsorted(cuts.places(length), within).tolist()


@examples(15)
@given(rows(), st.integers(1, 4))
def test_the_dynamic_program_keeps_to_the_longest_and_the_shortest(row: tuple[Cuts, int], shortest: int) -> None:
    cuts = replace(row[0], shortest_slice=min(shortest, row[0].granularity, row[1]))
    cuts = cuts.with_long_ends(row[1]) if cuts.longest_slice is None else replace(cuts, shortest_slice=1)
    slices = best_slicing(time_table([lambda i, j: 5 + 1.0 * i + 0.01 * i * j], row[1], cuts), 4).slices
    assert cuts.allows(slices)


@pytest.mark.parametrize(("length", "longest"), [(64 * 300 + 33, None), (64 * 270, 64), (64 * 270, 150)])
def test_long_rows_are_cut_at_places_too(length: int, longest: int | None) -> None:
    """The dynamic program has fewer places there, at most as far apart as a slice may be long."""
    cuts = Cuts(longest_slice=longest)
    plan = find_plan(JointProblem(rates(2), length, 2, cuts=cuts, effort=1e4))
    for each in (plan, plan.exact):
        assert each is not None
        assert cuts.allows(each.slices)


GIVEN = partial(JointProblem, rates(2), 512, 2)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Cuts(0), "granularity=0: give 1 or more"),
        (lambda: Cuts(most_slices=0), "most_slices=0"),
        (lambda: Cuts().places(0), "length=0: a row has 1 token or more"),
        (lambda: Cuts(64, 63).longest(100), r"longest_slice=63.*granularity=64"),
        (lambda: Cuts(64, shortest_slice=200).longest(100), r"shortest_slice=200.*at most 100"),
        (lambda: Cuts(64).nearest(128, [0.2, 0.5]), "num_slices=3 for 128 tokens at granularity 64: use 1 to 2"),
        (lambda: find_plan(GIVEN(given=Plan(slices=(256, 128)))), r"slices=\[256, 128\] add up to 384"),
        (
            lambda: find_plan(GIVEN(cuts=Cuts(longest_slice=128), given=Plan(slices=(128, 384)))),
            r"slices=\[128, 384\]: slice 1 has 384 tokens, but slices of a row of 512 have 1 to 128 here",
        ),
        (
            lambda: find_plan(GIVEN(cuts=Cuts(shortest_slice=100), given=Plan(slices=(50, 462)))),
            r"slice 0 has 50 tokens.*100 to 512",
        ),
        (
            lambda: StepProblem(
                (100, 200), rates(2), Plan(placement=(0, 1)), cuts=replace(ANY_NUMBER, longest_slice=64)
            ),
            "longest_slice=64, but the slices of sequences of different lengths take equal time",
        ),
    ],
)
def test_wrong_cuts_are_refused_by_name(make: object, named: str) -> None:
    assert callable(make)
    with pytest.raises(SlipstreamError, match=named):
        make()
