"""What a plan takes is what a pipeline runs; no simulation beats a bound; what fits is never left out."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import islice, product

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream.cost import CountedCosts, CountedSource, Degrees, ModelCount, partition_of
from slipstream.planner.find_plan import find_plan
from slipstream.planner.plan import ONE_DEVICE, Plan
from slipstream.planner.search import ClusterProblem
from slipstream.planner.search import bounds as search_bounds
from slipstream.planner.search.bounds import MemoryBound
from slipstream.planner.search.evaluate import Evaluation, GlobalBatch, evaluate
from slipstream.planner.search.frontier import Frontier
from slipstream.planner.search.placed_partition import PlacedPartition
from slipstream.planner.search.plan_options import PlanOptions
from slipstream.planner.search.plan_space import PlanSpace
from slipstream.planner.search.savings import SAVINGS, copies_of, never_slower
from slipstream.planner.search.schedule_shape import NewestResults, ScheduleShape
from slipstream.profile import count_model
from slipstream.schedule import SCHEDULES, Op, make_schedule
from slipstream.schedule.lowering import add_reductions
from slipstream.simulator import MemoryKind, StageSlice, memory_of, simulate
from slipstream.simulator.memory_account import order_bytes
from support.architectures import llama
from support.examples import examples
from support.parameters import each_once
from support.pipelines import computed_rows, make_pipe
from support.small_clusters import SEQ_LEN, SMALL, small_cluster, source, with_frozen

MODELS = SMALL, with_frozen(SMALL, 4)
ON_HOST = 3  # the number of the bounds of plans whose optimizer is on the host


def simulated(plan: Plan, plan_source: CountedSource | None = None, global_batch: int = 8) -> Evaluation:
    return space_of(plan_source, global_batch).evaluate(plan)


def space_of(plan_source: CountedSource | None = None, global_batch: int = 8) -> PlanSpace:
    return PlanSpace(plan_source or source(), SEQ_LEN, global_batch, PlanOptions())


@cache
def bounds(number: int) -> tuple[PlanSpace, list[tuple[float, float, Plan]]]:
    slow = replace(small_cluster(), host=replace(small_cluster().host, bandwidth=1e7))
    model, cluster = ((MODELS[0], None), (MODELS[1], None), (MODELS[0], slow), (MODELS[0], None))[number]
    shard = ("none", "optimizer", "parameters")
    options = PlanOptions(stages_per_rank=(1, 2, 3), num_slices=(1, 2, 3, 4), shard=shard)
    if number == ON_HOST:
        options = options.changed(shard=shard[:2], optimizer=("host",))
    space = PlanSpace(source(model, cluster=cluster), SEQ_LEN, 8, options)
    exact = PlanSpace(
        source(model, cluster=cluster), SEQ_LEN, 8, PlanOptions(stages_per_rank=(1, 2, 3), slicing=("exact",))
    )
    return space, [*space.bounded(), *exact.bounded()]


@examples(60)
@given(choice=st.integers(0, 10**9), number=st.integers(0, ON_HOST))  # 2: copies to the host take long
@example(choice=1988684, number=1)  # one microbatch, whose last slice no rank computes again
def test_no_simulation_beats_a_bound(choice: int, number: int) -> None:
    space, found = bounds(number)
    seconds, size, plan = found[choice % len(found)]
    candidate = space.evaluate(plan)
    prediction = space.predict(candidate)
    assert prediction.step_seconds >= seconds * (1 - 1e-9)
    mesh = plan.mesh
    assert prediction.step_seconds >= space.least_seconds(mesh) * (1 - 1e-9)
    assert max(candidate.peaks()) >= space.mean_state(mesh) * (1 - 1e-9)
    assert max(candidate.peaks()) >= size * (1 - 1e-9) or size == float("inf")
    assert prediction.peak_memory == pytest.approx(max(candidate.peaks()), rel=1e-12)
    assert sum(prediction.seconds_by_cause.values()) == pytest.approx(prediction.step_seconds)
    assert min(prediction.seconds_by_cause.values()) >= -1e-12


@examples(25)
@given(choice=st.integers(0, 10**9), number=st.sampled_from([0, 2, ON_HOST]))
def test_what_saves_less_memory_is_never_slower(choice: int, number: int) -> None:
    """As each way to save memory says it of its values, where nothing is copied to a slow host meanwhile."""
    space, found = bounds(number)
    plan = found[choice % len(found)][2]
    seconds = space.evaluate(plan).seconds
    others = [*never_slower(plan)]
    assert all(space.evaluate(other).seconds <= seconds * (1 + 1e-9) for other in others if not any(copies_of(other)))
    assert {name for other in others for name in plan.differences(other)} <= {saving.choice for saving in SAVINGS}


def test_a_bound_has_the_copies_to_the_host_and_back() -> None:
    """A step that copies most of the time is little longer than its bound, which knows those that nothing can save."""
    space, found = bounds(2)
    exact = replace(
        ONE_DEVICE,
        pipeline_parallel=2,
        data_parallel=2,
        stages_per_rank=2,
        schedule="v-min",
        microbatch_size=2,
        offload=1.0,
        shard="optimizer",
        slicing="exact",
    )
    bound, plan = next((seconds, c) for seconds, _, c in found if replace(c, num_slices=1) == exact)
    assert 1 < space.predict(space.evaluate(plan)).step_seconds / bound < 1.15


@pytest.mark.parametrize("number", [0, 1])
def test_the_most_promising_come_first(number: int) -> None:
    """Of all that may fit, and of those with another schedule, by the bounds that they have by themselves."""
    space, found = bounds(number)
    bound = {plan: seconds for seconds, _, plan in found if seconds}
    frontier = Frontier(space, lambda *_: None)
    first = [*frontier.starting(0)]
    assert [seconds for seconds, _ in first] == sorted(seconds for seconds, _ in first)
    assert all(bound.get(plan, seconds) == seconds for seconds, plan in first)
    others = [*islice(frontier.others("schedule", "1f1b"), 100)]
    assert "1f1b" not in {plan.schedule for plan in others}
    assert [bound[c] for c in others if c in bound] == sorted(bound[c] for c in others if c in bound)


@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("1f1b", 1), ("interleaved-1f1b", 2), ("zb-v", 2)])
@pytest.mark.parametrize("shard", ["optimizer", "none"])
def test_gradients_are_reduced_where_a_run_reduces_them(schedule: str, stages_per_rank: int, shard: str) -> None:
    """From REDUCE_GRAD's place on, one after the other; so a rank waits for those of its first stage at least."""
    space, _ = bounds(0)
    plan = replace(
        ONE_DEVICE,
        pipeline_parallel=2,
        data_parallel=2,
        stages_per_rank=stages_per_rank,
        schedule=schedule,
        num_slices=2,
        shard=shard,
    )
    candidate = space.evaluate(plan)
    ends = {span.action: span.end for span in simulate(candidate.schedule, candidate.cost).spans}
    seconds = [candidate.cut.costs.gradient_seconds(stage, candidate.update) for stage in candidate.cut.stages]
    waits, sums = [], []
    for row in add_reductions(candidate.schedule).actions:
        now = free = 0.0
        for action in row:
            now = ends.get(action, now)
            if action.op is Op.REDUCE_GRAD:
                free = max(free, now) + seconds[action.stage]
        waits.append(free - now)
        sums.append(sum(seconds[action.stage] for action in row if action.op is Op.REDUCE_GRAD))
    causes, (_, gathered, optimizer) = candidate.causes, space.tails(plan)
    last = [max(ends[action] for action in row) for row in candidate.schedule.actions]
    assert candidate.seconds == pytest.approx(max(np.array(last) + waits + gathered + optimizer))
    assert any(causes["gradient reduction"] == pytest.approx(wait) for wait in waits)
    assert (sum(waits) < 0.99 * sum(sums)) == (stages_per_rank > 1)
    assert (causes["weight gathering"] > 0) == (shard != "none")


def test_a_step_waits_for_copies_that_the_devices_of_a_node_make_together() -> None:
    """Over a slow link it takes longer than all copies to the host and back, and over one of two devices as long."""
    links = {"bandwidth": 1e13}, {"bandwidth": 1e8}, {"bandwidth": 2e8, "shared_by": 2}
    clusters = [replace(small_cluster(), host=replace(small_cluster().host, **link)) for link in links]
    plan = replace(ONE_DEVICE, pipeline_parallel=2, data_parallel=2, num_slices=2, offload=1.0)
    fast, slow, shared = (simulated(plan, source(cluster=cluster)) for cluster in clusters)
    assert fast.causes["offload"] == pytest.approx(0, abs=1e-6)
    copied = sum(slow.cost.copy_seconds(a) for a in slow.schedule.actions[0] if a.op in (Op.OFFLOAD, Op.RELOAD))
    assert copied < slow.seconds < fast.seconds + copied
    assert slow.causes["offload"] == pytest.approx(slow.seconds - fast.seconds)
    assert shared.seconds == pytest.approx(slow.seconds)


@examples(60)
@given(choice=st.integers(0, 10**9), spare=st.sampled_from((1e-9, 1e-2)), number=st.sampled_from([0, 1, ON_HOST]))
@example(choice=20921, spare=1e-9, number=1)  # whose slices are back on the device long before their W
def test_the_quick_test_of_memory_fails_nothing_that_fits(choice: int, spare: float, number: int) -> None:
    """Not even where device and host have just the memory that the plan takes without messages."""
    space, found = bounds(number)
    _, _, plan = found[choice % len(found)]
    candidate = space.evaluate(plan)
    silent = order_bytes(candidate.arrays, replace(candidate.table, message_bytes=()))
    peaks, away = silent.rank_peaks(), silent.host_peaks()
    assert max(peaks) <= max(candidate.peaks())
    cluster = small_cluster()
    cluster = replace(cluster, device=replace(cluster.device, host_memory=max(away) * (1 + spare)))
    limited = PlanSpace(
        source(MODELS[number == 1], cluster), SEQ_LEN, 8, PlanOptions(memory_limit=max(peaks) * (1 + spare))
    )
    assert limited.may_fit(plan)


@pytest.mark.parametrize(
    ("recompute", "offload", "shard", "optimizer"),
    [("none", 0.0, "none", "device"), ("stage+full", 0.5, "optimizer", "host")],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_plan_is_evaluated_without_a_search(
    schedule: str, recompute: str, offload: float, shard: str, optimizer: str
) -> None:
    """By what it decides alone: seconds, their causes, and the peaks of devices and hosts."""
    plan, space = (
        replace(
            ONE_DEVICE,
            pipeline_parallel=2,
            data_parallel=2,
            schedule=schedule,
            num_slices=4,
            recompute=recompute,
            offload=offload,
            shard=shard,
            optimizer=optimizer,
        ),
        space_of(),
    )
    found, source_of = space.evaluate(plan), space.source
    costs = space.costs(plan.degrees, plan.microbatch_size)
    alone = evaluate(space.predict(found).plan, costs, GlobalBatch(SEQ_LEN, 8), source_of.state, source_of.host)
    assert alone.causes == found.causes
    assert (alone.seconds, alone.peaks(), alone.host_peaks()) == (found.seconds, found.peaks(), found.host_peaks())


def test_its_memory_is_that_of_the_schedule_that_runs() -> None:
    """Counted too: rank 0 of two runs a forward of the next microbatch for each backward of the one before."""
    candidate = simulated(replace(ONE_DEVICE, pipeline_parallel=2, data_parallel=2, num_slices=4, shard="optimizer"))
    ranks = memory_of(candidate.schedule, candidate.table)
    assert [sum(kinds.values()) for kinds in candidate.memory()] == [sum(rank.worst.during.values()) for rank in ranks]
    slices, costs = candidate.times.slices, space_of().costs(Degrees(), 1)
    tokens = max(sum(slices[: 4 - k]) + sum(slices[: k + 1]) for k in range(4))
    most = max(moment.during[MemoryKind.ACTIVATIONS] for moment in ranks[0].moments)
    assert most == pytest.approx(costs.activation_bytes(candidate.cut.stages[0], tokens))


@pytest.mark.parametrize("model", [SMALL, replace(SMALL, tied=True)])
def test_gradients_that_go_to_the_host_make_room_for_those_of_other_stages(model: ModelCount) -> None:
    """Stage by stage, in an order that ends one before it begins the next; but those of tied weights stay."""
    plan = replace(ONE_DEVICE, pipeline_parallel=2, data_parallel=2, stages_per_rank=2, num_slices=4)
    held = {}
    for place in ("device", "host"):
        candidate = simulated(replace(plan, schedule="breadth-first", optimizer=place), source(model), 2)
        ranks = memory_of(candidate.schedule, candidate.table)
        held[place] = [max(moment.during[MemoryKind.GRADIENTS] for moment in rank.moments) for rank in ranks]
        np.testing.assert_allclose([rank.peak for rank in ranks], candidate.bytes.rank_peaks())
        made = [4 * candidate.cut.costs.num_trained(stage) for stage in candidate.cut.stages]
    head = 4 * candidate.cut.costs.num_head_weights
    assert held["device"] == pytest.approx([made[0] + made[2], made[1] + made[3]])
    of_last = made[1] + head if model.tied else max(made[1], made[3])
    assert held["host"] == pytest.approx([max(made[0], made[2]), of_last])


def test_exact_slicings_are_of_pipelines_and_differ_from_the_others() -> None:
    space = PlanSpace(source(), SEQ_LEN, 8, PlanOptions())
    found: dict[Plan, set[tuple[int, ...]]] = {}
    for _, _, c in space.bounded():
        alike = replace(c, num_slices=1, slicing="equal-time")
        slices = space.slices(c)
        assert len(slices) == c.num_slices
        assert slices not in found.setdefault(alike, set())
        assert c.pipeline_parallel > 1 or c.slicing == "equal-time"
        found[alike].add(slices)


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


def test_a_twentieth_of_a_device_is_left_to_what_is_not_counted() -> None:
    one = source(cluster=small_cluster(1, 1, memory=1e9))
    for limit, memory in ((None, 0.95e9), (1e9, 1e9)):
        assert PlanSpace(one, SEQ_LEN, 8, PlanOptions(memory_limit=limit)).memory == memory


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
        plan = replace(
            ONE_DEVICE,
            pipeline_parallel=3,
            data_parallel=2,
            stages_per_rank=stages,
            schedule=schedule,
            num_slices=4,
            recompute=recompute,
            offload=offload,
            shard="optimizer",
        )
        few, whole = (kind(plan) for kind in (space.evaluate_in_part, space.evaluate))
        assert 3 * len(few.arrays.op) < len(whole.arrays.op)
        assert few.seconds == pytest.approx(whole.seconds, rel=1e-3)
        assert sum(few.causes.values()) == pytest.approx(few.seconds)
        assert few.causes == pytest.approx(whole.causes, abs=2e-3 * whole.seconds)
        assert few.peaks() == pytest.approx(whole.peaks(), rel=1e-6)
        assert few.host_peaks() == pytest.approx(whole.host_peaks(), rel=1e-6)
        first, second = space.predict(few), space.predict(whole)
        assert first.plan.num_microbatches == 400 // stages
        assert first.peak_memory == pytest.approx(second.peak_memory, rel=1e-6)
        assert first.idle_fraction == pytest.approx(second.idle_fraction, abs=1e-3)


def test_equal_layers_are_cut_evenly_by_time() -> None:
    space = PlanSpace(source(), SEQ_LEN, 8, PlanOptions())
    plan = replace(ONE_DEVICE, pipeline_parallel=2, data_parallel=2)
    times = space.times(plan).compute
    per_rank = space.cut(plan).per_rank((times[Op.F] + times[Op.I] + times[Op.W]).sum(axis=1))
    one = sum(float(space.costs(Degrees(), 1).seconds(range(2, 3), op, SEQ_LEN, 0)) for op in (Op.F, Op.I, Op.W))
    assert np.ptp(per_rank) <= one


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_the_gradient_of_the_logits_is_there_while_the_last_stage_goes_backward(tensor_parallel: int) -> None:
    """In float32, of the rank's part of the vocabulary. Two equal stages otherwise."""
    vocabulary = SMALL.head_weight // SMALL.hidden_size
    plan = replace(ONE_DEVICE, tensor_parallel=tensor_parallel, pipeline_parallel=2, microbatch_size=2, num_slices=4)
    candidate = simulated(plan, source(cluster=small_cluster(1)), global_batch=4)
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
    plan = replace(
        ONE_DEVICE,
        pipeline_parallel=2,
        stages_per_rank=stages_per_rank,
        schedule=schedule,
        num_slices=3,
        recompute=recompute,
    )
    candidate = simulated(plan, source(cluster=small_cluster(1)), global_batch=4)
    pipe = make_pipe(
        llama(num_hidden_layers=4),
        schedule=schedule,
        num_ranks=2,
        stages_per_rank=stages_per_rank,
        num_microbatches=4,
        slices=3,
        recompute=recompute,
    )
    assert [*map(list, candidate.schedule.actions)] == computed_rows(pipe)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_named_order_is_simulated_without_an_object_for_each_action(schedule: str) -> None:
    stages_per_rank = 2 if 2 in SCHEDULES[schedule].stages_per_rank else 1
    plan, space = (
        replace(
            ONE_DEVICE,
            pipeline_parallel=2,
            stages_per_rank=stages_per_rank,
            schedule=schedule,
            num_slices=8,
            recompute="stage",
            offload=0.5,
        ),
        space_of(),
    )
    candidate = space.evaluate(plan)
    assert space.may_fit(plan)
    assert space.fits(candidate)
    assert candidate.seconds > 0
    assert candidate.schedule.ops >= {Op.F, Op.R, Op.OFFLOAD, Op.RELOAD}
    assert "_rows" not in vars(candidate.schedule.actions)


def test_layers_that_are_recomputed_one_by_one() -> None:
    """On one device, one slice: a forward of the layers longer, and of the activations what enters them and one's."""
    one = source(cluster=small_cluster(1, 1))
    none, full, stage = (
        simulated(replace(ONE_DEVICE, recompute=recompute), one, global_batch=2)
        for recompute in ("none", "full", "stage")
    )
    layers = full.cut.costs.seconds(range(1, 5), Op.F, SEQ_LEN, 0) - full.cut.costs.cluster.device.action_seconds
    assert full.seconds - none.seconds == pytest.approx(2 * layers * 6 / 4)  # of two sequences, SMALL has 6 layers
    assert full.causes["recomputation"] == pytest.approx(2 * layers * 6 / 4)
    assert stage.peaks() == none.peaks()  # as each backward follows its forward
    assert full.peaks()[0] < 0.8 * none.peaks()[0]
    limit = (full.peaks()[0] + none.peaks()[0]) / 2
    options = PlanOptions(memory_limit=limit, offload=(0.0,), num_slices=(1,))
    assert find_plan(ClusterProblem(one, SEQ_LEN, 2, options=options)).best.plan.recompute == "full"


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 1), ("zb-v", 2)])
def test_a_plan_of_frozen_layers_is_cut_for_what_runs(schedule: str, stages: int) -> None:
    """Five frozen layers of six: the first stage gets more of them, and runs forwards alone, as in the Pipeline."""
    partly, plan = (
        with_frozen(SMALL, 5),
        replace(ONE_DEVICE, pipeline_parallel=2, stages_per_rank=stages, schedule=schedule, num_slices=3),
    )
    frozen, whole = (simulated(plan, source(model, small_cluster(1)), 4) for model in (partly, SMALL))
    assert frozen.seconds < whole.seconds
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
    assert frozen.schedule.num_frozen_stages == pipe.layout.num_frozen_stages > 0
    assert [*map(list, frozen.schedule.actions)] == computed_rows(pipe)
    trained = partly.layers[1].num_parameters + partly.head.num_parameters
    state, table = frozen.update.state, frozen.table
    assert sum(table.optimizer.values()) == state.optimizer * trained
    assert sum(size for (_, op), size in table.gradients.items() if op is not Op.I) == state.gradients * trained
    assert sum(table.parameters.values()) == state.weights * partly.num_parameters
    if stages == 1:
        # The cut for training everything is slower.
        assert frozen.cut.bounds[1] > whole.cut.bounds[1]
        space = space_of(source(partly, small_cluster(1)), 4)
        moved = replace(space.predict(frozen).plan, partition=partition_of(whole.cut.bounds, 1))
        assert evaluate(moved, frozen.cut.costs, GlobalBatch(SEQ_LEN, 4), state).seconds > frozen.seconds


def test_halves_of_two_layers_keep_what_enters_both() -> None:
    """Where layers are recomputed one by one; the halves of one layer keep only what enters that."""
    counted = CountedSource(count_model(llama(), SEQ_LEN, torch.float16), small_cluster(1), "llama")
    space = PlanSpace(counted, SEQ_LEN, 2, PlanOptions())
    costs, kept = space.costs(Degrees(), 1), partial(CountedCosts.kept_bytes, recompute="full", length=SEQ_LEN)
    cut = PlacedPartition(costs, tuple(range(5)), (0, 1, 3, 4, 6, 10))
    assert cut.per_stage(partial(kept, costs)).tolist() == [kept(costs, stage) for stage in cut.stages]
    assert kept(costs, cut.stages[3]) == 2 * kept(costs, cut.stages[1])
    assert len({*map(space.alike, cut.stages)}) == 5
