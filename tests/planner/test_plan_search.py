"""No configuration beats the plan, what doesn't fit is refused with what would, and plans are as the papers found."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import cache
from math import inf
from typing import Any

import pytest
import torch

from slipstream.cost import CountedSource, Degrees, ModelCount, StageParts
from slipstream.cost.cluster import load_cluster
from slipstream.errors import SlipstreamError
from slipstream.model.adapters import Adapter
from slipstream.model.trained_weights import TrainedWeights
from slipstream.number_format import NF4
from slipstream.planner.find_plan import find_plan
from slipstream.planner.plan import CHOICES, ONE_DEVICE, Plan
from slipstream.planner.plan_fields import AUTO
from slipstream.planner.plan_report import PlanReport
from slipstream.planner.progress import untold
from slipstream.planner.report import reasons
from slipstream.planner.search import ClusterProblem, plan_space
from slipstream.planner.search.evaluate import Evaluation
from slipstream.planner.search.joint_plans import JointCandidates, promising
from slipstream.planner.search.plan_options import PlanOptions
from slipstream.planner.search.plan_space import PlanSpace
from slipstream.planner.search.simple_first import ABOUT_AS_LONG, may_come_first
from slipstream.profile import count_model
from slipstream.schedule import Op, make_schedule, validate
from slipstream.simulator import MemoryKind, StageSlice
from support.adapters import lora
from support.architectures import llama
from support.parameters import first_of
from support.pipelines import computed_rows, make_pipe
from support.small_clusters import SEQ_LEN, SMALL, gpt, small_cluster, source

NAMED = ("equal-time", "exact")  # nothing that takes a joint search
PLAIN = PlanOptions(num_slices=(1,), recompute=("stage",), offload=(0.0,), shard=("none",))
ONE_F_ONE_B = PLAIN.changed(schedule=("1f1b",), stages_per_rank=(1,))


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
    sizes = sorted(max(space.evaluate(c).peaks()) for _, _, c in space.bounded())
    options = options.changed(memory_limit=sizes[draw.randrange(len(sizes) // 8, len(sizes))] * 1.1)
    space = PlanSpace(space.source, SEQ_LEN, space.global_batch, options)
    plan = find_plan(ClusterProblem(space.source, SEQ_LEN, space.global_batch, options=options))
    found = [space.evaluate(configuration) for _, _, configuration in space.bounded()]
    fitting = [each for each in found if space.predict(each).peak_memory <= space.memory and space.fits(each)]
    seconds = {each.plan: each.seconds for each in fitting}
    shortest = min(seconds.values())
    assert min(each.step_seconds for each in plan.predictions) == pytest.approx(shortest, rel=1e-12)
    assert plan.best.step_seconds <= (1 + ABOUT_AS_LONG) * shortest
    about_as_long = [each for each, taken in seconds.items() if taken <= (1 + ABOUT_AS_LONG) * shortest]
    assert not any(may_come_first(each, {plan.best.plan: shortest}) for each in about_as_long)
    assert plan.gap == 0
    assert plan.num_configurations <= sum(1 for _ in space.bounded())
    assert plan.num_bounded_meshes <= plan.num_meshes == len([*space.meshes()])


def test_a_plan_says_what_it_rests_on_and_what_else_there_is() -> None:
    """And longer simulations close the gap."""
    few, plan = (
        find_plan(ClusterProblem(source(), SEQ_LEN, 8, options=PlanOptions(num_simulated=number, slicing=NAMED)))
        for number in (1, 10**6)
    )
    best = plan.best
    assert plan.gap == 0 <= few.gap
    shortest, shortest_of_few = (min(p.step_seconds for p in each.predictions) for each in (plan, few))
    assert shortest_of_few * (1 - few.gap) * (1 - 1e-9) <= shortest <= shortest_of_few
    for each in (few, plan):
        assert [*each.predictions[1:]] == sorted(each.predictions[1:], key=lambda prediction: prediction.step_seconds)
        assert each.best.step_seconds <= (1 + ABOUT_AS_LONG) * each.predictions[1].step_seconds
        for alternative in each.alternatives:
            assert alternative.choice in alternative.prediction.plan.differences(each.best.plan)
            longer = alternative.prediction.step_seconds - each.best.step_seconds
            assert longer >= -ABOUT_AS_LONG * each.best.step_seconds
            assert sum(seconds for _, seconds in alternative.why(each.best)) == pytest.approx(longer)
    c = best.plan
    assert c.num_devices == plan.num_devices == 4
    assert sum(best.plan.partition) == 6
    assert sum(best.plan.slices) == SEQ_LEN
    assert best.tokens_per_second == pytest.approx(8 * SEQ_LEN / best.step_seconds)
    assert 0 < best.mfu < 1  # type: ignore[operator]
    assert plan.timeline.num_ranks == c.pipeline_parallel
    assert any("not measured" in note for note in plan.notes)


def test_joint_searches_start_on_meshes_of_different_degrees_where_there_are_some() -> None:
    best = replace(ONE_DEVICE, pipeline_parallel=2, data_parallel=4, num_slices=4, shard="optimizer")
    same_mesh, larger = replace(best, num_slices=2), replace(best, microbatch_size=2)
    wider, found = replace(best, tensor_parallel=2), replace(best, schedule=make_schedule("1f1b", 2, 1, 4))
    alone = replace(best, pipeline_parallel=1, data_parallel=8)

    def chosen(*plans: Plan, apart: float = 0.1) -> list[Plan]:
        return promising({plan: 1 + apart * place for place, plan in enumerate(plans)})

    assert chosen(alone, found, best, same_mesh, larger, wider) == [best, wider]
    assert chosen(best, same_mesh, larger) == [best, larger]
    assert chosen(best, larger, wider, apart=0.01) == [best, wider, larger]
    assert chosen(best, wider, larger, apart=0.015) == [best, wider]


def long_sequences(num_ranks: int, kernel_seconds: float) -> CountedSource:
    """A model whose time is mostly attention, on one pipeline."""
    cluster = small_cluster(1, num_ranks, memory=1e12)
    device = replace(cluster.device, kernel_seconds=kernel_seconds)
    return source(gpt(4, 64, 4, 128), replace(cluster, device=device, inside=replace(cluster.inside, latency=1e-7)))


ONE_PIPELINE = PlanOptions(
    data_parallel=(1,), tensor_parallel=(1,), context_parallel=(1,), schedule=("1f1b",), recompute=("none",)
)


def test_an_exact_slicing_wins_where_no_equal_times_are_as_good() -> None:
    """One long sequence on four ranks, where short slices take as long as their kernels."""
    options = ONE_PIPELINE.changed(offload=(0.0,))
    long = long_sequences(4, kernel_seconds=1e-4)
    plan = find_plan(ClusterProblem(long, 4096, 1, options=options))
    best = plan.best
    assert best.plan.slicing == "exact"
    assert best.plan.num_slices == len(best.plan.slices)
    assert sum(best.plan.slices) == 4096
    (other,) = (each.prediction for each in plan.alternatives if each.choice == "slicing")
    assert other.step_seconds > best.step_seconds
    longer = f"takes {other.step_seconds / best.step_seconds - 1:.1%} longer"
    (reason,) = (each for each in reasons(plan) if "slicing" in each.choices)
    assert longer in reason.claim
    assert "slicing equal-time" in str(reason)
    only = find_plan(ClusterProblem(long, 4096, 1, options=options.changed(slicing=("equal-time",))))
    assert only.best.plan.slices == other.plan.slices
    assert not [each for each in only.alternatives if each.choice == "slicing"]
    # the bytes are those of the slices that run
    candidate = PlanSpace(long, 4096, 1, options).evaluate(best.plan)
    assert candidate.times.slices == best.plan.slices
    assert candidate.table.message_bytes == [float(candidate.cut.costs.message_bytes(n)) for n in best.plan.slices]
    footprint = candidate.table.footprint(StageSlice(1, len(best.plan.slices) - 1), Op.F)
    assert footprint.leaves == candidate.cut.costs.activation_bytes(candidate.cut.stages[1], best.plan.slices[-1])


def test_equal_times_win_where_the_exact_formula_is_not_the_schedule() -> None:
    """TeraPipe's latency is that of all forwards, then all backwards; with 1F1B a few equal slices are better."""
    plan = find_plan(ClusterProblem(long_sequences(2, kernel_seconds=1e-5), 2048, 16, options=ONE_PIPELINE))
    assert plan.best.plan.slicing == "equal-time"
    (other,) = (each.prediction for each in plan.alternatives if each.choice == "slicing")
    assert other.plan.slicing == "exact"
    assert other.step_seconds >= plan.best.step_seconds


def test_one_kind_of_slicing_may_be_all_that_is_allowed() -> None:
    options = PlanOptions(slicing=("exact",))
    assert {c.slicing for _, _, c in PlanSpace(source(), SEQ_LEN, 8, options).bounded()} == {"exact"}
    with pytest.raises(SlipstreamError, match=r"pipeline_parallel=1 fits nothing.*Choose from 2, 4"):
        find_plan(ClusterProblem(source(), SEQ_LEN, 8, options=options.changed(pipeline_parallel=(1,))))
    with pytest.raises(SlipstreamError, match="nothing fits"):
        find_plan(ClusterProblem(source(), SEQ_LEN, 8, options=options.changed(memory_limit=1e6)))


# --- what PTD-P found, as results ------------------------------------------------------------------------------------


def degrees(model: ModelCount, num_nodes: int, batch: int, options: PlanOptions) -> Plan:
    cluster = load_cluster("a100-selene").with_nodes(num_nodes)
    return find_plan(ClusterProblem(CountedSource(model, cluster, "gpt"), 2048, batch, options=options)).best.plan


def test_tensor_parallelism_fills_the_node_and_no_more() -> None:
    """Takeaway 1 (Figure 13): 161 billion parameters on 64 GPUs are fastest at (t, p) = (8, 8)."""
    options = ONE_F_ONE_B.changed(data_parallel=(1,), microbatch_size=(1,))
    best = degrees(gpt(num_layers=32, hidden=20480, heads=128), 8, 32, options)
    assert (best.tensor_parallel, best.pipeline_parallel) == (8, 8)


def test_data_parallelism_scales_once_the_model_fits() -> None:
    """Takeaway 2 (Figures 14, 15): of a model that fits one node, all more devices are data parallel."""
    small, large = (
        degrees(gpt(num_layers=32, hidden=hidden, heads=heads), 4, 256, ONE_F_ONE_B.changed(microbatch_size=(1,)))
        for hidden, heads in ((3840, 32), (9216, 64))
    )
    assert small.tensor_parallel * small.pipeline_parallel <= 8
    assert large.tensor_parallel * large.pipeline_parallel > small.tensor_parallel * small.pipeline_parallel


def test_the_best_microbatch_is_neither_the_smallest_nor_the_largest() -> None:
    """Takeaway 3 (Figure 16): larger ones compute faster, smaller ones idle less."""
    node = load_cluster("a100-selene").with_nodes(1)
    alone = CountedSource(gpt(num_layers=32, hidden=4096, heads=32), node, "gpt")
    options = ONE_F_ONE_B.changed(tensor_parallel=(1,), data_parallel=(1,), context_parallel=(1,), memory_limit=1e15)
    steps = {
        size: find_plan(
            ClusterProblem(alone, 512, 128, options=options.changed(microbatch_size=(size,)))
        ).best.step_seconds
        for size in (1, 2, 4, 8, 16, 32)
    }
    assert min(steps, key=steps.__getitem__) not in (1, 32), steps


def test_sharded_parameters_take_as_long_as_a_sharded_optimizer_and_no_less_memory() -> None:
    """Weights of a step are whole, and gathered as often; with master weights these are the rows, else they come on
    top. So they are planned only where they are asked for, and never for ranks that share layers."""
    for dtype, more in (("float16", 0.0), ("float32", 4 / 4)):
        model = gpt(num_layers=6, hidden=64, heads=4, vocab=512, dtype=dtype)
        cluster = small_cluster()
        cluster = replace(cluster, device=replace(cluster.device, flops={dtype: 1e10}))
        options = PLAIN.changed(data_parallel=(4,), microbatch_size=(1,), slicing=("equal-time",), schedule=("1f1b",))
        found = {
            shard: find_plan(
                ClusterProblem(source(model, cluster), SEQ_LEN, 8, options=options.changed(shard=(shard,)))
            ).best
            for shard in ("optimizer", "parameters")
        }
        assert found["parameters"].step_seconds == found["optimizer"].step_seconds
        held = found["parameters"].peak_memory - found["optimizer"].peak_memory
        assert held == pytest.approx(more * model.num_parameters)
        assert "parameters sharded" in found["parameters"].plan.describe()
    open_space = PlanSpace(source(), SEQ_LEN, 8, PlanOptions())
    assert {c.shard for _, _, c in open_space.bounded()} == {"none", "optimizer"}
    asked = PlanSpace(source(), SEQ_LEN, 8, PlanOptions(shard=("parameters",)))
    assert {c.tensor_parallel for _, _, c in asked.bounded()} == {1}
    with pytest.raises(SlipstreamError, match=r"shard=parameters can't be planned for small\. The head is tied"):
        PlanSpace(source(replace(SMALL, tied=True)), SEQ_LEN, 8, PlanOptions(shard=("parameters",)))


def test_the_shortest_step_and_the_first_are_simulated_whole_before_they_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However much shorter it would be by its first and last microbatches."""
    later = Evaluation._later
    monkeypatch.setattr(plan_space, "_LONG", 100)
    monkeypatch.setattr(Evaluation, "_later", lambda self, ends: 0.9 * later(self, ends))
    options = PLAIN.changed(pipeline_parallel=(2,), microbatch_size=(1,), schedule=("1f1b",), num_slices=(1, 2))
    plan = find_plan(ClusterProblem(source(), SEQ_LEN, 256, options=options))
    space, best = PlanSpace(source(), SEQ_LEN, 256, options), plan.best.plan.only(CHOICES)
    whole = {c: space.evaluate(c).seconds for _, _, c in space.bounded()}
    assert space.evaluate_in_part(best).seconds < 0.95 * whole[best]
    assert plan.best.step_seconds == whole[best] <= (1 + ABOUT_AS_LONG) * min(whole.values())
    assert min(each.step_seconds for each in plan.predictions) == min(whole.values())


# --- what can't be ---------------------------------------------------------------------------------------------------


def one_device(memory: float) -> CountedSource:
    return source(cluster=small_cluster(1, 1, memory=memory))


def test_a_single_device_is_planned_wherever_something_fits() -> None:
    """In slices, where whole sequences are too large; and what is said of what is left lacks something."""
    whole = find_plan(
        ClusterProblem(one_device(1e12), SEQ_LEN, 8, options=PlanOptions(num_slices=(1,), offload=(0.0,)))
    )
    saving = PlanOptions(microbatch_size=(1,), recompute=("stage",), offload=(0.0,))
    space = PlanSpace(one_device(1e12), SEQ_LEN, 8, saving.changed(num_slices=(1,)))
    least = min(max(space.evaluate(c).peaks()) for _, _, c in space.bounded())
    plan = find_plan(ClusterProblem(one_device(1e12), SEQ_LEN, 8, options=saving.changed(memory_limit=0.99 * least)))
    assert whole.best.plan.num_slices == 1 < plan.best.plan.num_slices
    errors = []
    for share in (0.2, 0.4, 0.6, 0.8, 0.9, 1.0):
        try:
            found = find_plan(
                ClusterProblem(one_device(1e12), SEQ_LEN, 8, options=PlanOptions(memory_limit=share * least))
            )
        except SlipstreamError as error:
            errors.append(str(error))
        else:
            assert found.best.peak_memory <= share * least
    assert 0 < len(errors) < 6
    lacks = (
        r" (needs [\d.]+ [kMG]B on rank 0|alone take [\d.]+ [kMG]B of a device at least, on \d meshes), [\d.]+ [kMG]?B "
        r"more than the [\d.]+ [kMG]B .* that would fit: "
    )
    assert [error for error in errors if not re.search(lacks, error)] == []


@pytest.mark.more
def test_8b_with_an_adapter_fits_a_device_of_80_gb() -> None:
    """Beside bfloat16 weights and beside 4 bits, which leave more room; and what is too long says what it lacks."""
    config = llama(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=128256, max_position_embeddings=2**20,
    )  # fmt: skip
    one = replace(load_cluster("h100-dgx"), num_nodes=1, devices_per_node=1)
    held = 16.1e9, 2 * (2 * 128256 * 4096 + 10.5e6) + 6.98e9 * NF4.weight_bytes
    for base_precision, parameters in zip(("full", "nf4"), held, strict=True):
        adapter = Adapter("default", lora(target_modules="all-linear"), base_precision)  # type: ignore[arg-type]
        counted = count_model(config, 8192, torch.bfloat16, TrainedWeights(adapter=adapter))
        lora_source = CountedSource(counted, one, "8B with LoRA")
        best = find_plan(ClusterProblem(lora_source, 8192, 4, options=PlanOptions(num_slices=(2, 4)))).best
        assert best.peak_memory < 76e9
        assert all(size >= 0 for size in best.memory[0].values())
        assert best.memory[0][MemoryKind.PARAMETERS] == pytest.approx(parameters, rel=0.01)
        # Weights alone take more, or activations beside them.
        lacks = r"(needs [\d.]+ GB on rank 0|alone take [\d.]+ GB .*), [\d.]+ [GM]B more than the 5.00 GB"
        with pytest.raises(SlipstreamError, match=lacks):
            find_plan(ClusterProblem(lora_source, 8192, 4, options=PlanOptions(memory_limit=5e9, num_slices=(2,))))


def test_what_does_not_fit_says_by_how_much_and_what_would() -> None:
    """On a device, or on a host that is too small."""
    space = PlanSpace(source(), SEQ_LEN, 8, PlanOptions())
    smallest = min(size for _, size, _ in space.bounded())
    tight = PlanOptions(recompute=("none",), offload=(0.0,), shard=("none",), memory_limit=smallest * 2)
    lacks = r"needs [\d.]+ MB on rank \d, [\d.]+ MB more than the [\d.]+ MB.* change that would fit: allow recompute="
    with pytest.raises(SlipstreamError, match=lacks):
        find_plan(ClusterProblem(source(), SEQ_LEN, 8, options=tight))
    small = small_cluster(1, 2)
    cluster = replace(small, device=replace(small.device, host_memory=1e3))
    tight = PlanOptions(offload=(1.0,), pipeline_parallel=(2,), schedule=("gpipe",), microbatch_size=(1,))
    lacks = r" on a host, [\d.]+ [kMG]?B more than the [\d.]+ [kMG]?B that a host has .* would fit: allow "
    with pytest.raises(SlipstreamError, match=lacks):
        find_plan(ClusterProblem(source(cluster=cluster), SEQ_LEN, 8, options=tight))


@pytest.mark.more
def test_what_fits_no_choice_wants_more_devices() -> None:
    """Where hosts have no room for the optimizer, which would be cheaper."""
    model = gpt(num_layers=24, hidden=12288, heads=96)
    cluster = load_cluster("a100-selene").with_nodes(1)
    cluster = replace(cluster, device=replace(cluster.device, host_memory=32e9))
    with pytest.raises(SlipstreamError, match=r"would fit: num_nodes=\d+ with devices=") as caught:
        find_plan(ClusterProblem(CountedSource(model, cluster, "gpt"), 2048, 8))
    wanted = int(str(caught.value).split("num_nodes=")[1].split()[0])
    larger = CountedSource(model, cluster.with_nodes(wanted), "gpt")
    assert find_plan(ClusterProblem(larger, 2048, 8, options=PlanOptions(num_simulated=1))).best.peak_memory <= 80e9


@pytest.mark.parametrize(
    ("batch", "given", "words"),
    [
        (7, {"data_parallel": (2,)}, "^data_parallel=2 fits nothing: .* the batch of 7 sequences. Choose from 1, or"),
        (8, {"tensor_parallel": (3,)}, "^tensor_parallel=3 fits nothing: it must divide the 4 devices and every"),
        (8, {"tensor_parallel": (16,)}, "^tensor_parallel=16 fits nothing: .* Choose from 1, 2, 4, or leave it out"),
        (8, {"context_parallel": (3, 5)}, "^context_parallel=3,5 fits nothing: .* Choose from 1, 2, 4, or leave"),
        (8, {"expert_parallel": (3,)}, "^expert_parallel=3 fits nothing: .*layer's experts.* Choose from 1, 2, 4, or"),
        (8, {"pipeline_parallel": (3,)}, "^pipeline_parallel=3 fits nothing: .* be at most the 6 layers. Choose from"),
        (8, {"tensor_parallel": (4,), "context_parallel": (2,)}, "^tensor_parallel=4 .* beside context_parallel=2: "),
        (8, {"stages_per_rank": (7,)}, "no configuration fits .* 6 layers.*, or allow more than stages_per_rank=7."),
    ],
)
def test_what_fits_nothing_is_named(batch: int, given: dict[str, tuple[int, ...]], words: str) -> None:
    layer = replace(SMALL.layers[0], num_experts=4)
    model = CountedSource(replace(SMALL, layers=(layer,)), small_cluster(), "mixture", refusals={})
    with pytest.raises(SlipstreamError, match=words):
        find_plan(ClusterProblem(model, SEQ_LEN, batch, options=PlanOptions(**given)))  # type: ignore[arg-type]


# --- what is found jointly -------------------------------------------------------------------------------------------


@cache
def counted_llama() -> CountedSource:
    """Four layers in halves, on one node of two devices."""
    return CountedSource(count_model(llama(), SEQ_LEN, torch.float16), small_cluster(1), "llama")


TWO_RANKS = PlanOptions(
    pipeline_parallel=(2,), data_parallel=(1,), tensor_parallel=(1,), context_parallel=(1,), num_simulated=4
)


# Of what saves memory one way and none: each is a search of its own.
JOINT = TWO_RANKS.changed(schedule=("auto",), offload=(0.0,), recompute=("none", "full"), context=("device",))


@cache
def jointly_planned() -> PlanReport:
    return find_plan(ClusterProblem(counted_llama(), SEQ_LEN, 1, options=JOINT))


@pytest.mark.more
def test_a_joint_plan_is_at_least_as_fast_as_named_schedules_and_is_what_a_pipeline_runs() -> None:
    plan = jointly_planned()
    best, found = plan.best, plan.best.joint
    assert found is not None
    assert best.plan.schedule_name == best.plan.slicing == "auto"
    assert (best.plan.partition, best.plan.slices, best.plan.placement) == (
        found.partition,
        found.slices,
        found.schedule.placement,
    )
    (named,) = (each.prediction for each in plan.alternatives if each.choice == "schedule")
    assert named.step_seconds >= best.step_seconds
    assert sum(best.plan.partition) == 4
    assert sum(best.plan.slices) == SEQ_LEN
    pipe = make_pipe(
        llama(max_position_embeddings=SEQ_LEN),
        schedule=found.schedule,
        num_ranks=2,
        slices=list(best.plan.slices),
        partition=list(best.plan.partition),
        recompute=best.plan.recompute,
    )
    assert [*map(list, plan.schedule.actions)] == computed_rows(pipe)


@pytest.mark.more
def test_a_joint_plan_keeps_to_the_memory_of_the_device() -> None:
    """Half of what the plan without a limit takes besides weights, gradients and optimizer state."""
    free = jointly_planned().best
    state = sum(part.num_parameters for part in counted_llama().model.of_kind) * 16
    limit = max(1e6, state + (free.peak_memory - state) / 2)
    best = find_plan(ClusterProblem(counted_llama(), SEQ_LEN, 1, options=JOINT.changed(memory_limit=limit))).best
    assert best.plan.schedule_name == "auto"
    assert best.peak_memory <= limit < free.peak_memory


@pytest.mark.more
def test_orders_regardless_of_memory_are_sought_only_where_the_first_cut_fits_in_one() -> None:
    def free_plans(memory: float) -> list[Plan]:
        space = PlanSpace(counted_llama(), SEQ_LEN, 4, TWO_RANKS)
        space.memory = memory
        start = next(plan for *_, plan in space.bounded() if plan.schedule == "1f1b" and plan.pipeline_parallel == 2)
        return [*JointCandidates(space, start, inf, untold).without_limit()]

    assert free_plans(1e15)
    assert not free_plans(1e3)


@pytest.mark.more
def test_a_joint_plan_within_the_memory_is_found_where_the_best_without_a_limit_does_not_fit() -> None:
    """With half its memory, and nothing computed again: shorter than any named schedule, and hardly longer."""
    options = TWO_RANKS.changed(offload=(0.0,), recompute=("none",), context=("device",))
    free = find_plan(ClusterProblem(counted_llama(), SEQ_LEN, 4, options=options.changed(schedule=("auto",)))).best
    limited = find_plan(
        ClusterProblem(counted_llama(), SEQ_LEN, 4, options=options.changed(memory_limit=free.peak_memory / 2))
    )
    (named,) = (each.prediction for each in limited.alternatives if each.choice == "schedule")
    assert limited.best.plan.schedule_name == "auto"
    assert limited.best.peak_memory <= free.peak_memory / 2
    assert limited.best.step_seconds < 1.002 * free.step_seconds < 0.98 * named.step_seconds


def test_where_only_named_schedules_fit_the_error_says_which() -> None:
    """A pipeline of one rank has nothing to search together."""
    options = TWO_RANKS.changed(pipeline_parallel=(1,), data_parallel=(2,), schedule=("auto",))
    with pytest.raises(SlipstreamError, match=r"found together that fit, but .* does\. Allow schedule=1f1b and"):
        find_plan(ClusterProblem(counted_llama(), SEQ_LEN, 2, options=options))


@pytest.mark.more
def test_given_counts_leave_nothing_to_the_joint_search() -> None:
    some: tuple[dict[str, Any], ...] = (
        {"stages_per_rank": (1,)},
        {"num_slices": (2,)},
        {"schedule": ("1f1b",)},
        {"slicing": ("exact",)},
    )
    for changed in some:
        plan = find_plan(ClusterProblem(counted_llama(), SEQ_LEN, 1, options=TWO_RANKS.changed(**changed)))
        assert all(each.joint is None for each in plan.predictions)


HEAVY = gpt(num_layers=6, hidden=64, heads=4, vocab=8192)
ONE_COLUMN = PlanOptions(
    pipeline_parallel=(4,),
    schedule=("1f1b", AUTO),
    recompute=("none",),
    offload=(0.0,),
    microbatch_size=(1,),
    memory_limit=1e12,
    num_simulated=4,
)


@cache
def heavy_source(tied: bool = False) -> CountedSource:
    """Of a model with a heavy head, which training can spread over the ranks."""
    return CountedSource(replace(HEAVY, tied=tied), small_cluster(), "small", refusals={})


@cache
def planned(tied: bool = False, vocabulary: tuple[str, ...] | None = None) -> PlanReport:
    options = ONE_COLUMN.changed(vocabulary=vocabulary) if vocabulary else ONE_COLUMN
    return find_plan(ClusterProblem(heavy_source(tied), SEQ_LEN, 4, options=options))


@pytest.mark.parametrize("tied", first_of([True, False]))
def test_a_heavy_head_is_spread(tied: bool) -> None:
    """Where training can do it. All ranks together then hold as much as with a whole head, and each has its part of it;
    of tied weights there is one copy less."""
    model, spread = heavy_source(tied).model, planned(tied)
    whole = find_plan(ClusterProblem(source(model), SEQ_LEN, 4, options=ONE_COLUMN)).best
    best = spread.best
    assert (best.plan.vocabulary, whole.plan.vocabulary) == ("spread", "whole")
    assert best.step_seconds < 0.95 * whole.step_seconds
    (reason,) = (each for each in reasons(spread) if "vocabulary" in each.choices)
    assert "vocabulary whole" in str(reason)
    validate(spread.schedule)
    assert spread.schedule.spreads_embedding == tied
    after = best.step_seconds - spread.timeline.makespan
    assert after == pytest.approx(best.seconds_by_cause["optimizer"])
    costs = heavy_source(tied).costs(Degrees(), 1)
    number = costs.num_parameters(StageParts(0, len(heavy_source(tied).parts)))
    for kind, each in ((MemoryKind.PARAMETERS, 2), (MemoryKind.OPTIMIZER, 12)):
        assert sum(rank[kind] for rank in whole.memory) == pytest.approx(each * number)
        held = number - (model.head_weight if tied else 0)
        assert sum(rank[kind] for rank in best.memory) == pytest.approx(each * held)
        assert max(rank[kind] for rank in best.memory) < 0.7 * max(rank[kind] for rank in whole.memory)


@pytest.mark.more
def test_a_spread_vocabulary_is_pinned_or_open() -> None:
    found, spread, whole = planned(), planned(vocabulary=("spread",)), planned(vocabulary=("whole",))
    assert {each.plan.vocabulary for each in spread.predictions} == {"spread"}
    assert spread.best.step_seconds < 1.02 * found.best.step_seconds
    assert {each.plan.vocabulary for each in whole.predictions} == {"whole"}
    assert whole.best.step_seconds > found.best.step_seconds


@pytest.mark.parametrize(
    ("plan_source", "schedule", "words"),
    [
        (heavy_source(), ("1f1b",), "vocabulary=spread: it is planned together with cuts"),
        (source(HEAVY), ("1f1b", AUTO), r"vocabulary=spread can't be planned for small\. Counts don't say"),
    ],
)
def test_where_no_vocabulary_can_be_spread(plan_source: CountedSource, schedule: tuple[str, ...], words: str) -> None:
    options = ONE_COLUMN.changed(vocabulary=("spread",), schedule=schedule)
    with pytest.raises(SlipstreamError, match=words):
        find_plan(ClusterProblem(plan_source, SEQ_LEN, 4, options=options))


def test_no_head_is_spread_over_ranks_that_share_layers() -> None:
    options = ONE_COLUMN.changed(pipeline_parallel=(2,), tensor_parallel=(2,))
    plan = find_plan(ClusterProblem(heavy_source(), SEQ_LEN, 4, options=options))
    assert {each.plan.vocabulary for each in plan.predictions} == {"whole"}
