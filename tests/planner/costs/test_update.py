"""The update that ends a step takes what its rule moves, and a rank keeps its part of what the rule keeps."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from slipstream.cost import (
    CountedCosts,
    CountedSource,
    Degrees,
    ModelCount,
    StateBytes,
    Update,
    divided_by,
    load_cluster,
    possible_shards,
)
from slipstream.cost.update import refused_shards
from slipstream.planner.find_plan import find_plan
from slipstream.planner.search import ClusterProblem, PlanOptions
from slipstream.profile import count_model
from slipstream.simulator import MemoryKind
from support.architectures import ARCHITECTURES

ADAMW = StateBytes.of("bfloat16")
MOMENTUM = replace(ADAMW, optimizer=ADAMW.optimizer - 4)  # a moment less


@pytest.fixture(scope="module")
def model() -> ModelCount:
    return count_model(ARCHITECTURES["mixtral"], 64, torch.bfloat16)


def test_a_rank_keeps_its_part_of_the_state(model: ModelCount) -> None:
    """All ranks with the same weights together keep the state of each parameter once."""
    for degrees, copies in product((Degrees(), Degrees(2), Degrees(1, 2), Degrees(2, 2, 2)), (2, 4)):
        costs = CountedCosts(model, load_cluster("h100-dgx"), degrees)
        whole = range(len(model.kinds))
        update = Update(ADAMW, copies, "optimizer")
        held = costs.num_optimized(whole, update)
        number = costs.num_parameters(whole)
        in_experts = float(costs.count(whole) @ costs.each_number.trained_in_experts)
        assert copies * held == pytest.approx(number + (degrees.experts - 1) * in_experts)
        assert costs.num_optimized(whole, Update(ADAMW, copies)) == number == costs.num_trained(whole)


def test_rows_of_sharded_parameters_are_master_weights_or_lie_beside_the_whole_ones() -> None:
    float32 = StateBytes.of("float32")
    for shard, optimizer in (("none", 8), ("optimizer", 8), ("parameters", 8 + 4)):
        assert Update(float32, 2, shard).held == replace(float32, optimizer=optimizer)
        assert Update(ADAMW, 2, shard).held == ADAMW


def test_what_can_be_sharded(model: ModelCount) -> None:
    """Parameters that ranks have cut already aren't sharded too, nor are tied ones."""
    assert possible_shards(1, divided_by(Degrees())) == ("none",)
    assert possible_shards(2, divided_by(Degrees(context=2, experts=2))) == ("optimizer", "none", "parameters")
    assert possible_shards(2, divided_by(Degrees(tensor=2))) == ("optimizer", "none")
    assert (refused_shards(model), *refused_shards(replace(model, tied=True))) == ({}, "shard")


def test_searches_follow_another_rule(model: ModelCount) -> None:
    """One with a moment less moves 8 bytes less, and keeps 4."""
    options = PlanOptions(schedule=("1f1b",), pipeline_parallel=(2,), tensor_parallel=(1,), shard=("none",))
    found = []
    for state in (ADAMW, MOMENTUM):
        source = CountedSource(model, load_cluster("h100-dgx").with_nodes(1), "a model")
        source.state = state
        found.append(find_plan(ClusterProblem(source, 256, 8, options=options)).best)
    adamw, momentum = found
    assert adamw.plan == momentum.plan
    seconds = [each.seconds_by_cause["optimizer"] for each in found]
    assert seconds[1] / seconds[0] == pytest.approx((2 * (2 + 8) + 4) / (2 * (2 + 12) + 4))
    for before, now in zip(adamw.memory, momentum.memory, strict=True):
        np.testing.assert_allclose(now[MemoryKind.OPTIMIZER] / before[MemoryKind.OPTIMIZER], 8 / 12)
