"""Analytic costs are the hand-computed times of a hand-made model, and obey laws that hold for any model."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from benchmarks.papers.unfused_attention import UnfusedCosts

from slipstream.cost import Amount, AnalyticSource, AttentionCall, AttentionWindow, ModelCount, OpCount, PartCount
from slipstream.cost.analytic import AnalyticCosts
from slipstream.cost.cluster import Cluster, parse_cluster
from slipstream.errors import SlipstreamError
from slipstream.parallel import RankGroup, SliceExchange
from slipstream.planner.slicing.equal_stage_slicing import slice_tokens
from slipstream.schedule import Action, Op, make_schedule
from slipstream.simulator import simulate
from support.hand_made_plan import pipeline_cost

HIDDEN = 8
WEIGHTS = 1000.0
PRODUCTS = OpCount(flops=Amount(0, 2000), matmul_bytes=Amount(WEIGHTS, 0), num_matmuls=1, num_kernels=1)
CALL = AttentionCall(num_heads=4, num_key_value_heads=2, key_width=32, value_width=32, window=AttentionWindow())


def part(name: str, ops: OpCount, attentions: tuple[AttentionCall, ...] = ()) -> PartCount:
    return PartCount(name, 500, dict.fromkeys((Op.F, Op.I, Op.W), ops), attentions, 100.0)


MODEL = ModelCount(
    kinds=(0,) * 4,
    layers=(part("layer", PRODUCTS, (CALL,)),),
    embedding=part("embedding", OpCount()),
    head=part("head", PRODUCTS),
    hidden_size=HIDDEN,
    dtype="float16",
    dtype_bytes=2,
)


@pytest.fixture
def cluster() -> Cluster:
    """A GFLOP/s of each kind of product, a gigabyte per second, kernels that cost nothing."""
    return parse_cluster(
        {
            "name": "small",
            "num_nodes": 2,
            "devices_per_node": 2,
            "device": {
                "name": "thing",
                "flops": {"float16": 1e9},
                "memory": 1e9,
                "memory_bandwidth": 1e9,
                "memory_efficiency": 1,
                "attention_efficiency": 1,
                "kernel_seconds": 0,
                "matmul_efficiency": 1,
            },
            "inside": {"bandwidth": 1e8, "latency": 0, "efficiency": 1},
            "between": {"bandwidth": 1e7, "latency": 1e-3, "efficiency": 1, "shared_by": 2},
        }
    )


LAYER = range(1, 2)  # neither first nor last


def test_products_compute_and_then_read_the_weights(cluster: Cluster) -> None:
    costs = AnalyticCosts(replace(MODEL, layers=(part("layer", PRODUCTS),)), cluster)
    assert costs.seconds(LAYER, Op.F, 10, 0) == pytest.approx((10 * 2000 + WEIGHTS) / 1e9)
    assert costs.seconds(LAYER, Op.B, 10, 0) == pytest.approx(2 * costs.seconds(LAYER, Op.F, 10, 0))
    assert costs.seconds(LAYER, Op.R, 10, 0) == costs.seconds(LAYER, Op.F, 10, 0)


def test_a_narrow_product_computes_for_less_of_its_time(cluster: Cluster) -> None:
    """Of its 40 bytes of a token the side that is as wide as the hidden state, 16, is whole on each of two ranks."""
    count = replace(PRODUCTS, matmul_bytes=Amount(WEIGHTS, 40))
    layer = part("layer", count)
    one, two = (AnalyticCosts(MODEL, cluster, t).product_seconds(layer, count, 10) for t in (1, 2))
    assert one == pytest.approx((10 * 2000 + WEIGHTS + 10 * 40) / 1e9)
    assert two == pytest.approx((10 * 2000 / 2 + WEIGHTS / 2 + 10 * (16 + 24 / 2)) / 1e9)


def test_half_of_a_products_last_wave_of_tiles_is_empty(cluster: Cluster) -> None:
    """On two ranks each adds up as many terms of the hidden state, half of others, and all tokens."""
    few = replace(cluster, device=replace(cluster.device, multiprocessors=10))
    count = replace(PRODUCTS, hidden_depth=Amount(8, 0), other_depth=Amount(6, 3))
    layer = part("layer", count)

    def wasted(ranks: int) -> float:
        costs = [AnalyticCosts(MODEL, each, ranks).product_seconds(layer, count, 10) for each in (cluster, few)]
        return float(costs[1] - costs[0])

    tile = 2 * 128 * 128 / (1e9 / 10)  # seconds of a term of all a tile's elements on one of ten multiprocessors
    assert wasted(1) == pytest.approx(tile / 2 * (8 + 6 + 3 * 10))
    assert wasted(2) == pytest.approx(tile / 2 * (8 + 3 + 3 * 10))


def test_heads_take_as_long_as_those_of_the_next_multiple_of_32(cluster: Cluster) -> None:
    wide, narrow = CALL, replace(CALL, key_width=20, value_width=20)
    times = [AnalyticCosts(MODEL, cluster).attention_seconds(call, Op.F, 10, 0) for call in (wide, narrow)]
    assert times[0] == times[1]


@pytest.mark.parametrize("window", [AttentionWindow(), AttentionWindow("sliding", 5), AttentionWindow("blockwise", 8)])
def test_attention_costs_the_scores_under_the_mask(cluster: Cluster, window: AttentionWindow) -> None:
    """Every query counted one by one, four products a score and head forward, ten backward."""
    model = replace(MODEL, layers=(part("layer", PRODUCTS, (replace(CALL, window=window),)),))
    costs, plain = (
        AnalyticCosts(model, cluster),
        AnalyticCosts(replace(MODEL, layers=(part("layer", PRODUCTS),)), cluster),
    )
    for length, context in ((1, 0), (7, 0), (7, 9), (16, 24)):
        scores = sum(query - window.first(query) + 1 for query in range(context, context + length))
        for op, products in ((Op.F, 2), (Op.I, 5), (Op.W, 0)):
            expected = 2 * products * 32 * 4 * scores / 1e9  # 32 wide, 4 heads
            if op is Op.I:  # and the gradients of the context's keys and values are added: 128 numbers of a key
                expected += (context - window.first(context)) * 128 * 12 / 1e9
            found = costs.seconds(LAYER, op, length, context) - plain.seconds(LAYER, op, length, context)
            assert found == pytest.approx(expected)


def test_without_a_fused_kernel_all_scores_are_computed_and_written(cluster: Cluster) -> None:
    costs = UnfusedCosts(MODEL, cluster)
    scores = 4 * 6 * (6 + 10)
    expected = (6 * 2000 + WEIGHTS) / 1e9 + 2 * 64 * scores / 1e9 + 6 * 2 * scores / 1e9
    assert costs.seconds(LAYER, Op.F, 6, 10) == pytest.approx(expected)


def test_times_of_arrays_are_the_times_one_by_one(cluster: Cluster) -> None:
    costs = AnalyticCosts(MODEL, cluster, tensor_parallel=2)
    lengths, contexts = np.array([[1, 5], [9, 2]]), np.array([[0, 3], [1, 40]])
    for op in (Op.F, Op.B, Op.W):
        found = costs.seconds(range(0, 4), op, lengths, contexts)
        each = [
            [costs.seconds(range(0, 4), op, int(i), int(j)) for i, j in zip(*rows, strict=True)]
            for rows in zip(lengths, contexts, strict=True)
        ]
        np.testing.assert_allclose(found, each)


def test_tensor_parallelism_halves_products_and_adds_two_all_reduces(cluster: Cluster) -> None:
    one, two = (AnalyticCosts(MODEL, cluster, t) for t in (1, 2))
    reduce = 16 * HIDDEN * 2 / 1e8  # of two ranks each sends its half and the other's sum: all bytes once
    assert two.seconds(LAYER, Op.F, 16, 0) == pytest.approx(one.seconds(LAYER, Op.F, 16, 0) / 2 + 2 * reduce)
    assert two.seconds(LAYER, Op.W, 16, 0) == pytest.approx(one.seconds(LAYER, Op.W, 16, 0) / 2)
    assert two.num_parameters(LAYER) == one.num_parameters(LAYER) / 2 == 250


@pytest.mark.parametrize(("ranks", "key_heads"), [(2, 1), (4, 1)])
def test_context_parallelism_shares_tokens_and_exchanges_heads(cluster: Cluster, ranks: int, key_heads: int) -> None:
    """Of 4 query heads and 2 of keys, all 32 wide: g ranks exchange 2 Hq + 2 max(Hkv, g) heads of n/g tokens, and each
    reads all weights."""
    one_node = replace(cluster, devices_per_node=4)
    one, shared = (AnalyticCosts(MODEL, one_node, context_parallel=g) for g in (1, ranks))
    moved = (ranks - 1) / ranks * (16 / ranks) * (2 * 4 + 2 * max(2, ranks)) * 32 * 2 / 1e8
    weights = (1 - 1 / ranks) * WEIGHTS / 1e9
    for op, exchanged in ((Op.F, moved), (Op.I, moved), (Op.W, 0)):
        expected = one.seconds(LAYER, op, 16, 0) / ranks + weights + exchanged
        assert shared.seconds(LAYER, op, 16, 0) == pytest.approx(expected)
        assert shared.exchange_seconds(LAYER, op, 16) == (0, pytest.approx(exchanged), 0)
    context = shared.seconds(LAYER, Op.I, 16, 9) - shared.seconds(LAYER, Op.I, 16, 0)
    scores = 2 * 5 * 32 * 4 / ranks * 9 * 16 / 1e9
    assert context == pytest.approx(scores + 9 * key_heads * 64 * 12 / 1e9)  # a rank adds gradients of its heads alone
    assert shared.context_bytes(LAYER, 16) == one.context_bytes(LAYER, 16) / min(ranks, 2)
    outputs = 16 / ranks * 4 * 32 * 2  # attention's, before they are exchanged and after
    assert shared.activation_bytes(LAYER, 16) == one.activation_bytes(LAYER, 16) / ranks + outputs
    assert shared.message_bytes(16) == one.message_bytes(16) / ranks
    assert shared.num_parameters(LAYER) == one.num_parameters(LAYER)


@pytest.mark.parametrize("ranks", [2, 4])
def test_gathered_keys_move_all_heads_and_the_last_rank_sees_most(cluster: Cluster, ranks: int) -> None:
    """Forward n tokens of both heads of keys and values, backward as many sums in float32; the last n/g queries see a
    triangle below what was before them; every rank has the whole context."""
    one_node = replace(cluster, devices_per_node=4)
    given = {"context_parallel": ranks, "context_exchange": "keys"}
    one, shared = AnalyticCosts(MODEL, one_node), AnalyticCosts(MODEL, one_node, **given)
    moved = (ranks - 1) / ranks * 16 * 2 * 2 * 32 * 2 / 1e8
    assert shared.exchange_seconds(LAYER, Op.F, 16) == (0, pytest.approx(moved), 0)
    assert shared.exchange_seconds(LAYER, Op.I, 16) == (0, pytest.approx(2 * moved), 0)
    assert shared.exchange_seconds(LAYER, Op.R, 16) == (0, 0, 0)
    own = 16 // ranks
    scores = 4 * sum(range(9 + 16 - own + 1, 9 + 16 + 1))
    assert shared.attention_seconds(CALL, Op.F, 16, 9) == pytest.approx(2 * scores * 64 / 1e9)
    even = sum(4 * sum(range(1, 17)) / ranks * 2 * width / 1e9 for width in (64, 160))
    last = sum(4 * sum(range(17 - own, 17)) * 2 * width / 1e9 for width in (64, 160))
    assert shared.uneven_seconds(LAYER, 16) == pytest.approx(last - even)
    assert shared.context_bytes(LAYER, 16) == one.context_bytes(LAYER, 16)
    assert shared.activation_bytes(LAYER, 16) == one.activation_bytes(LAYER, 16) / ranks


def test_keys_are_gathered_where_that_is_less_or_heads_do_not_divide(cluster: Cluster) -> None:
    """In bfloat16, keys move less where 3 g Hkv < 2 (Hq + lcm(Hkv, g)): of 4 and 2 heads never, of 4 and 1 always, and
    of 12 and 4 where each of 3 ranks would get all 4."""
    layers = [
        part("layer", PRODUCTS, (replace(CALL, num_heads=q, num_key_value_heads=k),)) for q, k in ((4, 1), (12, 4))
    ]
    sources = [AnalyticSource(replace(MODEL, layers=(each,)), cluster, "") for each in (*MODEL.layers, *layers)]
    many, one, odd = sources
    assert [odd.exchanges(1, ranks) for ranks in (2, 3)] == [("heads", "keys"), ("heads", "keys")]
    assert [many.exchanges(1, ranks) for ranks in (1, 2, 3, 4)] == [("heads",), ("heads",), ("keys",), ("heads",)]
    assert [one.exchanges(1, ranks) for ranks in (2, 3, 4)] == [("heads", "keys"), ("keys",), ("heads", "keys")]
    assert many.exchanges(1, 2, ("keys",)) == ("keys",)
    assert many.exchanges(1, 3, ("heads",)) == ()


def test_plans_gather_keys_where_runs_do(cluster: Cluster) -> None:
    for queries, keys, ranks in product((4, 6, 8), (1, 2), (2, 3, 4, 8)):
        layer = part("layer", PRODUCTS, (replace(CALL, num_heads=queries, num_key_value_heads=keys),))
        source = AnalyticSource(replace(MODEL, layers=(layer,)), cluster, "")
        group = RankGroup()
        group.size = ranks
        query, key = (torch.empty(1, heads, 1, 1, dtype=torch.float16) for heads in (queries, keys))
        run = "heads" if SliceExchange(group, ()).moves_heads(query, key, is_whole=False) else "keys"
        assert source.exchanges(1, ranks)[-1] == run, (queries, keys, ranks)


def test_ranks_that_read_parts_of_several_heads_of_keys_have_all_of_them() -> None:
    """Of 6 query heads and 2 of keys each of 3 ranks has 2 queries; the second of them needs both heads."""
    six = replace(CALL, num_heads=6)
    assert [six.key_heads_of_rank(ranks) for ranks in (1, 2, 3, 6)] == [2, 1, 2, 1]


def test_ranks_that_share_layers_have_whole_heads_of_keys(cluster: Cluster) -> None:
    """Three ranks of a run can't share a layer with 6 query heads and 2 of keys, though they can exchange its heads."""
    layer = part("layer", PRODUCTS, (replace(CALL, num_heads=6),))
    source = AnalyticSource(replace(MODEL, layers=(layer,)), cluster, "six heads")
    assert source.tensor_parallel_degrees == (1, 2, 6)
    assert source.context_parallel_degrees == (1, 2, 3, 4, 6)


def test_expert_parallelism_spreads_weights_and_sends_rows_there_and_back(cluster: Cluster) -> None:
    """400 of 500 parameters are in 4 experts, of which a token chooses 2; other copies have the same experts."""
    experts = replace(part("layer", PRODUCTS), num_in_experts=400, num_trained_in_experts=400)
    model = replace(MODEL, layers=(replace(experts, num_experts=4, experts_per_token=2),))
    one, spread = (AnalyticCosts(model, cluster, expert_parallel=e) for e in (1, 2))
    sent = 1 / 2 * 16 * 2 * HIDDEN * 2 / 1e8
    assert spread.exchange_seconds(LAYER, Op.F, 16) == (0, 0, pytest.approx(2 * sent))
    for op, exchanged in ((Op.F, 2 * sent), (Op.I, 2 * sent), (Op.W, 0)):
        expected = one.seconds(LAYER, op, 16, 0) - 0.4 * WEIGHTS / 1e9 + exchanged  # it reads 0.6 of the weights
        assert spread.seconds(LAYER, op, 16, 0) == pytest.approx(expected)
    assert (spread.num_parameters(LAYER), spread.num_trained(LAYER)) == (300, 300)
    assert spread.num_optimized(LAYER, 4) == pytest.approx(100 / 4 + 400 / 4)
    reduced = cluster.exchange_seconds(4 * 100, 4) + cluster.exchange_seconds(4 * 200, 2, stride=2)
    assert spread.gradient_seconds(LAYER, 4, shards=4) == pytest.approx(reduced)
    both = AnalyticCosts(model, cluster, tensor_parallel=2, expert_parallel=2)
    assert both.num_parameters(LAYER) == 100 / 2 + 400 / 2  # experts are whole on each of the ranks that share layers


def test_a_sharded_optimizer_sends_six_bytes_of_a_parameter_and_not_eight(cluster: Cluster) -> None:
    """bfloat16 trains with float32 gradients: a reduce-scatter of four bytes and an all-gather of two."""
    costs = AnalyticCosts(replace(MODEL, dtype="bfloat16"), cluster)
    whole, scattered = (costs.gradient_seconds(LAYER, 2, shards) for shards in (1, 2))
    gathered = costs.gather_seconds(LAYER, 2)
    assert scattered == pytest.approx(500 * 4 / 2 / 1e8)
    assert gathered == pytest.approx(500 * 2 / 2 / 1e8)
    assert scattered + gathered == pytest.approx(6 / 8 * whole)
    assert costs.gradient_seconds(LAYER, 1) == costs.gather_seconds(LAYER, 1) == 0


def test_ranks_that_share_tokens_move_and_keep_their_part_of_wide_tensors(cluster: Cluster) -> None:
    """Of 100 bytes of a token 60 are as wide as the hidden state, of which two products' inputs are gathered whole."""
    wide = replace(PRODUCTS, wide_bytes=Amount(0, 1000))
    layer = replace(part("layer", wide, (CALL,)), wide_activation_bytes=60.0)
    model = replace(MODEL, layers=(layer,))
    whole, shared = (AnalyticCosts(model, cluster, 2, sequence_parallel=spread) for spread in (False, True))
    assert whole.activation_bytes(LAYER, 10) == 10 * (60 + 40 / 2)
    gathered = 2 * HIDDEN * 2
    assert shared.activation_bytes(LAYER, 10) == 10 * (gathered + (60 - gathered) / 2 + 40 / 2)
    saved = 10 * 1000 / 2 / 1e9
    assert whole.seconds(LAYER, Op.F, 10, 0) - shared.seconds(LAYER, Op.F, 10, 0) == pytest.approx(saved)
    assert shared.message_bytes(10) == whole.message_bytes(10) / 2
    assert shared.kept_bytes(LAYER, "full", 10) == whole.kept_bytes(LAYER, "full", 10) / 2
    send = Action(Op.SEND_F, 0, 0, 0)  # half of the message each at half the bandwidth, and nothing to gather
    assert shared.action_costs({}, [10]).link_seconds(send, 0, 1) == pytest.approx(1e-3 + 80 / 5e6)


def test_the_host_starts_a_layers_kernels_however_short_the_slice(cluster: Cluster) -> None:
    slow = AnalyticCosts(MODEL, replace(cluster, device=replace(cluster.device, layer_seconds=1e-3)))
    quick = AnalyticCosts(MODEL, cluster)
    assert slow.seconds(LAYER, Op.F, 1, 0) == slow.seconds(LAYER, Op.B, 1, 0) == pytest.approx(1e-3)
    assert slow.seconds(range(0, 2), Op.F, 1, 0) == pytest.approx(2e-3, rel=1e-2)
    assert slow.seconds(LAYER, Op.F, 10**6, 0) == quick.seconds(LAYER, Op.F, 10**6, 0)


def test_a_later_slice_is_dearer_by_its_context(cluster: Cluster) -> None:
    """t = b n + a (2 n c + n²), and backward g c: the context's gradients are written, read, and read and written."""
    costs = AnalyticCosts(MODEL, cluster)
    n, numbers = 10, 2 * (32 + 32)  # of a token's keys and values
    for c in (0, 10, 1000):
        scores = 4 * (n * c + n * (n + 1) / 2)
        forward = costs.attention_seconds(CALL, Op.F, n, c)
        backward = costs.attention_seconds(CALL, Op.I, n, c)
        assert forward == pytest.approx(2 * scores * 64 / 1e9)
        assert backward == pytest.approx(2 * scores * 160 / 1e9 + c * numbers * (2 * 2 + 8) / 1e9)


def test_short_slices_reach_less_of_the_attention_kernels_rate(cluster: Cluster) -> None:
    device = replace(cluster.device, attention_curve=((1.0, 0.1), (100.0, 1.0)))
    times = [
        AnalyticCosts(MODEL, replace(cluster, device=each)).attention_seconds(CALL, Op.F, n, 50)
        for n in (10, 100)
        for each in (device, cluster.device)
    ]
    assert times[0] == pytest.approx(times[1] / 0.55)
    assert times[2] == pytest.approx(times[3])


def test_kernels_have_a_shortest_time(cluster: Cluster) -> None:
    slow = replace(cluster, device=replace(cluster.device, kernel_seconds=1.0))
    assert AnalyticCosts(MODEL, slow).seconds(LAYER, Op.F, 1, 0) == 1.0
    assert AnalyticCosts(MODEL, slow).seconds(LAYER, Op.B, 1, 0) == 2.0


def test_messages_take_the_link_between_their_nodes(cluster: Cluster) -> None:
    cost = AnalyticCosts(MODEL, cluster).action_costs({}, [10, 6])
    assert cost.message_bytes == [160, 96]
    inside, between = Action(Op.SEND_F, 0, 0, 0), Action(Op.SEND_F, 1, 0, 1)
    assert cost.link_seconds(inside, 0, 1) == pytest.approx(160 / 1e8)
    assert cost.link_seconds(between, 1, 2) == pytest.approx(1e-3 + 96 / 1e7)
    assert cost.link_occupied(between, 1, 2) == pytest.approx(96 / 1e7)


def test_scattered_messages_share_the_link_out_of_the_node(cluster: Cluster) -> None:
    """Two tensor-parallel ranks: half of the message each at half the bandwidth, and the gathering inside the node."""
    costs = AnalyticCosts(MODEL, cluster, 2)
    send = Action(Op.SEND_F, 0, 0, 0)
    assert costs.action_costs({}, [10]).link_seconds(send, 0, 1) == pytest.approx(1e-3 + 80 / 5e6 + 80 / 1e8)


def test_the_simulator_takes_the_costs_and_keeps_the_bytes(cluster: Cluster) -> None:
    costs = AnalyticCosts(MODEL, cluster)
    timeline = simulate(make_schedule("gpipe", 2, 1, 2), pipeline_cost(costs, [2, 2], [10, 6]))
    work = sum(float(costs.seconds(range(2, 4), op, n, j)) for op in (Op.F, Op.B) for n, j in ((10, 0), (6, 10)))
    assert timeline.makespan > work
    assert timeline.peak_memory[1] == 16 * 3 * 100  # two layers and the head
    heads = 2 * (32 + 32) * 2  # two of keys and of values, each 32 wide, in two bytes
    assert costs.context_bytes(range(2, 4), 16) == 16 * 2 * heads


def test_the_optimizer_and_the_reduction_move_what_is_kept_of_every_parameter(cluster: Cluster) -> None:
    costs = AnalyticCosts(MODEL, cluster)
    assert costs.num_parameters(range(0, 2)) == 3 * 500  # with the embedding
    read_and_written = 2 * 2 + 4 + 2 * 12  # parameters in float16, gradients, master weights and two moments
    assert costs.optimizer_step_seconds(range(0, 2)) == pytest.approx(1500 * read_and_written / 1e9)
    sharded = 2 * 2 + 4 + 2 * 12 / 3
    assert costs.optimizer_step_seconds(range(0, 2), shards=3) == pytest.approx(1500 * sharded / 1e9)
    assert costs.gradient_seconds(range(0, 2), 2) == pytest.approx(1500 * 4 / 1e8)


def test_the_slicing_program_takes_the_times(cluster: Cluster) -> None:
    costs = AnalyticCosts(MODEL, cluster)
    found = slice_tokens(lambda i, j: costs.seconds(LAYER, Op.F, i, j), 256, 8, 16)
    assert list(found.slices) == sorted(found.slices, reverse=True)  # later slices attend to more
    assert len(found.slices) > 1


def test_a_dtype_without_a_peak_is_refused(cluster: Cluster) -> None:
    with pytest.raises(SlipstreamError, match="dtype='int8' has no peak"):
        AnalyticCosts(replace(MODEL, dtype="int8"), cluster).seconds(LAYER, Op.F, 1, 0)
