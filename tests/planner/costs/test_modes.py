"""What changes costs leaves all else as it is, and those changes that must commute do."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial, reduce
from itertools import permutations

import numpy as np
import pytest
import torch
from benchmarks.golden_plans.answers import _profile

from slipstream.cost import (
    ANY_HOST,
    LONE_UPDATE,
    ContextOnHost,
    Costs,
    CountedCosts,
    CountedOperations,
    Degrees,
    MeasuredCosts,
    Mode,
    ModelCount,
    WithoutHead,
    WithoutLookups,
    Work,
    load_cluster,
    profile_behind,
    with_context,
    with_context_gradients,
)
from slipstream.cost.counted_parts import CountedParts
from slipstream.planner.cuts import Cuts
from slipstream.planner.joint import Tabulated
from slipstream.planner.ragged import StageRates
from slipstream.profile import count_model
from slipstream.schedule import Op
from support.architectures import ARCHITECTURES

SEQ_LEN = 128
DEGREES = (Degrees(), Degrees(2, 2, 1), Degrees(2, 2, 2, "keys"))


@cache
def counted() -> ModelCount:
    return count_model(ARCHITECTURES["mixtral"], 64)


@pytest.mark.parametrize("degrees", DEGREES)
def test_modes_of_what_is_elsewhere_commute(degrees: Degrees) -> None:
    """What a part costs is the same whichever of them is applied first. Who shares the work, and what is trained, come
    before all of them; the update comes after."""
    costs = CountedCosts(counted(), load_cluster("h100-dgx"), degrees)
    modes = (
        WithoutHead,
        WithoutLookups,
        partial(ContextOnHost, host=ANY_HOST._replace(bandwidth=5e10)),
        partial(Tabulated, seq_len=SEQ_LEN, cuts=Cuts(1)),
    )
    update = replace(LONE_UPDATE, copies=4, shard="optimizer")
    work = Work.of_slices(Op.B, (SEQ_LEN // 2, SEQ_LEN // 2))

    def told(wrapped: Costs) -> list[np.ndarray]:
        parts = list(wrapped.parts)
        numbers = [each[parts] for each in wrapped.each_number]
        times = [wrapped.each_seconds(work)[parts], wrapped.fixed_seconds(work)]
        kept = [update.optimized(wrapped.each_number, wrapped.divided)[parts], wrapped.each_weight(2)[parts]]
        whole = range(wrapped.num_layers)
        after = [wrapped.gradient_seconds(whole, update), wrapped.optimizer_step_seconds(whole, update)]
        of_keys = [wrapped.each_context[parts], wrapped.each_context_gradient[parts]]
        return [*times, *numbers, *kept, *of_keys, wrapped.each_activation(work.lengths)[parts], np.array(after)]

    orders = [told(reduce(lambda inner, mode: mode(inner), order, costs)) for order in permutations(modes)]
    plain = told(costs)
    for order in orders:
        for one, other in zip(orders[0], order, strict=True):
            np.testing.assert_array_equal(one, other)
        assert not order[0][-1].any()  # the head takes no time
        assert not order[7].any()  # the device has no keys
        assert order[2][0] < plain[2][0]  # the embedding has fewer parameters


@pytest.mark.parametrize("kind", ["measured", "counted"])
def test_gradients_in_the_type_of_keys_are_as_large_as_these(kind: str) -> None:
    """Of a counted model in bfloat16 half of what float32 takes; on the host they take nothing of the device."""
    costs: Costs = MeasuredCosts(_profile("llama"))
    if kind == "counted":
        costs = CountedOperations(count_model(ARCHITECTURES["mixtral"], 64, torch.bfloat16), DEGREES[0], 1)
    narrow = with_context_gradients(costs, "model")
    np.testing.assert_array_equal(narrow.each_context, costs.each_context)
    np.testing.assert_array_equal(
        narrow.each_context_gradient, np.minimum(costs.each_context, costs.each_context_gradient)
    )
    if kind == "counted":
        np.testing.assert_array_equal(costs.each_context_gradient, 2 * narrow.each_context_gradient)
        assert narrow.each_context_gradient.any()
    on_host = with_context(narrow, "host", ANY_HOST)
    assert not on_host.each_context.any()
    assert not on_host.each_context_gradient.any()
    assert on_host.host_context is narrow


def test_a_mode_passes_on_whatever_a_kind_of_costs_states() -> None:
    """Else a mode would answer by the defaults of `Costs` where the costs that it wraps know better."""
    kinds = (CountedParts, CountedCosts, CountedOperations, MeasuredCosts, StageRates)
    stated = {name for kind in kinds for name in vars(kind)}
    asked = {name for name in dir(Costs) if not name.startswith("_")}
    derived = {"num_kinds", "each_has_backward", "num_layers"}
    assert (stated & asked) - vars(Mode).keys() - derived == set()


@pytest.mark.parametrize("kind", ["measured", "counted"])
def test_a_search_asks_costs_what_it_may_take_for_granted(kind: str) -> None:
    """Whatever wraps them: of measured times slices may be faster, and they know their profile; of counted ones where
    keys are gathered the last rank's part of a sequence is uneven."""
    costs: Costs = MeasuredCosts(_profile("llama"))
    if kind == "counted":
        costs = CountedCosts(counted(), load_cluster("h100-dgx"), DEGREES[2])
    wrapped = WithoutLookups(Mode(costs))
    asked = ("is_tied", "whole_is_least", "deserves_table", "degrees", "divided")
    for name in asked:
        assert getattr(wrapped, name) == getattr(costs, name)
    assert wrapped.least_seconds(SEQ_LEN) == costs.least_seconds(SEQ_LEN)
    assert not isinstance(costs, MeasuredCosts) or profile_behind(wrapped) is costs.profile
