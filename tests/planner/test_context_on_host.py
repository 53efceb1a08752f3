"""With keys and values on the host, plans know its memory and what copies take beside computing."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from slipstream import SlipstreamError
from slipstream.cost import ContextOnHost, CountedCosts, CountedSource, HostMemorySpec, ModelCount, Work, load_cluster
from slipstream.cost.costs import Costs
from slipstream.planner.find_plan import find_plan
from slipstream.planner.plan import ONE_DEVICE, Plan
from slipstream.planner.search import ClusterProblem, PlanOptions, PlanSpace
from slipstream.profile import count_model
from slipstream.schedule import Op
from slipstream.simulator import MemoryKind
from support.architectures import ARCHITECTURES, llama
from support.small_clusters import SEQ_LEN, small_cluster, source

HOST = HostMemorySpec(bandwidth=50e9, latency=0.0, capacity=1e12, memory_bandwidth=1e11)


@cache
def large() -> ModelCount:
    """Two layers of Llama 3's 8B shape."""
    config = llama(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        num_hidden_layers=2,
        max_position_embeddings=2**20,
    )
    return count_model(config, 2**20, torch.bfloat16)


def attention_rate() -> CountedCosts:
    """Costs of a device whose attention computes 450 TFLOP/s, whatever the slice."""
    cluster = load_cluster("h100-dgx")
    flops = dict.fromkeys(cluster.device.flops, 900000000000000.0)
    device = replace(cluster.device, flops=flops, attention_efficiency=0.5, attention_curve=((1.0, 1.0),))
    return CountedCosts(large(), replace(cluster, device=device))


def waits(costs: Costs, length: int, context: int = 2**19) -> bool:
    """Returns whether a backward waits for the host's copies of the context."""
    work = Work(Op.I, np.array([length]), np.array([context]))
    own = np.outer(costs.each_context + costs.each_context_gradient, work.lengths) / HOST.bandwidth
    longer = ContextOnHost(costs, HOST).each_seconds(work) - costs.each_seconds(work) - own
    return bool((longer > 1e-9).any())


def test_copies_hide_behind_long_slices() -> None:
    """Keys and values of 8 heads of 128 in 16 bits come with float32 sums, which go back: 20,480 bytes a token for 2.5
    times the operations of 32 heads' scores with a slice's queries."""
    costs = attention_rate()
    shortest = next(length for length in range(1000, 8000, 100) if not waits(costs, length))
    assert 3500 < shortest < 5000
    assert not waits(costs, 16_000)


def test_a_forward_brings_keys_once_and_a_backward_their_sums_both_ways() -> None:
    costs = attention_rate()
    slow = replace_bandwidth(1e6)
    lengths, contexts = np.array([64, 64]), np.array([1024, 2048])
    keys, sums = costs.each_context, costs.each_context_gradient
    moved = {Op.F: keys, Op.R: keys, Op.I: keys + 2 * sums, Op.W: 0 * keys}
    own = {Op.F: 0 * keys, Op.R: keys, Op.I: keys + sums, Op.W: 0 * keys}
    for op, each in moved.items():
        seconds = ContextOnHost(costs, slow).each_seconds(Work(op, lengths, contexts))
        alone = costs.each_seconds(Work(op, lengths, 0 * contexts))
        expected = (np.outer(each, contexts) + np.outer(own[op], lengths)) / slow.bandwidth
        has_keys = keys > 0
        computed = costs.each_seconds(Work(op, lengths, contexts)) if op is Op.W else alone
        np.testing.assert_allclose(seconds[has_keys], (computed + expected)[has_keys])
        np.testing.assert_allclose(seconds[~has_keys], costs.each_seconds(Work(op, lengths, contexts))[~has_keys])


def replace_bandwidth(bandwidth: float) -> HostMemorySpec:
    return HOST._replace(bandwidth=bandwidth)


def test_a_window_fetches_what_it_covers() -> None:
    count = count_model(ARCHITECTURES["mistral, window of 7"], 64)
    costs = CountedCosts(count, load_cluster("h100-dgx"))
    windows = {call.window.width for part in count.of_kind for call in part.attentions}
    reach = costs.each_reach(np.array([0, 4, 60]))[costs.each_context > 0]
    (width,) = windows
    assert width is not None
    np.testing.assert_array_equal(reach, [[0, min(4, width - 1), width - 1]] * len(reach))


def test_a_plan_keeps_the_context_on_the_host_where_nothing_else_fits() -> None:
    """And says how much is there."""
    whole = source()
    problem = ClusterProblem(whole, SEQ_LEN, 8, PlanOptions(pipeline_parallel=1, tensor_parallel=1, recompute="stage"))
    space = PlanSpace(whole, SEQ_LEN, 8, problem.options)
    plans = [plan for _, size, plan in space.bounded() if size < np.inf]
    held = {
        place: min(max(space.evaluate(p).peaks()) for p in plans if p.context == place) for place in ("device", "host")
    }
    assert held["host"] < held["device"]
    limit = (held["host"] + held["device"]) / 2
    options = problem.options.changed(memory_limit=limit)
    report = find_plan(replace(problem, options=options))
    best = report.best
    assert best.plan.context == "host"
    assert best.peak_host_memory > 0
    assert "context on the host" in best.plan.describe()
    assert report.best.plan.dump()["memory"]["context"] == "host"
    with pytest.raises(SlipstreamError, match="nothing fits"):
        find_plan(replace(problem, options=options.changed(context="device")))


def test_a_share_of_the_context_may_be_asked_for() -> None:
    """A plan with half of it on the host holds less than without and takes less of the host than with all of it, and is
    written and read as it is."""
    whole = source()
    options = PlanOptions(pipeline_parallel=1, tensor_parallel=1, recompute="stage", context=("host", 0.5, "device"))
    space = PlanSpace(whole, SEQ_LEN, 8, options)
    assert space.contexts == ("device", 0.5, "host")
    by_place = {place: space.with_context(place) for place in space.contexts}
    plan = next(plan for _, size, plan in by_place["device"].bounded() if size < np.inf and plan.num_slices > 2)
    device, half, host = (by_place[place].evaluate(replace(plan, context=place)) for place in space.contexts)
    assert max(host.peaks()) < max(half.peaks()) < max(device.peaks())
    assert max(device.host_peaks()) == 0 < max(half.host_peaks()) < max(host.host_peaks())
    assert device.seconds <= half.seconds <= host.seconds
    share = find_plan(ClusterProblem(whole, SEQ_LEN, 8, options.changed(context=0.5))).best.plan
    assert "context on the host (50%)" in share.describe()
    assert share.dump()["memory"]["context"] == 0.5
    assert Plan.load(share.dump()).context == 0.5


def test_a_share_copies_what_comes_first() -> None:
    """Of 1024 tokens with half on the host a slice at 768 brings 512, and one at 256 its own and the 256 before; of
    what is on the device nothing is brought."""
    costs, slow = attention_rate(), replace_bandwidth(1e6)
    lengths, contexts = np.array([64, 64]), np.array([256, 768])
    keys, sums = costs.each_context, costs.each_context_gradient
    has_keys = keys > 0
    seconds = ContextOnHost(costs, slow, 0.5, 1024).each_seconds(Work(Op.I, lengths, contexts))
    alone = costs.each_seconds(Work(Op.I, lengths, 0 * contexts))
    moved = np.outer(keys + 2 * sums, [256, 512]) + np.outer(keys + sums, [64, 0])
    np.testing.assert_allclose(seconds[has_keys], (alone + moved / slow.bandwidth)[has_keys])


def test_offloaded_activations_and_the_context_share_the_link() -> None:
    """Each of them takes as long as alone on a link of half the bandwidth, where both are on the host."""
    whole = source()
    both = PlanSpace(
        whole, SEQ_LEN, 8, PlanOptions(pipeline_parallel=1, tensor_parallel=1, context="host", offload=1.0)
    )
    plan = next(plan for _, size, plan in both.bounded() if size < np.inf and plan.num_slices > 2)
    alone = PlanSpace(whole, SEQ_LEN, 8, PlanOptions())
    alone.host = both.host and both.host.halved()
    assert alone.host is not None
    here = both.evaluate(plan)
    offloaded = alone.evaluate(replace(plan, context="device"))
    context = alone.evaluate(replace(plan, offload=0.0))
    assert here.cost.copies == pytest.approx(offloaded.cost.copies)
    for op, seconds in context.times.compute.items():
        np.testing.assert_array_equal(here.times.compute[op], seconds)
    assert both.evaluate(replace(plan, offload=0.0)).times.compute[Op.B].sum() < here.times.compute[Op.B].sum()


@pytest.mark.more
def test_orders_are_searched_with_keys_and_values_on_the_host_too() -> None:
    """Where nothing else fits, and no named schedule is allowed."""
    options = PlanOptions(pipeline_parallel=2, tensor_parallel=1, context_parallel=1, recompute="stage", offload=0.0)
    space = PlanSpace(source(), SEQ_LEN, 8, options.changed(context="device"))
    least = min(max(space.evaluate(plan).peaks()) for _, size, plan in space.bounded() if size < np.inf)
    limited = options.changed(memory_limit=0.97 * least, schedule="auto", slicing=("auto", "equal-time"))
    best = find_plan(ClusterProblem(source(), SEQ_LEN, 8, limited)).best
    assert (best.plan.context, best.plan.schedule_name) == ("host", "auto")
    assert best.peak_memory <= limited.memory_limit


def test_a_full_host_is_no_room() -> None:
    cluster = small_cluster()
    device = replace(cluster.device, host_memory=1.0)
    small: CountedSource = source(cluster=replace(cluster, device=device))
    space = PlanSpace(small, SEQ_LEN, 8, PlanOptions(context="host", offload=0.0))
    _, _, plan = next(iter(space.bounded()))
    assert max(space.evaluate(plan).peaks()) < space.memory
    assert not space.fits(space.evaluate(plan))


def test_plans_keep_to_a_limit_on_the_host() -> None:
    """As to one of the device."""
    mesh = {"pipeline_parallel": 1, "tensor_parallel": 1, "context_parallel": 1, "microbatch_size": 2}
    options = PlanOptions(**mesh, recompute="none", offload=0.0, context="host")
    problem = ClusterProblem(source(), SEQ_LEN, 8, options)
    best = find_plan(problem).best
    assert best.peak_host_memory == sum(best.host_memory[0].values()) == best.host_memory[0][MemoryKind.CONTEXT] > 1e6
    roomy, tight = (options.changed(host_memory_limit=share * best.peak_host_memory) for share in (1, 0.4))
    assert find_plan(replace(problem, options=roomy)).best.plan == best.plan
    with pytest.raises(SlipstreamError, match=r"on a host, .* more than the .* that may be used of a host for each"):
        find_plan(replace(problem, options=tight))


def test_the_default_is_the_device() -> None:
    assert ONE_DEVICE.context == "device"
    assert "context" not in ONE_DEVICE.dump().get("memory", {})
