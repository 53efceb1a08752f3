"""A heavy head is spread over a pipeline's ranks in the plans for described clusters, where training can do it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.search.test_search import SEQ_LEN, gpt, small_cluster, source
from slipstream.cost import AnalyticSource, Degrees, StageParts
from slipstream.errors import SlipstreamError
from slipstream.planner.plans import AUTO, Plan
from slipstream.planner.report import reasons
from slipstream.planner.search import search_plans
from slipstream.planner.search.plan_options import PlanOptions
from slipstream.schedule import validate
from slipstream.simulator import MemoryKind
from support.parameters import first_of

HEAVY = gpt(num_layers=6, hidden=64, heads=4, vocab=8192)
CAN = AnalyticSource(HEAVY, small_cluster(), "small", refusals={})
OPTIONS = PlanOptions(
    pipeline_parallel=(4,),
    schedule=("1f1b", AUTO),
    recompute=("none",),
    offload=(0.0,),
    microbatch_size=(1,),
    memory_limit=1e12,
    num_simulated=4,
)


def planned(**options: Any) -> Plan:
    return search_plans(CAN, SEQ_LEN, 4, options=replace(OPTIONS, **options))


@pytest.mark.parametrize("tied", first_of([True, False]))
def test_a_heavy_head_is_spread(tied: bool) -> None:
    """All ranks together then hold as much as with a whole head, and each has its part of it; of tied weights there is
    one copy less."""
    model = replace(HEAVY, tied=tied)
    can = AnalyticSource(model, small_cluster(), "small", refusals={})
    spread = search_plans(can, SEQ_LEN, 4, options=OPTIONS)
    whole = search_plans(source(model), SEQ_LEN, 4, options=OPTIONS).best
    best = spread.best
    assert (best.configuration.vocabulary, whole.configuration.vocabulary) == ("spread", "whole")
    assert best.step_seconds < 0.95 * whole.step_seconds
    assert any("vocabulary whole instead of spread" in line for line in reasons(spread))
    validate(spread.schedule)
    assert spread.schedule.spreads_embedding == tied
    after = best.step_seconds - spread.timeline.makespan
    assert after == pytest.approx(best.seconds_by_cause["optimizer"])
    costs = can.costs(Degrees(), 1)
    number = costs.num_parameters(StageParts(0, len(can.parts)))
    for kind, each in ((MemoryKind.PARAMETERS, 2), (MemoryKind.OPTIMIZER, 12)):
        assert sum(rank[kind] for rank in whole.memory) == pytest.approx(each * number)
        held = number - (model.head_weight if tied else 0)
        assert sum(rank[kind] for rank in best.memory) == pytest.approx(each * held)
        assert max(rank[kind] for rank in best.memory) < 0.7 * max(rank[kind] for rank in whole.memory)


@pytest.mark.more
def test_it_is_pinned_or_open() -> None:
    found, spread, whole = planned(), planned(vocabulary=("spread",)), planned(vocabulary=("whole",))
    assert {each.configuration.vocabulary for each in spread.predictions} == {"spread"}
    assert spread.best.step_seconds < 1.02 * found.best.step_seconds
    assert {each.configuration.vocabulary for each in whole.predictions} == {"whole"}
    assert whole.best.step_seconds > found.best.step_seconds


def test_where_it_cannot_be_planned() -> None:
    with pytest.raises(SlipstreamError, match="vocabulary=spread: it is planned together with cuts"):
        planned(vocabulary=("spread",), schedule=("1f1b",))
    with pytest.raises(SlipstreamError, match=r"vocabulary=spread can't be planned for small\. Counts don't say"):
        search_plans(source(HEAVY), SEQ_LEN, 4, options=replace(OPTIONS, vocabulary=("spread",)))


def test_no_head_is_spread_over_ranks_that_share_layers() -> None:
    plan = search_plans(CAN, SEQ_LEN, 4, options=replace(OPTIONS, pipeline_parallel=(2,), tensor_parallel=(2,)))
    assert {each.configuration.vocabulary for each in plan.predictions} == {"whole"}
