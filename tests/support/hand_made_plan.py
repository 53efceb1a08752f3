"""Plans put together by hand from real schedules, costs and simulations: what tests of tables and reports are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from slipstream.cost import (
    Amount,
    AttentionCall,
    AttentionWindow,
    CountedCosts,
    ModelCount,
    OpCount,
    PartCount,
    load_cluster,
)
from slipstream.planner.plan import ONE_DEVICE
from slipstream.planner.plan_report import Alternative, PlanReport, Prediction
from slipstream.schedule import Op, Schedule, make_schedule
from slipstream.simulator import MemoryKind, TableCost, simulate
from slipstream.timeline import Timeline, idle_by_cause

SEQ_LEN = 4096
NUM_LAYERS = 16
_PRODUCTS = OpCount(flops=Amount(0, 4e8), matmul_bytes=Amount(4e8, 0), num_matmuls=7, num_kernels=20)
_CALL = AttentionCall(num_heads=32, num_key_value_heads=8, key_width=128, value_width=128, window=AttentionWindow())


def _part(name: str, ops: OpCount, attentions: tuple[AttentionCall, ...] = ()) -> PartCount:
    return PartCount(name, 200_000_000, dict.fromkeys((Op.F, Op.I, Op.W), ops), attentions, 2e5)


MODEL = ModelCount(
    kinds=(0,) * NUM_LAYERS,
    layers=(_part("layer", _PRODUCTS, (_CALL,)),),
    embedding=_part("embedding", OpCount()),
    head=_part("head", _PRODUCTS),
    hidden_size=4096,
    dtype="bfloat16",
    dtype_bytes=2,
)


def stages_of(partition: Sequence[int]) -> list[range]:
    """The layers of every stage from how many each has."""
    return [range(a, b) for a, b in pairwise(accumulate(partition, initial=0))]


def pipeline_cost(costs: CountedCosts, partition: Sequence[int], slices: Sequence[int]) -> TableCost:
    """The simulator's costs: times and activations of every stage and slice, and messages."""
    units = [
        (stage, layers, index, length, sum(slices[:index]))
        for stage, layers in enumerate(stages_of(partition))
        for index, length in enumerate(slices)
    ]
    times = {
        (stage, index, op): float(costs.seconds(layers, op, length, context))
        for stage, layers, index, length, context in units
        for op in (Op.F, Op.B)
    }
    activations = {(g, s): costs.activation_bytes(layers, length) for g, layers, s, length, _ in units}
    return replace(costs.action_costs(times, slices), activations=activations)


def make_plan(num_ranks: int = 4, num_slices: int = 4, num_microbatches: int = 2, **changes: object) -> PlanReport:
    """1f1b with slices above gpipe and above whole sequences; `changes` replace fields of the plan."""
    best, schedule, timeline = _predict("1f1b", num_ranks, num_slices, num_microbatches)
    second, *_ = _predict("gpipe", num_ranks, num_slices, num_microbatches)
    third, *_ = _predict("1f1b", num_ranks, 1, num_microbatches)
    fields: dict[str, object] = {
        "model": "llama <16 layers> & more",
        "cluster": "h100-dgx",
        "num_devices": num_ranks,
        "dtype": "bfloat16",
        "seq_len": SEQ_LEN,
        "global_batch": num_microbatches,
        "predictions": (best, second, third),
        "alternatives": (Alternative("schedule", second), Alternative("num_slices", third)),
        "simulated": lambda: (schedule, timeline),
        "num_meshes": 9,
        "num_bounded_meshes": 7,
        "num_configurations": 12_345,
        "num_too_large": 678,
        "num_simulated": 3,
        "gap": 0.0123,
        "seconds": 1.5,
        "notes": ("Times are <computed>, not measured.",),
    }
    return PlanReport(**fields | changes)  # type: ignore[arg-type]


def _predict(
    name: str, num_ranks: int, num_slices: int, num_microbatches: int
) -> tuple[Prediction, Schedule, Timeline]:
    schedule = make_schedule(name, num_ranks, num_microbatches, num_slices)
    costs = CountedCosts(MODEL, load_cluster("h100-dgx"))
    partition = tuple(NUM_LAYERS * (r + 1) // num_ranks - NUM_LAYERS * r // num_ranks for r in range(num_ranks))
    slices = (SEQ_LEN - (num_slices - 1) * (SEQ_LEN // num_slices), *(SEQ_LEN // num_slices,) * (num_slices - 1))
    timeline = simulate(schedule, pipeline_cost(costs, partition, slices))
    last = num_ranks - 1
    causes = {"computing": timeline.busy(last)}
    causes |= {f"waiting: {cause}": seconds for cause, seconds in idle_by_cause(timeline)[last].items()}
    memory = tuple(
        {
            MemoryKind.PARAMETERS: 2 * costs.num_parameters(stage),
            MemoryKind.OPTIMIZER: 12 * costs.num_parameters(stage),
            MemoryKind.ACTIVATIONS: peak,
        }
        for stage, peak in zip(stages_of(partition), timeline.peak_memory, strict=True)
    )
    prediction = Prediction(
        plan=replace(
            ONE_DEVICE,
            pipeline_parallel=num_ranks,
            schedule=name,
            num_slices=num_slices,
            num_microbatches=num_microbatches,
            placement=schedule.placement,
            partition=partition,
            slices=slices,
        ),
        step_seconds=timeline.makespan,
        tokens_per_second=SEQ_LEN * num_microbatches / timeline.makespan,
        mfu=0.4321,
        idle_fraction=timeline.idle_fraction,
        seconds_by_cause=causes,
        memory=memory,
        memory_limit=80e9,
    )
    return prediction, schedule, timeline
