"""Measured costs of training all weights become those of training a part, as counted products say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from slipstream.cost import (
    LONE_UPDATE,
    NO_LINK,
    OPS,
    Amount,
    Costs,
    Degrees,
    Hardware,
    MeasuredCosts,
    MeasuredStage,
    ModelCount,
    ModelIdentity,
    OpCount,
    PartCount,
    PartlyTrained,
    Profile,
    StageParts,
    StateBytes,
    choose_stages,
    fit_times,
    memory_table,
    part_kinds,
)
from slipstream.planner.cuts import Cuts
from slipstream.planner.find_plan import find_plan
from slipstream.planner.joint import JointPlan, JointProblem, SlicedUnits
from slipstream.planner.ragged import fit_rates
from slipstream.schedule import BACKWARDS, Op
from slipstream.simulator import memory_of
from support.hand_made_plan import MODEL

LENGTH, LAYERS = 64, 6
SECONDS = {Op.F: 1.0, Op.B: 2.1, Op.I: 1.25, Op.W: 0.75}  # of a token in a layer; a head takes 0.4 of it
WEIGHTS = {"embedding": 0.0, "layer": 1.0, "head": 0.4}
NAMES = ("embedding", *["layer"] * LAYERS, "head")
WHOLE = replace(MODEL, kinds=(0,) * LAYERS)
STATE = StateBytes.of("float32")


def measured(stage: range) -> MeasuredStage:
    size = sum(WEIGHTS[NAMES[part]] for part in stage)
    points = [(length, context) for length in (1, 16, 64) for context in (0, 48) if length + context <= LENGTH]
    values = {op: {(i, j): SECONDS[op] * (size * i + 0.01) for i, j in points} for op in OPS}
    return MeasuredStage(
        first=stage.start,
        last=stage.stop - 1,
        fits={op: fit_times(values[op]) for op in OPS},
        points=dict.fromkeys(OPS, ()),
        activation_bytes=tuple((length, round(100 * size * length)) for length in (1, 16, 64)),
        context_bytes=8 * sum(NAMES[part] == "layer" for part in stage),
        context_gradient_bytes=16 * sum(NAMES[part] == "layer" for part in stage),
        num_parameters=200_000_000 * len(stage),
    )


PROFILE = Profile(
    hardware=Hardware("cpu", "a processor", cores=2, threads=1, processes=2),
    model=ModelIdentity("llama", LAYERS, 4096, 61, "abc"),
    versions={},
    dtype="float32",
    dtype_bytes=4,
    microbatch_size=1,
    seq_len=LENGTH,
    kinds=(0,) * LAYERS,
    kind_names=("layer",),
    units_per_layer=1,
    stages=tuple(map(measured, choose_stages(part_kinds((0,) * LAYERS, 1)))),
    optimizer_seconds=1e-9,
)


def partly_trained() -> ModelCount:
    """Embedding and three layers without a backward, then an adapter in each layer, whose products are 2% of it."""

    def frozen(part: PartCount, has_backward: bool, more: float = 0.0) -> PartCount:
        forward = part.ops[Op.F]
        added = OpCount(flops=Amount(0, more * forward.flops.per_token))
        full = replace(forward, flops=Amount(0, (1 + more) * forward.flops.per_token))
        ops = {Op.F: full, Op.I: full if has_backward else OpCount(), Op.W: added}
        adapter = round(more * part.num_parameters)
        calls = tuple(replace(call, has_gradient=has_backward) for call in part.attentions)
        sizes = {"num_parameters": part.num_parameters + adapter, "num_untrained": part.num_parameters}
        return replace(part, ops=ops, attentions=calls, has_backward=has_backward, **sizes)  # type: ignore[arg-type]

    layer = WHOLE.layers[0]
    return replace(
        WHOLE,
        kinds=(0, 0, 0, 1, 1, 1),
        layers=(frozen(layer, False), frozen(layer, True, 0.02)),
        embedding=frozen(WHOLE.embedding, False),
        head=frozen(WHOLE.head, True),
    )


def test_times_are_scaled_to_what_is_computed() -> None:
    everything = MeasuredCosts(PROFILE)
    costs = PartlyTrained(everything, WHOLE, partly_trained())
    assert costs.num_frozen_parts == 4
    assert costs.trains_below([0, 2, 4, 5, 8]).tolist() == [False, False, False, True, True]
    whole, sliced = (SlicedUnits(each, (32, 32), NO_LINK) for each in (everything, costs))
    before, now = ({op: each.seconds(op)[0] for op in OPS} for each in (whole, sliced))
    below, above, head = slice(0, 4), slice(4, 7), 7
    assert np.allclose(now[Op.F][below], before[Op.F][below])
    assert np.allclose(now[Op.F][above], 1.02 * before[Op.F][above])
    for op in (Op.B, Op.I, Op.W):
        assert not now[op][below].any()
    assert np.allclose(now[Op.I][above], 1.02 * before[Op.I][above])
    assert np.allclose(now[Op.W][above], 0.02 * before[Op.W][above])
    assert np.allclose(now[Op.B][above], (1.02 * 1.25 + 0.02 * 0.75) / 2 * before[Op.B][above])
    assert not now[Op.W][head].any()
    assert np.allclose(now[Op.I][head], before[Op.I][head])
    adapter = 3 * 4_000_000
    size = STATE.weights * (8 * 200_000_000 + adapter) + (STATE.gradients + STATE.optimizer) * adapter
    assert JointProblem(costs, LENGTH, num_ranks=2).state_sums[-1] == size
    single = tuple(range(len(NAMES) + 1))
    for recompute in ("none", "stage"):
        kept = SlicedUnits(costs, (32, 32), NO_LINK, recompute).stage_activations(single)
        assert kept[above].all()
        assert recompute == "stage" or np.allclose(kept[below], 0, atol=1e-9)


def test_of_experts_that_are_spread_a_rank_trains_its_own() -> None:
    """Half of a layer's weights, and of its adapter's, are those of experts, which are spread over two ranks."""
    million = 1_000_000

    def here(stage: MeasuredStage) -> MeasuredStage:
        elsewhere = 50 * million * sum(NAMES[part] == "layer" for part in stage.parts)
        return replace(stage, num_parameters=stage.num_parameters - elsewhere, num_in_experts=elsewhere)

    def mixture(part: PartCount) -> PartCount:
        trained = part.num_trained // 2
        return replace(
            part, num_in_experts=100 * million + trained * (part.num_untrained > 0), num_trained_in_experts=trained
        )

    whole, part = (replace(each, layers=tuple(map(mixture, each.layers))) for each in (WHOLE, partly_trained()))
    profile = replace(PROFILE, degrees=Degrees(experts=2), stages=tuple(map(here, PROFILE.stages)))
    rank, top = PartlyTrained(MeasuredCosts(profile), whole, part), range(3, 6)
    assert rank.num_parameters(top) == (3 * (100 + 50 + 2 + 1) + 200) * million  # with the head
    assert rank.num_trained(top) == 3 * (2 + 1) * million
    both = replace(LONE_UPDATE, copies=2, shard="optimizer")
    assert rank.num_optimized(top, both) == 3 * (1 + 1) * million  # an expert is on one of two ranks
    assert rank.optimizer_step_seconds(top, LONE_UPDATE) == profile.optimizer_seconds * rank.num_trained(top)


def planned(costs: Costs) -> JointPlan:
    return find_plan(JointProblem(costs, LENGTH, 2, 2, cuts=Cuts(16, longest_slice=32), effort=1e6))


def test_a_plan_has_another_cut_and_no_needless_backwards() -> None:
    everything = MeasuredCosts(PROFILE)
    costs = PartlyTrained(everything, WHOLE, partly_trained())
    for_all, plan = planned(everything), planned(costs)
    assert plan.partition != for_all.partition
    assert plan.ideal <= plan.bound <= plan.seconds < for_all.seconds
    ran = {action.stage for action in plan.schedule.positions if action.op in BACKWARDS}
    assert min(ran) == plan.schedule.num_frozen_stages > 0
    stages = StageParts.of_partition(plan.partition, LAYERS, 1)
    table = memory_table(costs, stages, plan.schedule, plan.slices, "none", LONE_UPDATE)
    whole = memory_table(everything, stages, plan.schedule, plan.slices, "none", LONE_UPDATE)
    adapter = 3 * 4_000_000
    assert sum(table.optimizer.values()) == STATE.optimizer * adapter
    assert sum({stage: size for (stage, _), size in table.gradients.items()}.values()) == STATE.gradients * adapter
    for g in range(plan.schedule.num_frozen_stages):
        assert table.context_gradients[g] == table.optimizer[g] == 0
        assert all(each.leaves == 0 for (unit, op), each in table.footprints.items() if unit.stage == g and op is Op.F)
    peaks = ([rank.peak for rank in memory_of(plan.schedule, each)] for each in (table, whole))
    assert all(less < more for less, more in zip(*peaks, strict=True))


def test_rates_know_stages_without_backwards_and_forwards_that_run_again() -> None:
    costs = PartlyTrained(MeasuredCosts(PROFILE), WHOLE, partly_trained())
    once, again = (
        fit_rates(costs, [3, 3], Cuts(16, 32), LENGTH, recompute=recompute).rates for recompute in ("none", "stage")
    )
    for op in (Op.B, Op.I, Op.W):
        assert once[op][1].any()
        assert not once[op][0].any()
        assert not again[op][0].any()
    assert np.allclose(again[Op.F], once[Op.F])
    assert np.allclose(again[Op.W], once[Op.W])
    features = np.stack([np.ones(2), [32, 16], [528, 136]])  # of slices: their tokens and scores
    forward = once[Op.F][1] @ features
    for op in (Op.B, Op.I):
        assert np.allclose(again[op][1] @ features, once[op][1] @ features + forward, rtol=0.02)
