"""No configuration beats the plan, bounds hold, and what doesn't fit is refused."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import cache, partial
from itertools import islice, product

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream.cost import (
    Amount,
    AnalyticCosts,
    AnalyticSource,
    AttentionCall,
    AttentionWindow,
    Degrees,
    ModelCount,
    OpCount,
    PartCount,
    partition_of,
)
from slipstream.cost.cluster import Cluster, load_cluster, parse_cluster
from slipstream.cost.operation_counts import QUANTISED_BYTES
from slipstream.errors import SlipstreamError
from slipstream.model.adapters import Adapter, TrainedWeights
from slipstream.model.quantised import BasePrecision
from slipstream.planner.plans import Configuration, Mesh, Plan
from slipstream.planner.report import configuration_text, reasons
from slipstream.planner.search import bounds as search_bounds
from slipstream.planner.search import search_plans, simulated_configuration
from slipstream.planner.search.bounds import MemoryBound, NewestResults, PlacedPartition, ScheduleShape
from slipstream.planner.search.frontier import Frontier
from slipstream.planner.search.plan_options import PlanOptions
from slipstream.planner.search.plan_search import promising
from slipstream.planner.search.plan_space import PlanSpace
from slipstream.planner.search.simulated_configuration import SimulatedConfiguration, may_fit, predict
from slipstream.profile import count_model
from slipstream.schedule import COMMUNICATION, SCHEDULES, Op, make_schedule
from slipstream.schedule.lowering import add_reductions
from slipstream.simulator import MemoryKind, StageSlice, memory_of, simulate
from slipstream.simulator.memory_account import order_bytes
from support.adapters import lora
from support.architectures import llama
from support.examples import examples
from support.parameters import each_once, first_of
from support.pipelines import make_pipe

SEQ_LEN = 512
NAMED = ("equal-time", "exact")  # nothing that takes a joint search
PLAIN = PlanOptions(num_slices=(1,), recompute=("stage",), offload=(0.0,), shard=("none",))


def gpt(num_layers: int, hidden: int, heads: int, vocab: int = 51200, dtype: str = "float16") -> ModelCount:
    """A GPT as the papers count one: 12 h² weights a layer, four products, two matrices as wide as 4 h."""
    size = 2 if dtype == "float16" else 4

    def part(name: str, weights: float, activations: float, calls: tuple[AttentionCall, ...] = ()) -> PartCount:
        product = OpCount(
            flops=Amount(0, 2 * weights),
            matmul_bytes=Amount(size * weights, activations),
            wide_bytes=Amount(0, activations / 4),
            num_matmuls=6,
            num_kernels=20,
        )
        ops = {Op.F: product, Op.I: product, Op.W: product}
        return PartCount(name, int(weights), ops, calls, activations, activations / 2)

    call = AttentionCall(heads, heads, hidden // heads, hidden // heads, AttentionWindow())
    return ModelCount(
        kinds=(0,) * num_layers,
        layers=(part("layer", 12 * hidden**2, 17 * hidden * size, (call,)),),
        embedding=replace(part("embedding", 0, hidden * size), num_parameters=vocab * hidden),
        head=part("head", vocab * hidden, 2 * vocab * size),
        hidden_size=hidden,
        dtype=dtype,
        dtype_bytes=size,
    )


def with_frozen(model: ModelCount, num_frozen: int) -> ModelCount:
    """The model with the embedding and the first layers frozen, so that they have no backward."""

    def frozen(part: PartCount) -> PartCount:
        ops = {Op.F: part.ops[Op.F], Op.I: OpCount(), Op.W: OpCount()}
        calls = tuple(replace(call, has_gradient=False) for call in part.attentions)
        sizes = {"num_frozen": part.num_parameters, "activation_bytes": 0.0}
        return replace(part, ops=ops, attentions=calls, has_backward=False, **sizes)  # type: ignore[arg-type]

    (layer,), num_layers = model.layers, len(model.kinds)
    return replace(
        model,
        kinds=tuple(int(index >= num_frozen) for index in range(num_layers)),
        layers=(frozen(layer), layer),
        embedding=frozen(model.embedding),
    )


SMALL = gpt(num_layers=6, hidden=64, heads=4, vocab=512)
PARTLY = with_frozen(SMALL, 4)
MODELS = SMALL, PARTLY


def small_cluster(num_nodes: int = 2, devices_per_node: int = 2, memory: float = 1e9) -> Cluster:
    return parse_cluster(
        {
            "name": "small",
            "num_nodes": num_nodes,
            "devices_per_node": devices_per_node,
            "device": {
                "name": "thing",
                "flops": {"float16": 1e10},
                "memory": memory,
                "memory_bandwidth": 1e10,
                "kernel_seconds": 1e-6,
                "matmul_efficiency": 0.9,
            },
            "host": {"bandwidth": 1e9, "latency": 0, "efficiency": 1},
            "inside": {"bandwidth": 1e9, "latency": 1e-6},
            "between": {"bandwidth": 1e8, "latency": 1e-5, "shared_by": 2},
        }
    )


def source(model: ModelCount = SMALL, cluster: Cluster | None = None) -> AnalyticSource:
    return AnalyticSource(model, cluster or small_cluster(), "small")


def everything(space: PlanSpace) -> dict[Configuration, float]:
    """Every configuration that fits, simulated."""
    found = {}
    for _, _, configuration in space.bounded():
        prediction = predict(SimulatedConfiguration.of(space, configuration))
        if prediction.peak_memory <= space.memory and SimulatedConfiguration.of(space, configuration).fits():
            found[configuration] = prediction.step_seconds
    return found


@cache
def bounds(number: int) -> tuple[PlanSpace, list[tuple[float, float, Configuration]]]:
    slow = replace(small_cluster(), host=replace(small_cluster().host, bandwidth=1e7))
    model, cluster = ((MODELS[0], None), (MODELS[1], None), (MODELS[0], slow))[number]
    shard = ("none", "optimizer", "parameters")
    options = PlanOptions(stages_per_rank=(1, 2, 3), num_slices=(1, 2, 3, 4), shard=shard)
    space = PlanSpace(source(model, cluster=cluster), SEQ_LEN, 8, options)
    exact = PlanSpace(
        source(model, cluster=cluster), SEQ_LEN, 8, PlanOptions(stages_per_rank=(1, 2, 3), slicing=("exact",))
    )
    return space, [*space.bounded(), *exact.bounded()]


@examples(60)
@given(choice=st.integers(0, 10**9), number=st.integers(0, 2))  # 2: copies to the host take long
@example(choice=1988684, number=1)  # one microbatch, whose last slice no rank computes again
def test_no_simulation_beats_a_bound(choice: int, number: int) -> None:
    space, found = bounds(number)
    seconds, size, configuration = found[choice % len(found)]
    candidate = SimulatedConfiguration.of(space, configuration)
    prediction = predict(candidate)
    assert prediction.step_seconds >= seconds * (1 - 1e-9)
    mesh = Mesh.of(configuration)
    assert prediction.step_seconds >= space.least_seconds(mesh) * (1 - 1e-9)
    assert max(candidate.peaks()) >= space.mean_state(mesh) * (1 - 1e-9)
    assert max(candidate.peaks()) >= size * (1 - 1e-9) or size == float("inf")
    assert prediction.peak_memory == pytest.approx(max(candidate.peaks()), rel=1e-12)
    assert sum(prediction.seconds_by_cause.values()) == pytest.approx(prediction.step_seconds)
    assert min(prediction.seconds_by_cause.values()) >= -1e-12


def test_a_bound_has_the_copies_to_the_host_and_back() -> None:
    """A step that copies most of the time is little longer than its bound, which knows those that nothing can save."""
    space, found = bounds(2)
    exact = Configuration(1, 2, 2, 2, "v-min", 2, 1, "none", 1.0, "optimizer", "exact")
    bound, configuration = next((seconds, c) for seconds, _, c in found if replace(c, num_slices=1) == exact)
    assert 1 < predict(SimulatedConfiguration.of(space, configuration)).step_seconds / bound < 1.15


@pytest.mark.parametrize("number", [0, 1])
def test_the_most_promising_come_first(number: int) -> None:
    """Of all that may fit, and of those with another schedule, by the bounds that they have by themselves."""
    space, found = bounds(number)
    bound = {configuration: seconds for seconds, _, configuration in found if seconds}
    frontier = Frontier(space, lambda *_: None)
    first = [*frontier.starting(0)]
    assert [seconds for seconds, _ in first] == sorted(seconds for seconds, _ in first)
    assert all(bound.get(configuration, seconds) == seconds for seconds, configuration in first)
    others = [*islice(frontier.others("schedule", "1f1b"), 100)]
    assert "1f1b" not in {configuration.schedule for configuration in others}
    assert [bound[c] for c in others if c in bound] == sorted(bound[c] for c in others if c in bound)


@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("1f1b", 1), ("interleaved-1f1b", 2), ("zb-v", 2)])
@pytest.mark.parametrize("shard", ["optimizer", "none"])
def test_gradients_are_reduced_where_a_run_reduces_them(schedule: str, stages_per_rank: int, shard: str) -> None:
    """From REDUCE_GRAD's place on, one after the other; so a rank waits for those of its first stage at least."""
    space, _ = bounds(0)
    configuration = Configuration(1, 2, 2, stages_per_rank, schedule, 1, 2, "none", 0.0, shard)
    candidate = SimulatedConfiguration.of(space, configuration)
    ends = {span.action: span.end for span in simulate(candidate.schedule, candidate.cost).spans}
    waits, sums = [], []
    seconds = [
        candidate.cut.costs.gradient_seconds(stage, 2, configuration.optimizer_shards) for stage in candidate.cut.stages
    ]
    for row in add_reductions(candidate.schedule).actions:
        now = free = 0.0
        for action in row:
            now = ends.get(action, now)
            if action.op is Op.REDUCE_GRAD:
                free = max(free, now) + seconds[action.stage]
        waits.append(free - now)
        sums.append(sum(seconds[action.stage] for action in row if action.op is Op.REDUCE_GRAD))
    step, causes = candidate.seconds, candidate.causes
    _, gathered, optimizer = space.tails(configuration)
    last = [max(ends[action] for action in row) for row in candidate.schedule.actions]
    assert step == pytest.approx(max(np.array(last) + waits + gathered + optimizer))
    assert any(causes["gradient reduction"] == pytest.approx(wait) for wait in waits)
    assert (sum(waits) < 0.99 * sum(sums)) == (stages_per_rank > 1)
    assert (causes["weight gathering"] > 0) == (shard != "none")


def test_a_step_waits_for_copies_that_the_devices_of_a_node_make_together() -> None:
    """Over a slow link it takes longer than all copies to the host and back, and over one of two devices as long."""
    configuration = Configuration(1, 2, 2, 1, "1f1b", 1, 2, "none", 1.0, "none")

    def simulated(**link: float) -> SimulatedConfiguration:
        cluster = replace(small_cluster(), host=replace(small_cluster().host, **link))
        return SimulatedConfiguration.of(PlanSpace(source(cluster=cluster), SEQ_LEN, 8, PlanOptions()), configuration)

    fast, slow, shared = simulated(bandwidth=1e13), simulated(bandwidth=1e8), simulated(bandwidth=2e8, shared_by=2)
    assert fast.causes["offload"] == pytest.approx(0, abs=1e-6)
    copied = sum(slow.cost.copy_seconds(a) for a in slow.schedule.actions[0] if a.op in (Op.OFFLOAD, Op.RELOAD))
    seconds, causes = slow.seconds, slow.causes
    assert copied < seconds < fast.seconds + copied
    assert causes["offload"] == pytest.approx(seconds - fast.seconds)
    assert shared.seconds == pytest.approx(seconds)


@examples(60)
@given(choice=st.integers(0, 10**9), spare=st.sampled_from((1e-9, 1e-2)), number=st.integers(0, 1))
@example(choice=20921, spare=1e-9, number=1)  # whose slices are back on the device long before their W
def test_the_quick_test_of_memory_fails_nothing_that_fits(choice: int, spare: float, number: int) -> None:
    """Not even where device and host have just the memory that the configuration takes without messages."""
    space, found = bounds(number)
    _, _, configuration = found[choice % len(found)]
    candidate = SimulatedConfiguration.of(space, configuration)
    silent = order_bytes(candidate.arrays, replace(candidate.table, message_bytes=()))
    peaks, away = silent.rank_peaks(), silent.host_peaks()
    assert max(peaks) <= max(candidate.peaks())
    cluster = small_cluster()
    cluster = replace(cluster, device=replace(cluster.device, host_memory=max(away) * (1 + spare)))
    limited = PlanSpace(source(MODELS[number], cluster), SEQ_LEN, 8, PlanOptions(memory_limit=max(peaks) * (1 + spare)))
    assert may_fit(limited, configuration)


@pytest.mark.more
@pytest.mark.parametrize("seed", first_of(range(20), 2, "grid"))
def test_the_winner_is_the_one_that_simulating_everything_finds(seed: int) -> None:
    draw = random.Random(seed)
    model = gpt(draw.choice((4, 6)), draw.choice((32, 64)), 4, draw.choice((128, 2048)))
    cluster = small_cluster(draw.choice((1, 2)), 2, memory=draw.choice((4e8, 1e9)))
    options = PlanOptions(
        stages_per_rank=draw.choice(((1,), (1, 2), (2, 3))),
        num_slices=draw.choice(((1, 2), (1, 4), (2, 3))),
        recompute=draw.choice((("none", "stage", "full"), ("none", "selective"), ("full", "stage", "stage+full"))),
        offload=draw.choice(((0.0,), (0.0, 1.0))),
        num_simulated=10**9,
    )
    space = PlanSpace(source(model, cluster), SEQ_LEN, draw.choice((2, 4, 6)), options)
    # a limit that some configurations exceed
    sizes = sorted(max(SimulatedConfiguration.of(space, c).peaks()) for _, _, c in space.bounded())
    options = replace(options, memory_limit=sizes[draw.randrange(len(sizes) // 8, len(sizes))] * 1.1)
    space = PlanSpace(space.source, SEQ_LEN, space.global_batch, options)
    plan = search_plans(space.source, SEQ_LEN, space.global_batch, options=options)
    best = everything(space)
    assert plan.best.step_seconds == pytest.approx(min(best.values()), rel=1e-12)
    assert plan.gap == 0
    assert plan.num_configurations <= sum(1 for _ in space.bounded())
    assert plan.num_bounded_meshes <= plan.num_meshes == len([*space.meshes()])


def test_a_plan_says_what_it_rests_on_and_what_else_there_is() -> None:
    plan = search_plans(source(), SEQ_LEN, 8, options=PlanOptions(slicing=NAMED))
    best = plan.best
    assert [each.step_seconds for each in plan.predictions] == sorted(each.step_seconds for each in plan.predictions)
    for alternative in plan.alternatives:
        assert alternative.choice in alternative.prediction.configuration.differences(best.configuration)
        assert alternative.prediction.step_seconds >= best.step_seconds
        extra = sum(seconds for _, seconds in alternative.why(best))
        assert extra == pytest.approx(alternative.prediction.step_seconds - best.step_seconds)
    c = best.configuration
    assert c.num_devices == plan.num_devices == 4
    assert sum(best.partition) == 6
    assert sum(best.slices) == SEQ_LEN
    assert best.tokens_per_second == pytest.approx(8 * SEQ_LEN / best.step_seconds)
    assert 0 < best.mfu < 1  # type: ignore[operator]
    assert plan.timeline.num_ranks == c.pipeline_parallel
    assert any("not measured" in note for note in plan.notes)


def test_joint_searches_start_on_meshes_of_different_degrees_where_there_are_some() -> None:
    best = Configuration(1, 2, 4, 1, "1f1b", 1, 4, "none", 0.0, "optimizer")
    same_mesh, larger = replace(best, num_slices=2), replace(best, microbatch_size=2)
    wider, found = replace(best, tensor_parallel=2), replace(best, schedule="auto", tensor_parallel=4)
    alone = replace(best, pipeline_parallel=1, data_parallel=8)
    assert promising([alone, found, best, same_mesh, larger, wider]) == [best, wider]
    assert promising([best, same_mesh, larger]) == [best, larger]


def test_its_memory_is_that_of_the_schedule_that_runs() -> None:
    space = PlanSpace(source(), SEQ_LEN, 8, PlanOptions(recompute=("none",), offload=(0.0,)))
    configuration = Configuration(1, 2, 2, 1, "1f1b", 1, 4, "none", 0.0, "optimizer")
    candidate = SimulatedConfiguration.of(space, configuration)
    prediction = predict(candidate)
    expected = [sum(rank.worst.during.values()) for rank in memory_of(candidate.schedule, candidate.table)]
    assert [sum(kinds.values()) for kinds in prediction.memory] == expected
    # by hand: rank 0 of two runs a forward of the next microbatch for each backward of the one before
    slices, costs = candidate.times.slices, space.costs(Degrees(), 1)
    tokens = max(sum(slices[: 4 - k]) + sum(slices[: k + 1]) for k in range(4))
    held = costs.activation_bytes(candidate.cut.stages[0], tokens)
    rank = memory_of(candidate.schedule, candidate.table)[0]
    most = max(moment.during[MemoryKind.ACTIVATIONS] for moment in rank.moments)
    assert most == pytest.approx(held)


def long_sequences(num_ranks: int, kernel_seconds: float) -> AnalyticSource:
    """A model whose time is mostly attention, on one pipeline."""
    cluster = small_cluster(1, num_ranks, memory=1e12)
    device = replace(cluster.device, kernel_seconds=kernel_seconds)
    return source(gpt(4, 64, 4, 128), replace(cluster, device=device, inside=replace(cluster.inside, latency=1e-7)))


ONE_PIPELINE = PlanOptions(
    data_parallel=(1,), tensor_parallel=(1,), context_parallel=(1,), schedule=("1f1b",), recompute=("none",)
)


def test_an_exact_slicing_wins_where_no_equal_times_are_as_good() -> None:
    """One long sequence on four ranks, where short slices take as long as their kernels."""
    options = replace(ONE_PIPELINE, offload=(0.0,))
    long = long_sequences(4, kernel_seconds=1e-4)
    plan = search_plans(long, 4096, 1, options=options)
    best = plan.best
    assert best.configuration.slicing == "exact"
    assert best.configuration.num_slices == len(best.slices)
    assert sum(best.slices) == 4096
    (other,) = (each.prediction for each in plan.alternatives if each.choice == "slicing")
    assert other.step_seconds > best.step_seconds
    longer = f"{other.step_seconds / best.step_seconds - 1:+.1%}"
    assert any(f"slicing equal-time instead of exact: {longer}" in line for line in reasons(plan))
    only = search_plans(long, 4096, 1, options=replace(options, slicing=("equal-time",)))
    assert only.best.slices == other.slices
    assert not [each for each in only.alternatives if each.choice == "slicing"]
    # the bytes are those of the slices that run
    candidate = SimulatedConfiguration.of(PlanSpace(long, 4096, 1, options), best.configuration)
    assert candidate.times.slices == best.slices
    assert candidate.table.message_bytes == [float(candidate.cut.costs.message_bytes(n)) for n in best.slices]
    footprint = candidate.table.footprint(StageSlice(1, len(best.slices) - 1), Op.F)
    assert footprint.leaves == candidate.cut.costs.activation_bytes(candidate.cut.stages[1], best.slices[-1])


def test_equal_times_win_where_the_exact_formula_is_not_the_schedule() -> None:
    """TeraPipe's latency is that of all forwards, then all backwards; with 1F1B a few equal slices are better."""
    plan = search_plans(long_sequences(2, kernel_seconds=1e-5), 2048, 16, options=ONE_PIPELINE)
    assert plan.best.configuration.slicing == "equal-time"
    (other,) = (each.prediction for each in plan.alternatives if each.choice == "slicing")
    assert other.configuration.slicing == "exact"
    assert other.step_seconds >= plan.best.step_seconds


def test_exact_slicings_are_of_pipelines_and_differ_from_the_others() -> None:
    space = PlanSpace(source(), SEQ_LEN, 8, PlanOptions())
    found: dict[Configuration, set[tuple[int, ...]]] = {}
    for _, _, c in space.bounded():
        alike = replace(c, num_slices=1, slicing="equal-time")
        slices = space.slices(c)
        assert len(slices) == c.num_slices
        assert slices not in found.setdefault(alike, set())
        assert c.pipeline_parallel > 1 or c.slicing == "equal-time"
        found[alike].add(slices)


def test_one_kind_of_slicing_may_be_all_that_is_allowed() -> None:
    options = PlanOptions(slicing=("exact",))
    assert {c.slicing for _, _, c in PlanSpace(source(), SEQ_LEN, 8, options).bounded()} == {"exact"}
    with pytest.raises(SlipstreamError, match=r"pipeline_parallel=1 fits nothing.*Choose from 2, 4"):
        search_plans(source(), SEQ_LEN, 8, options=replace(options, pipeline_parallel=(1,)))
    with pytest.raises(SlipstreamError, match="nothing fits"):
        search_plans(source(), SEQ_LEN, 8, options=replace(options, memory_limit=1e6))


def test_of_two_schedules_that_are_one_only_the_first_is_planned() -> None:
    """With one microbatch, depth and breadth first are the same."""
    for num_ranks, num_slices, stages_per_rank in ((2, 4, 2), (2, 1, 3), (4, 8, 2)):
        counts = (num_ranks, 1, num_slices, stages_per_rank)
        assert make_schedule("interleaved-1f1b", *counts).actions == make_schedule("breadth-first", *counts).actions
    names = {
        number: {
            c.schedule for _, _, c in PlanSpace(source(), SEQ_LEN, number, PlanOptions(data_parallel=(1,))).bounded()
        }
        for number in (1, 2)
    }
    assert names[2] - names[1] == {"breadth-first"}


def test_longer_simulations_close_the_gap() -> None:
    few = search_plans(source(), SEQ_LEN, 8, options=PlanOptions(num_simulated=1, slicing=NAMED))
    many = search_plans(source(), SEQ_LEN, 8, options=PlanOptions(num_simulated=10**6, slicing=NAMED))
    assert many.gap == 0 <= few.gap
    assert many.best.step_seconds <= few.best.step_seconds
    assert many.best.step_seconds >= few.best.step_seconds * (1 - few.gap) * (1 - 1e-9)


# --- what PTD-P found, as results ------------------------------------------------------------------------------------


def degrees(model: ModelCount, num_nodes: int, batch: int, options: PlanOptions) -> Configuration:
    cluster = load_cluster("a100-selene").with_nodes(num_nodes)
    return search_plans(AnalyticSource(model, cluster, "gpt"), 2048, batch, options=options).best.configuration


def test_tensor_parallelism_fills_the_node_and_no_more() -> None:
    """Takeaway 1 (Figure 13): 161 billion parameters on 64 GPUs are fastest at (t, p) = (8, 8)."""
    model = gpt(num_layers=32, hidden=20480, heads=128)
    options = replace(PLAIN, data_parallel=(1,), schedule=("1f1b",), stages_per_rank=(1,), microbatch_size=(1,))
    best = degrees(model, 8, 32, options)
    assert (best.tensor_parallel, best.pipeline_parallel) == (8, 8)


def test_data_parallelism_scales_once_the_model_fits() -> None:
    """Takeaway 2 (Figures 14, 15): of a model that fits one node, all more devices are data parallel."""
    model = gpt(num_layers=32, hidden=3840, heads=32)
    options = replace(PLAIN, schedule=("1f1b",), stages_per_rank=(1,), microbatch_size=(1,))
    best = degrees(model, 4, 256, options)
    assert best.tensor_parallel * best.pipeline_parallel <= 8
    larger = degrees(gpt(num_layers=32, hidden=9216, heads=64), 4, 256, options)
    assert larger.tensor_parallel * larger.pipeline_parallel > best.tensor_parallel * best.pipeline_parallel


def test_the_best_microbatch_is_neither_the_smallest_nor_the_largest() -> None:
    """Takeaway 3 (Figure 16): larger ones compute faster, smaller ones idle less."""
    model = gpt(num_layers=32, hidden=4096, heads=32)
    cluster = load_cluster("a100-selene").with_nodes(1)
    steps = {}
    for size in (1, 2, 4, 8, 16, 32):
        options = replace(PLAIN, tensor_parallel=(1,), data_parallel=(1,), microbatch_size=(size,), memory_limit=1e15)
        options = replace(options, schedule=("1f1b",), stages_per_rank=(1,), context_parallel=(1,))
        plan = search_plans(AnalyticSource(model, cluster, "gpt"), 512, 128, options=options)
        steps[size] = plan.best.step_seconds
    best = min(steps, key=steps.__getitem__)
    assert best not in (1, 32), steps


def test_sharded_parameters_take_as_long_as_a_sharded_optimizer_and_no_less_memory() -> None:
    """Weights of a step are whole, and gathered as often; with master weights these are the rows, else they come on
    top. So they are planned only where they are asked for, and never for ranks that share layers."""
    for dtype, more in (("float16", 0.0), ("float32", 4 / 4)):
        model = gpt(num_layers=6, hidden=64, heads=4, vocab=512, dtype=dtype)
        cluster = small_cluster()
        cluster = replace(cluster, device=replace(cluster.device, flops={dtype: 1e10}))
        options = replace(PLAIN, data_parallel=(4,), microbatch_size=(1,), slicing=("equal-time",), schedule=("1f1b",))
        found = {
            shard: search_plans(source(model, cluster), SEQ_LEN, 8, options=replace(options, shard=(shard,))).best
            for shard in ("optimizer", "parameters")
        }
        assert found["parameters"].step_seconds == found["optimizer"].step_seconds
        held = found["parameters"].peak_memory - found["optimizer"].peak_memory
        assert held == pytest.approx(more * model.num_parameters)
        assert "parameters sharded" in configuration_text(found["parameters"].configuration)
    open_space = PlanSpace(source(), SEQ_LEN, 8, PlanOptions())
    assert {c.shard for _, _, c in open_space.bounded()} == {"none", "optimizer"}
    asked = PlanSpace(source(), SEQ_LEN, 8, PlanOptions(shard=("parameters",)))
    assert {c.tensor_parallel for _, _, c in asked.bounded()} == {1}
    with pytest.raises(SlipstreamError, match=r"shard=parameters can't be planned for small\. The head is tied"):
        PlanSpace(source(replace(SMALL, tied=True)), SEQ_LEN, 8, PlanOptions(shard=("parameters",)))


# --- what can't be ---------------------------------------------------------------------------------------------------


def test_what_does_not_fit_says_by_how_much_and_what_would() -> None:
    options = PlanOptions(recompute=("none",), offload=(0.0,), shard=("none",))
    space = PlanSpace(source(), SEQ_LEN, 8, PlanOptions())
    smallest = min(size for _, size, _ in space.bounded())
    tight = replace(options, memory_limit=smallest * 1.3)
    with pytest.raises(
        SlipstreamError, match=r"needs [\d.]+ MB on rank \d, [\d.]+ [kM]B more than the [\d.]+ MB"
    ) as caught:
        search_plans(source(), SEQ_LEN, 8, options=tight)
    assert "The cheapest change that would fit: allow " in str(caught.value)


def one_device(memory: float, host_memory: float = 32e9) -> AnalyticSource:
    cluster = small_cluster(1, 1, memory=memory)
    return source(cluster=replace(cluster, device=replace(cluster.device, host_memory=host_memory)))


def test_a_twentieth_of_a_device_is_left_to_what_is_not_counted() -> None:
    assert PlanSpace(one_device(1e9), SEQ_LEN, 8, PlanOptions()).memory == 0.95e9
    assert PlanSpace(one_device(1e9), SEQ_LEN, 8, PlanOptions(memory_limit=1e9)).memory == 1e9


def test_schedules_are_kept_by_their_size() -> None:
    kept, small = NewestResults(100, lambda *_: object()), ScheduleShape("1f1b", 2, 5, 1, 1)
    first, other = kept(small), kept(small, True)
    assert (kept(small), kept(small, True)) == (first, other)
    large = kept(small._replace(num_microbatches=45))
    assert kept(small._replace(num_microbatches=45)) is large
    assert kept(small, True) is other
    assert kept(small) is not first


@pytest.mark.parametrize("offloads", [False, True])
def test_a_few_microbatches_tell_nearly_what_many_hold(offloads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more than that, so that the quick test of memory is one."""
    draw = np.random.default_rng(0)
    for name, num_ranks, num_slices in product(SCHEDULES, (2, 3, 4), (1, 2, 5)):
        stages = SCHEDULES[name].stages_per_rank
        for stages_per_rank in {stages[0], stages[min(2, len(stages) - 1)]}:
            shape = ScheduleShape(name, num_ranks, 44, num_slices, stages_per_rank)
            sizes = draw.uniform(1, 2, (2, num_ranks * stages_per_rank, num_slices))
            bound = MemoryBound(sizes[0] + sizes[1], sizes[0], sizes[0].sum(axis=1), 0 * sizes[0, :, 0], offloads)
            few = bound.peaks(shape)
            with monkeypatch.context() as patch:
                patch.setattr(search_bounds, "_FILLED", 44)
                many = bound.peaks(shape)
            assert (few <= many * (1 + 1e-12)).all()
            assert few.max() > 0.7 * many.max()


@pytest.mark.parametrize("schedule", [name for name, kind in SCHEDULES.items() if not kind.holds_all])
def test_a_long_step_is_extrapolated_from_its_first_and_last_microbatches(schedule: str) -> None:
    """Its time, causes and memory; without copies that take longer than the work they are as of the whole step."""
    stages = SCHEDULES[schedule].stages_per_rank[:2][-1]
    space = PlanSpace(source(), SEQ_LEN, 800 // stages, PlanOptions())
    for recompute, offload in (("none", 0.0), ("none", 1.0), ("stage", 0.0), ("full", 1.0)):
        configuration = Configuration(1, 3, 2, stages, schedule, 1, 4, recompute, offload, "optimizer")
        few, whole = (
            kind(space, configuration) for kind in (SimulatedConfiguration.extrapolated, SimulatedConfiguration.of)
        )
        assert 3 * len(few.arrays.op) < len(whole.arrays.op)
        assert few.seconds == pytest.approx(whole.seconds, rel=1e-3)
        assert sum(few.causes.values()) == pytest.approx(few.seconds)
        assert few.causes == pytest.approx(whole.causes, abs=2e-3 * whole.seconds)
        assert few.peaks() == pytest.approx(whole.peaks(), rel=1e-6)
        assert few.host_peak() == pytest.approx(whole.host_peak(), rel=1e-6)
        first, second = predict(few), predict(whole)
        assert first.num_microbatches == 400 // stages
        assert first.peak_memory == pytest.approx(second.peak_memory, rel=1e-6)
        assert first.idle_fraction == pytest.approx(second.idle_fraction, abs=1e-3)


def test_the_shortest_step_is_simulated_whole_before_it_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much shorter it would be by its first and last microbatches."""
    later = SimulatedConfiguration._later
    monkeypatch.setattr(simulated_configuration, "_LONG", 100)
    monkeypatch.setattr(SimulatedConfiguration, "_later", lambda self, ends: 0.9 * later(self, ends))
    options = replace(PLAIN, pipeline_parallel=(2,), microbatch_size=(1,), schedule=("1f1b",), num_slices=(1, 2))
    plan = search_plans(source(), SEQ_LEN, 256, options=options)
    space, best = PlanSpace(source(), SEQ_LEN, 256, options), plan.best.configuration
    whole = {c: SimulatedConfiguration.of(space, c).seconds for _, _, c in space.bounded()}
    assert SimulatedConfiguration.extrapolated(space, best).seconds < 0.95 * whole[best]
    assert plan.best.step_seconds == whole[best] == min(whole.values())


def test_a_single_device_is_planned_wherever_something_fits() -> None:
    """In slices, where whole sequences are too large; and what is said of what is left lacks something."""
    whole = search_plans(one_device(1e12), SEQ_LEN, 8, options=PlanOptions(num_slices=(1,), offload=(0.0,)))
    saving = PlanOptions(microbatch_size=(1,), recompute=("stage",), offload=(0.0,))
    space = PlanSpace(one_device(1e12), SEQ_LEN, 8, replace(saving, num_slices=(1,)))
    least = min(max(SimulatedConfiguration.of(space, c).peaks()) for _, _, c in space.bounded())
    plan = search_plans(one_device(1e12), SEQ_LEN, 8, options=replace(saving, memory_limit=0.99 * least))
    assert whole.best.configuration.num_slices == 1 < plan.best.configuration.num_slices
    errors = []
    for share in (0.2, 0.4, 0.6, 0.8, 0.9, 1.0):
        try:
            found = search_plans(one_device(1e12), SEQ_LEN, 8, options=PlanOptions(memory_limit=share * least))
        except SlipstreamError as error:
            errors.append(str(error))
        else:
            assert found.best.peak_memory <= share * least
    assert 0 < len(errors) < 6
    lacks = r" needs [\d.]+ [kMG]B on rank 0, [\d.]+ [kMG]?B more than the [\d.]+ [kMG]B .* that would fit: "
    assert [error for error in errors if not re.search(lacks, error)] == []


@pytest.mark.more
def test_8b_with_an_adapter_fits_a_device_of_80_gb() -> None:
    """Beside bfloat16 weights and beside 4 bits, which leave more room; and what is too long says what it lacks."""
    config = llama(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=128256, max_position_embeddings=2**20,
    )  # fmt: skip
    h100 = load_cluster("h100-dgx")
    one = replace(h100, num_nodes=1, devices_per_node=1)
    held = []
    precisions: tuple[BasePrecision, ...] = ("full", "nf4")
    for base_precision in precisions:
        trained = TrainedWeights(adapter=Adapter("default", lora(target_modules="all-linear"), base_precision))
        source = AnalyticSource(count_model(config, 8192, torch.bfloat16, trained), one, "8B with LoRA")
        best = search_plans(source, 8192, 4, options=PlanOptions(num_slices=(2, 4))).best
        assert best.peak_memory < 76e9
        assert all(size >= 0 for size in best.memory[0].values())
        held.append(best.memory[0][MemoryKind.PARAMETERS])
        with pytest.raises(SlipstreamError, match=r"needs [\d.]+ GB on rank 0, [\d.]+ [GM]B more than the 5.00 GB"):
            search_plans(source, 8192, 4, options=PlanOptions(memory_limit=5e9, num_slices=(2,)))
    assert held[0] == pytest.approx(16.1e9, rel=0.01)
    assert held[1] == pytest.approx(2 * (2 * 128256 * 4096 + 10.5e6) + 6.98e9 * QUANTISED_BYTES, rel=0.01)


def test_a_host_that_is_too_small_is_said() -> None:
    small = small_cluster(1, 2)
    cluster = replace(small, device=replace(small.device, host_memory=1e3))
    tight = PlanOptions(offload=(1.0,), pipeline_parallel=(2,), schedule=("gpipe",), microbatch_size=(1,))
    lacks = r" on a host, [\d.]+ [kMG]?B more than the [\d.]+ [kMG]?B that a host has .* would fit: allow "
    with pytest.raises(SlipstreamError, match=lacks):
        search_plans(source(cluster=cluster), SEQ_LEN, 8, options=tight)


@pytest.mark.more
def test_what_fits_no_choice_wants_more_devices() -> None:
    model = gpt(num_layers=24, hidden=12288, heads=96)
    cluster = load_cluster("a100-selene").with_nodes(1)
    with pytest.raises(SlipstreamError, match=r"would fit: \d+ devices instead of 8") as caught:
        search_plans(AnalyticSource(model, cluster, "gpt"), 2048, 8)
    wanted = int(str(caught.value).split("would fit: ")[1].split()[0])
    larger = AnalyticSource(model, cluster.with_nodes(wanted // 8), "gpt")
    assert search_plans(larger, 2048, 8, options=PlanOptions(num_simulated=1)).best.peak_memory <= 80e9


@pytest.mark.parametrize(
    ("batch", "given", "words"),
    [
        (7, {"data_parallel": (2,)}, "^data_parallel=2 fits nothing: .* the batch of 7 sequences. Choose from 1, or"),
        (
            8,
            {"tensor_parallel": (3,)},
            "^tensor_parallel=3 fits nothing: it must divide the 4 devices and every",
        ),
        (8, {"tensor_parallel": (16,)}, "^tensor_parallel=16 fits nothing: .* Choose from 1, 2, 4, or leave it out"),
        (8, {"context_parallel": (3, 5)}, "^context_parallel=3,5 fits nothing: .* Choose from 1, 2, 4, or leave"),
        (8, {"expert_parallel": (3,)}, "^expert_parallel=3 fits nothing: .*layer's experts.* Choose from 1, 2, 4, or"),
        (
            8,
            {"pipeline_parallel": (3,)},
            "^pipeline_parallel=3 fits nothing: .* be at most the 6 layers. Choose from 1, ",
        ),
        (8, {"tensor_parallel": (4,), "context_parallel": (2,)}, "^tensor_parallel=4 .* beside context_parallel=2: "),
        (8, {"stages_per_rank": (7,)}, "no configuration fits .* 6 layers.*, or allow more than stages_per_rank=7."),
    ],
)
def test_what_fits_nothing_is_named(batch: int, given: dict[str, tuple[int, ...]], words: str) -> None:
    layer = replace(SMALL.layers[0], num_experts=4)
    model = AnalyticSource(replace(SMALL, layers=(layer,)), small_cluster(), "mixture", refusals={})
    with pytest.raises(SlipstreamError, match=words):
        search_plans(model, SEQ_LEN, batch, options=PlanOptions(**given))  # type: ignore[arg-type]


def test_equal_layers_are_cut_evenly_by_time() -> None:
    space = PlanSpace(source(), SEQ_LEN, 8, PlanOptions())
    configuration = Configuration(1, 2, 2, 1, "1f1b", 1, 1, "none", 0.0, "none")
    times = space.times(configuration).compute
    per_rank = space.cut(configuration).per_rank((times[Op.F] + times[Op.I] + times[Op.W]).sum(axis=1))
    layer = np.diff(sorted(per_rank))[0]
    one = sum(float(space.costs(Degrees(), 1).seconds(range(2, 3), op, SEQ_LEN, 0)) for op in (Op.F, Op.I, Op.W))
    assert layer <= one


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_the_gradient_of_the_logits_is_there_while_the_last_stage_goes_backward(tensor_parallel: int) -> None:
    """In float32, of the rank's part of the vocabulary. Two equal stages otherwise."""
    vocabulary = SMALL.head_weight // SMALL.hidden_size
    configuration = Configuration(tensor_parallel, 2, 1, 1, "1f1b", 2, 4, "none", 0.0, "none")
    candidate = SimulatedConfiguration.of(
        PlanSpace(source(cluster=small_cluster(1)), SEQ_LEN, 4, PlanOptions()), configuration
    )
    first, last = candidate.table.footprint(StageSlice(0, 1), Op.B), candidate.table.footprint(StageSlice(1, 1), Op.I)
    assert last.peak - first.peak == 4 * 2 * candidate.times.slices[1] * vocabulary / tensor_parallel


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank", "recompute"),
    each_once(
        [("1f1b", 1), ("zb-h1", 1), ("interleaved-1f1b", 2), ("zb-v", 2)], ["none", "stage", "full", "stage+full"]
    ),
)
def test_what_is_simulated_is_what_a_pipeline_runs(schedule: str, stages_per_rank: int, recompute: str) -> None:
    """Backwards too, which a Pipeline splits where their result goes to another rank."""
    source = AnalyticSource(SMALL, small_cluster(1), "small")
    configuration = Configuration(1, 2, 1, stages_per_rank, schedule, 1, 3, recompute, 0.0, "none")
    candidate = SimulatedConfiguration.of(PlanSpace(source, SEQ_LEN, 4, PlanOptions()), configuration)
    pipe = make_pipe(
        llama(num_hidden_layers=4),
        schedule=schedule,
        num_ranks=2,
        stages_per_rank=stages_per_rank,
        num_microbatches=4,
        slices=3,
        recompute=recompute,
    )
    run = pipe.layout.training
    computed = [[action for action in row if action.op not in COMMUNICATION] for row in run.actions]
    assert [list(row) for row in candidate.schedule.actions] == computed


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_named_order_is_simulated_without_an_object_for_each_action(schedule: str) -> None:
    stages_per_rank = 2 if 2 in SCHEDULES[schedule].stages_per_rank else 1
    configuration = Configuration(1, 2, 1, stages_per_rank, schedule, 1, 8, "stage", 0.5, "none")
    space = PlanSpace(source(), SEQ_LEN, 4, PlanOptions())
    candidate = SimulatedConfiguration.of(space, configuration)
    assert may_fit(space, configuration)
    assert candidate.fits()
    assert candidate.seconds > 0
    assert candidate.schedule.ops >= {Op.F, Op.R, Op.OFFLOAD, Op.RELOAD}
    assert "_rows" not in vars(candidate.schedule.actions)


def test_layers_that_are_recomputed_one_by_one() -> None:
    """On one device, one slice: a forward of the layers longer, and of the activations what enters them and one's."""
    space = PlanSpace(source(SMALL, small_cluster(1, 1)), SEQ_LEN, 2, PlanOptions())
    none, full, stage = (
        SimulatedConfiguration.of(space, Configuration(1, 1, 1, 1, "1f1b", 1, 1, recompute, 0.0, "none"))
        for recompute in ("none", "full", "stage")
    )
    layers = full.cut.costs.seconds(range(1, 5), Op.F, SEQ_LEN, 0) - full.cut.costs.cluster.device.action_seconds
    assert full.seconds - none.seconds == pytest.approx(2 * layers * 6 / 4)  # of two sequences, SMALL has 6 layers
    assert full.causes["recomputation"] == pytest.approx(2 * layers * 6 / 4)
    assert stage.peaks() == none.peaks()  # as each backward follows its forward
    assert full.peaks()[0] < 0.8 * none.peaks()[0]
    limit = (full.peaks()[0] + none.peaks()[0]) / 2
    options = PlanOptions(memory_limit=limit, offload=(0.0,), num_slices=(1,))
    plan = search_plans(space.source, SEQ_LEN, 2, options=options)
    assert plan.best.configuration.recompute == "full"


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_plan_of_frozen_layers_is_cut_for_what_runs(schedule: str) -> None:
    """Five frozen layers of six: the first stage gets more of them, and runs forwards alone, as in the Pipeline."""
    partly, stages = with_frozen(SMALL, 5), 2 if schedule == "zb-v" else 1
    configuration = Configuration(1, 2, 1, stages, schedule, 1, 3, "none", 0.0, "none")
    spaces = [PlanSpace(source(model, small_cluster(1)), SEQ_LEN, 4, PlanOptions()) for model in (partly, SMALL)]
    frozen, whole = (SimulatedConfiguration.of(space, configuration) for space in spaces)
    assert frozen.seconds < whole.seconds
    if stages == 1:
        moved = replace(frozen.cut, bounds=whole.cut.bounds)  # where the cut for training everything is slower
        assert frozen.cut.bounds[1] > whole.cut.bounds[1]
        spaces[0].cut = lambda _: moved  # type: ignore[method-assign]
        assert SimulatedConfiguration.of(spaces[0], configuration).seconds > frozen.seconds
    pipe = make_pipe(
        llama(num_hidden_layers=6),
        freeze=["model.embed_tokens*", *(f"model.layers.{layer}.*" for layer in range(5))],
        schedule=schedule,
        num_ranks=2,
        stages_per_rank=stages,
        num_microbatches=4,
        slices=3,
        partition=list(partition_of(frozen.cut.bounds, 1)),
    )
    assert frozen.cut.num_frozen == pipe.layout.num_frozen_stages > 0
    computed = [[a for a in row if a.op not in COMMUNICATION] for row in pipe.layout.training.actions]
    assert [list(row) for row in frozen.schedule.actions] == computed
    trained = partly.layers[1].num_parameters + partly.head.num_parameters
    state = frozen.space.source.state
    assert sum(frozen.table.optimizer.values()) == state.optimizer * trained
    assert sum(size for (_, op), size in frozen.table.gradients.items() if op is not Op.I) == state.gradients * trained
    assert sum(frozen.table.parameters.values()) == state.weights * partly.num_parameters


# --- what is found jointly -------------------------------------------------------------------------------------------


@cache
def counted_llama() -> AnalyticSource:
    """Four layers in halves, on one node of two devices."""
    return AnalyticSource(count_model(llama(), SEQ_LEN, torch.float16), small_cluster(1), "llama")


def test_halves_of_two_layers_keep_what_enters_both() -> None:
    """Where layers are recomputed one by one; the halves of one layer keep only what enters that."""
    space = PlanSpace(counted_llama(), SEQ_LEN, 2, PlanOptions())
    costs, kept = space.costs(Degrees(), 1), partial(AnalyticCosts.kept_bytes, recompute="full", length=SEQ_LEN)
    cut = PlacedPartition(costs, tuple(range(5)), (0, 1, 3, 4, 6, 10))
    assert cut.per_stage(partial(kept, costs)).tolist() == [kept(costs, stage) for stage in cut.stages]
    assert kept(costs, cut.stages[3]) == 2 * kept(costs, cut.stages[1])
    assert len({*map(space.alike, cut.stages)}) == 5


TWO_RANKS = PlanOptions(
    pipeline_parallel=(2,), data_parallel=(1,), tensor_parallel=(1,), context_parallel=(1,), num_simulated=4
)


@cache
def jointly_planned() -> Plan:
    return search_plans(counted_llama(), SEQ_LEN, 1, options=replace(TWO_RANKS, schedule=("auto",), offload=(0.0,)))


@pytest.mark.more
def test_a_joint_plan_is_at_least_as_fast_as_named_schedules_and_is_what_a_pipeline_runs() -> None:
    plan = jointly_planned()
    best, found = plan.best, plan.best.joint
    assert found is not None
    assert best.configuration.schedule == best.configuration.slicing == "auto"
    assert (best.partition, best.slices, best.placement) == (found.partition, found.slices, found.schedule.placement)
    (named,) = (each.prediction for each in plan.alternatives if each.choice == "schedule")
    assert named.step_seconds >= best.step_seconds
    assert sum(best.partition) == 4
    assert sum(best.slices) == SEQ_LEN
    pipe = make_pipe(
        llama(max_position_embeddings=SEQ_LEN),
        schedule=found.schedule,
        num_ranks=2,
        slices=list(best.slices),
        partition=list(best.partition),
        recompute=best.configuration.recompute,
    )
    computed = [[a for a in row if a.op not in COMMUNICATION] for row in pipe.layout.training.actions]
    assert [list(row) for row in plan.schedule.actions] == computed


@pytest.mark.more
def test_a_joint_plan_keeps_to_the_memory_of_the_device() -> None:
    """Half of what the plan without a limit takes besides weights, gradients and optimizer state."""
    free = jointly_planned().best
    state = sum(part.num_parameters for part in counted_llama().model.of_kind) * 16
    limit = max(1e6, state + (free.peak_memory - state) / 2)
    options = replace(TWO_RANKS, schedule=("auto",), memory_limit=limit, offload=(0.0,))
    best = search_plans(counted_llama(), SEQ_LEN, 1, options=options).best
    assert best.configuration.schedule == "auto"
    assert best.peak_memory <= limit < free.peak_memory


def test_where_only_named_schedules_fit_the_error_says_which() -> None:
    """A pipeline of one rank has nothing to search together."""
    options = replace(TWO_RANKS, pipeline_parallel=(1,), data_parallel=(2,), schedule=("auto",))
    with pytest.raises(SlipstreamError, match=r"found together that fit, but .* does\. Allow schedule=1f1b and"):
        search_plans(counted_llama(), SEQ_LEN, 2, options=options)


@pytest.mark.more
def test_given_counts_leave_nothing_to_the_joint_search() -> None:
    some: tuple[PlanOptions, ...] = (
        replace(TWO_RANKS, stages_per_rank=(1,)),
        replace(TWO_RANKS, num_slices=(2,)),
        replace(TWO_RANKS, schedule=("1f1b",)),
        replace(TWO_RANKS, slicing=("exact",)),
    )
    for options in some:
        plan = search_plans(counted_llama(), SEQ_LEN, 1, options=options)
        assert all(each.joint is None for each in plan.predictions)
