"""The units' analytic costs add up: halves to layers, units to stages and to the whole model, at any degree."""

from __future__ import annotations

from functools import cache
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.cost import OPS, AnalyticCosts, ModelCount, StageParts, StateBytes, load_cluster, partition_of
from slipstream.planner.joint import AnalyticUnits
from slipstream.planner.joint.unit_costs import SlicedUnits
from slipstream.profile import count_model
from slipstream.schedule import Action, Op
from support.architectures import ARCHITECTURES
from support.examples import examples
from support.parameters import first_of

SEQ_LEN = 128
NAMES = ["llama", "gpt2", "mixtral", "gemma2", "gpt_neox"]


@cache
def counted(name: str) -> ModelCount:
    return count_model(ARCHITECTURES[name], 64)


@pytest.mark.parametrize("name", first_of(["llama", "gpt_neox", "gpt2", "mixtral", "gemma2"], 2))
def test_the_counts_of_halves_add_up_to_those_of_the_layer(name: str) -> None:
    model = counted(name)
    assert model.units_per_layer == (1 if name == "gpt_neox" else 2)  # whose halves both start from one input
    for whole, (attention, feed_forward) in zip(model.layers if model.halves else (), model.halves, strict=True):
        for size in ("num_parameters", "activation_bytes", "product_bytes"):
            assert getattr(attention, size) + getattr(feed_forward, size) == getattr(whole, size)
        for op, count in whole.ops.items():
            for amount in ("flops", "matmul_bytes", "wide_bytes", "other_bytes"):
                halves = [getattr(half.ops[op], amount) for half in (attention, feed_forward)]
                assert sum(half.at(100) for half in halves) == pytest.approx(getattr(count, amount).at(100))
            assert sum(half.ops[op].num_kernels for half in (attention, feed_forward)) == count.num_kernels
        assert (attention.attentions, feed_forward.attentions) == (whole.attentions, ())
        assert attention.num_parameters > 0 < feed_forward.num_parameters


def test_a_llamas_halves_have_the_products_of_their_matrices() -> None:
    config = ARCHITECTURES["llama"]
    (attention, feed_forward), *_ = counted("llama").halves
    assert feed_forward.ops[Op.F].flops.per_token == 2 * 3 * config.hidden_size * config.intermediate_size
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    assert attention.ops[Op.F].flops.per_token == 2 * config.hidden_size * heads * config.head_dim


@examples(40)
@given(
    name=st.sampled_from(NAMES),
    tensor=st.sampled_from((1, 2, 4)),
    size=st.integers(1, 4),
    cuts=st.sets(st.integers(1, SEQ_LEN - 1), max_size=4),
    ends=st.lists(st.integers(1, 8), min_size=3, max_size=3),
)
def test_units_add_up_to_stages_and_to_the_model(
    name: str, tensor: int, size: int, cuts: set[int], ends: list[int]
) -> None:
    model = counted(name)
    costs = AnalyticCosts(model, load_cluster("h100-dgx"), tensor, size)
    units = AnalyticUnits(costs, SEQ_LEN, 1, num_ranks=2)
    places = [0, *sorted(cuts), SEQ_LEN]
    slices = tuple(np.diff(places).tolist())
    lengths, contexts = np.diff(places), np.array(places[:-1])
    bounds = [*sorted({0, len(model.parts), *(end for end in ends if end < len(model.parts))})]
    sliced = SlicedUnits(units, slices)
    stages = StageParts.of_units(bounds)
    for op in OPS:
        expected = [np.broadcast_to(costs.seconds(stage, op, lengths, contexts), lengths.shape) for stage in stages]
        np.testing.assert_allclose(sliced.stage_seconds(op, bounds), np.array(expected), rtol=1e-9, atol=1e-15)
        whole = costs.seconds(range(len(model.kinds)), op, lengths, contexts)
        of_units, fixed = units.seconds(op, lengths, contexts)
        np.testing.assert_allclose(of_units.sum(axis=0) + fixed, whole, rtol=1e-9)
    held = [[costs.activation_bytes(s, n) + kept(costs, s, n) for n in slices] for s in stages]
    np.testing.assert_allclose(sliced.stage_activations(bounds), held, rtol=1e-9)
    state = StateBytes.of(model.dtype)
    each = state.weights + state.gradients + state.optimizer
    assert units.state_bytes().sum() == pytest.approx(each * costs.num_parameters(range(len(model.kinds))))


def kept(costs: AnalyticCosts, stage: StageParts, length: int) -> float:
    return costs.context_bytes(stage, length) + costs.context_gradient_bytes(stage, length)


def test_the_slowest_link_counts_for_all() -> None:
    """Two nodes of eight: of a pipeline of 16 the link between the nodes, of one of 8 that inside."""
    costs = AnalyticCosts(counted("llama"), load_cluster("h100-dgx").with_nodes(2))
    for num_ranks, pair in ((16, (7, 8)), (8, (0, 1))):
        units = AnalyticUnits(costs, SEQ_LEN, 1, num_ranks)
        exact = costs.action_costs({}, [SEQ_LEN]).link_seconds(Action(Op.SEND_F, 0, 0, 0), *pair)
        assert SlicedUnits(units, (SEQ_LEN,)).message_seconds[0] == pytest.approx(exact)


@given(counts=st.lists(st.integers(1, 5), min_size=1, max_size=5), first=st.booleans(), last=st.booleans())
def test_a_partition_is_read_back_from_its_parts(counts: list[int], first: bool, last: bool) -> None:
    counts[-1] += sum(counts) % 2
    partition = [*[0] * first, *(count / 2 for count in counts), *[0] * last]
    num_layers = sum(counts) // 2
    stages = StageParts.of_partition(partition, num_layers, 2)
    bounds = [stages[0].start, *(stage.stop for stage in stages)]
    assert [stage.start for stage in stages] == bounds[:-1]
    assert (bounds[0], bounds[-1]) == (0, 2 * num_layers + 2)
    assert list(partition_of(bounds, 2)) == partition
    assert all(start < stop for start, stop in stages)
    assert [*accumulate(partition)][-1] == num_layers
