"""What a training system does decides its costs: kernels, passes, and what hides its exchanges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import LlamaConfig

from slipstream.cost import (
    SLIPSTREAM,
    Copies,
    CountedCosts,
    CountedSource,
    Degrees,
    ExpertRuns,
    ModelCount,
    ReplicaExchange,
    StateBytes,
    System,
    Update,
    Work,
    load_cluster,
)
from slipstream.errors import SlipstreamError
from slipstream.planner.plan import ONE_DEVICE
from slipstream.planner.search.plan_options import PlanOptions
from slipstream.planner.search.plan_space import PlanSpace
from slipstream.profile import count_model
from slipstream.schedule import Op
from support.architectures import ARCHITECTURES

CLUSTER = load_cluster("h100-dgx").with_nodes(4)
LENGTH = 16384
SHARED = Degrees(2)
STATE = StateBytes.of("bfloat16")


@pytest.fixture(scope="module")
def model() -> ModelCount:
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32, vocab_size=32000
    )
    return count_model(config, LENGTH)


def costs(model: ModelCount, degrees: Degrees = SHARED, **facts: Any) -> CountedCosts:
    source = CountedSource(model, CLUSTER, "a model", system=replace(SLIPSTREAM, **facts))
    found = source.costs(degrees, 1)
    assert isinstance(found, CountedCosts)
    return found


def seconds(model: ModelCount, op: Op, **facts: Any) -> float:
    return float(costs(model, **facts).seconds(model.whole, op, LENGTH, 0))


def test_kernels(model: ModelCount) -> None:
    usual = {op: seconds(model, op) for op in (Op.F, Op.I, Op.W)}
    assert seconds(model, Op.F, attention_time=2.0) > usual[Op.F] > seconds(model, Op.F, attention_bits=8)
    assert seconds(model, Op.F, writes_scores=True) > usual[Op.F]
    assert seconds(model, Op.W, adds_in_products=True) < usual[Op.W]
    assert seconds(model, Op.F, adds_in_products=True) == usual[Op.F]
    for op, whole in usual.items():
        assert seconds(model, op, product_bits=8) < whole
        assert seconds(model, op, runs_ahead=False) > whole


def test_products_in_few_bits_need_a_peak(model: ModelCount) -> None:
    message = r"products in float4 have no peak on NVIDIA H100.*known: float8.*device\.narrow_flops"
    with pytest.raises(SlipstreamError, match=message):
        costs(model, product_bits=4)


def test_selective_recomputation_repeats_what_the_system_says(model: ModelCount) -> None:
    repeated = {
        what: float(costs(model, selective=what).each_selective_replay(_whole(Op.F)).sum())
        for what in ("kernels", "scores", "half")
    }
    assert 0 < repeated["kernels"] < repeated["half"]
    assert repeated["scores"] > 0


def _whole(op: Op) -> Any:
    return Work.of_slices(op, (LENGTH,))


def test_exchanges_of_tensor_parallel_ranks_are_hidden_by_products(model: ModelCount) -> None:
    exposed, beside = seconds(model, Op.I), seconds(model, Op.I, tensor_beside="products")
    assert beside < exposed
    assert seconds(model, Op.I, tensor_beside="weights") < exposed
    assert seconds(model, Op.F, tensor_beside="weights") == seconds(model, Op.F)
    alone = costs(model, Degrees(), tensor_beside="products").seconds(model.whole, Op.F, LENGTH, 0)
    assert alone == costs(model, Degrees()).seconds(model.whole, Op.F, LENGTH, 0)


def update(copies: int, num_microbatches: int = 4) -> Update:
    return Update(STATE, copies, "optimizer", seq_len=LENGTH, num_microbatches=num_microbatches)


def test_exchanges_of_replicas_are_hidden_by_passes_down_to_those_of_a_part(model: ModelCount) -> None:
    plain, beside = (costs(model, Degrees(), replicas=ReplicaExchange(beside_passes=b)) for b in (False, True))
    for name in ("gradient_seconds", "gather_seconds"):
        whole, left = (getattr(each, name)(model.whole, update(8)) for each in (plain, beside))
        assert whole / len(model.parts) <= left < whole


def test_gathering_for_every_pass_counts_every_pass(model: ModelCount) -> None:
    once, each = (costs(model, Degrees(), replicas=ReplicaExchange(each_microbatch=e)) for e in (False, True))
    assert each.gather_seconds(model.whole, update(8)) == pytest.approx(8 * once.gather_seconds(model.whole, update(8)))
    assert each.gradient_seconds(model.whole, update(8)) == pytest.approx(
        4 * once.gradient_seconds(model.whole, update(8))
    )


def test_few_ranks_that_share_a_state_exchange_less_between_nodes(model: ModelCount) -> None:
    of_all, of_node = (costs(model, Degrees(), replicas=ReplicaExchange(num_sharing=n)) for n in (None, 8))
    assert of_node.gather_seconds(model.whole, update(32)) < of_all.gather_seconds(model.whole, update(32))
    assert of_node.gradient_seconds(model.whole, update(8)) == of_all.gradient_seconds(model.whole, update(8))


def test_rings_between_nodes_take_50_microseconds_a_step_of_each_bucket(model: ModelCount) -> None:
    def more(size: int, num_buckets: int = 1) -> float:
        replicas = ReplicaExchange(bucket_bytes=1e9 / num_buckets)
        found = costs(model, Degrees(), replicas=replicas).gathering_seconds(1e9, Copies(size, 1))
        return found - float(CLUSTER.exchange_seconds(1e9, size))

    assert more(8) == 0
    assert more(16) == pytest.approx(15 * 50e-6)
    assert more(32) == pytest.approx(31 * 50e-6)
    assert more(16, 3) == pytest.approx(45 * 50e-6)


def test_a_tensor_larger_than_a_bucket_is_exchanged_by_itself(model: ModelCount) -> None:
    """A layer's nine tensors have 2 bytes for each of 218 million parameters, but two norms: 48 MB on average."""
    (layer,) = model.layers
    assert layer.num_trained_tensors == 9
    mean = 2 * layer.num_trained / 9
    taken = [
        costs(model, Degrees(), replicas=ReplicaExchange(bucket_bytes=size)).gathering_seconds(1e9, Copies(16, 1))
        for size in (1.0, mean, 2 * mean)
    ]
    assert taken[0] == taken[1] > taken[2]


def test_experts_run_as_the_system_says() -> None:
    counted = count_model(ARCHITECTURES["mixtral"], 64)
    degrees = Degrees(experts=2)

    def taken(**facts: Any) -> float:
        found = costs(counted, degrees, experts=ExpertRuns(**facts))
        device = replace(CLUSTER.device, layer_seconds=0.0, kernel_seconds=0.0)
        return float(replace(found, cluster=replace(CLUSTER, device=device)).seconds(counted.whole, Op.F, 64, 0))

    assert taken(sends="devices") <= taken()
    assert taken(launches=1.0) >= 2.0 > taken()
    assert taken(part_of_tile=10**6) > taken()
    assert taken(beside_passes=True) <= taken()


def test_a_plan_of_another_system_has_whole_backwards_and_replays_every_slice(model: ModelCount) -> None:
    plan = replace(ONE_DEVICE, pipeline_parallel=2, schedule="1f1b", num_slices=2, recompute="stage")
    found = {}
    for whole in (False, True):
        system = System("another", whole_backwards=whole)
        source = CountedSource(model, CLUSTER, "a model", system=system)
        evaluation = PlanSpace(source, LENGTH, 2, PlanOptions()).evaluate(plan)
        found[whole] = evaluation.schedule
        assert evaluation.seconds > 0
    assert Op.W in found[False].ops
    assert Op.W not in found[True].ops
    count = [sum(action.op is Op.R for row in schedule.actions for action in row) for schedule in found.values()]
    assert count[0] < count[1] == 8
