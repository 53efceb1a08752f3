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
from slipstream.errors import SlipstreamError
from slipstream.planner.find_plan import find_plan
from slipstream.planner.search import ClusterProblem, PlanOptions
from slipstream.planner.search.plan_space import PlanSpace
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


def test_on_the_host_it_leaves_weights_and_gradients_on_the_device() -> None:
    """48 GB of 8 billion parameters in bfloat16, as full training with its optimizer on the host is known to take."""
    away = Update(ADAMW, place="host")
    assert 8e9 * (away.held.weights + away.held.gradients + away.held.optimizer) == 48e9
    assert 8e9 * away.on_host == 128e9
    # moments and master weights there and back, the gradient, master weights again, and what the device gets of them
    assert away.moved_on_host == 2 * 12 + 4 + 4 + 2
    float32 = Update(StateBytes.of("float32"), place="host")
    assert (float32.on_host, float32.moved_on_host) == (8 + 4 + 4, 2 * (8 + 4) + 4 + 4 + 4)
    assert Update(ADAMW).on_host == 0


@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_on_the_host_it_takes_the_link_and_the_hosts_memory(shard: str, model: ModelCount) -> None:
    """A sharded one copies, keeps and updates a replica's part."""
    options = PlanOptions(schedule=("1f1b",), pipeline_parallel=(2,), tensor_parallel=(1,), expert_parallel=(1,))
    options = options.changed(context_parallel=(1,), shard=(shard,), num_slices=(1,), recompute=("none",), offload=0.0)
    source = CountedSource(model, load_cluster("h100-dgx").with_nodes(1), "a model")
    device, host = (
        find_plan(ClusterProblem(source, 256, 8, options=options.changed(optimizer=place))).best
        for place in ("device", "host")
    )
    assert device.plan.differences(host.plan) == ["optimizer"]
    assert host.plan.describe() == device.plan.describe().replace(
        ", optimizer state", ", optimizer on the host, optimizer state"
    ) + (", optimizer on the host" if shard == "none" else "")
    space = PlanSpace(source, 256, 8, options)
    evaluation = space.evaluate(host.plan)
    optimized = evaluation.cut.per_rank(
        evaluation.cut.per_stage(lambda stage: evaluation.cut.costs.num_optimized(stage, evaluation.update))
    )
    assert max(evaluation.host_peaks()) == pytest.approx(16 * max(optimized))
    assert max(space.evaluate(device.plan).host_peaks()) == 0
    assert all(MemoryKind.OPTIMIZER not in of_rank for of_rank in host.memory)
    rates = source.host
    gradients, weights, rule = space.tails(host.plan)
    before = space.tails(device.plan)
    np.testing.assert_allclose(gradients - before[0], rates.latency + 4 * optimized / rates.bandwidth, rtol=1e-9)
    np.testing.assert_allclose(weights - before[1], rates.latency + 2 * optimized / rates.bandwidth, rtol=1e-9)
    np.testing.assert_allclose(rule, 34 * optimized / rates.memory_bandwidth, rtol=1e-9)
    assert host.step_seconds > device.step_seconds


def test_it_goes_to_the_host_where_that_is_asked_for_or_nothing_else_fits(model: ModelCount) -> None:
    cluster = load_cluster("h100-dgx").with_nodes(1)
    small = replace(cluster, devices_per_node=1, device=replace(cluster.device, memory=1.2e6))
    source, options = CountedSource(model, small, "a model"), PlanOptions(recompute=("full",))
    assert {plan.optimizer for _, _, plan in PlanSpace(source, 256, 8, PlanOptions()).bounded()} == {"device"}
    with pytest.raises(SlipstreamError, match=r"The cheapest change that would fit: allow optimizer=host\."):
        find_plan(ClusterProblem(source, 256, 8, options=options))
    assert find_plan(ClusterProblem(source, 256, 8, options=options.changed(optimizer="host"))).best.plan.optimizer
    full = replace(small, device=replace(small.device, host_memory=1e6))
    with pytest.raises(SlipstreamError, match=r"on a host, .* more than the 1\.00 MB that a host has for each device"):
        find_plan(
            ClusterProblem(CountedSource(model, full, "a model"), 256, 8, options=options.changed(optimizer="host"))
        )
    with pytest.raises(SlipstreamError, match="optimizer='host' with shard='parameters', which no training can"):
        PlanSpace(source, 256, 8, PlanOptions(optimizer="host", shard=("optimizer", "parameters")))


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
