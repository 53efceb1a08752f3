"""Counted costs are the hand-computed times of a hand-made model, obey laws that hold for any model, and add up.

Of any model counted they do: halves to layers, units to stages and to the whole, at any degree.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import accumulate, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.cost import (
    OPS,
    Amount,
    AttentionCall,
    AttentionWindow,
    CountedCosts,
    CountedSource,
    Degrees,
    ModelCount,
    OpCount,
    PartCount,
    StageParts,
    StateBytes,
    System,
    Update,
    Work,
    load_cluster,
    partition_of,
)
from slipstream.cost.cluster import parse_cluster
from slipstream.parallel import RankGroup, SliceExchange
from slipstream.planner.cuts import Cuts
from slipstream.planner.joint import JointProblem, SlicedUnits, Tabulated
from slipstream.planner.slicing.equal_stage_slicing import slice_tokens
from slipstream.profile import count_model
from slipstream.schedule import Action, Op, make_schedule
from slipstream.simulator import simulate
from support.architectures import ARCHITECTURES
from support.examples import examples
from support.hand_made_plan import pipeline_cost
from support.parameters import first_of

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
# A GFLOP/s of each kind of product, a gigabyte per second, kernels that cost nothing.
CLUSTER = parse_cluster(
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
ONE_NODE = replace(CLUSTER, devices_per_node=4)
ONE = CountedCosts(MODEL, CLUSTER)
LAYER = range(1, 2)  # neither first nor last
SEND = Action(Op.SEND_F, 0, 0, 0)


STATE = StateBytes.of(MODEL.dtype)


def sharded(copies: int) -> Update:
    """The update whose state so many ranks with the same weights share."""
    return Update(STATE, copies, "optimizer")


def with_layer(*calls: AttentionCall, **changes: Any) -> ModelCount:
    return replace(MODEL, layers=(replace(part("layer", PRODUCTS, calls), **changes),))


def on_device(**changes: Any) -> CountedCosts:
    return CountedCosts(MODEL, replace(CLUSTER, device=replace(CLUSTER.device, **changes)))


def exchanged_by(costs: CountedCosts, op: Op, length: int) -> tuple[float, ...]:
    """The seconds of each of `EXCHANGES` in a layer."""
    each = costs.each_exchange(Work.of_slices(op, (length,)))
    return tuple(float(seconds) for seconds in each[:, costs.parts[1], 0])


PLAIN = CountedCosts(with_layer(), CLUSTER)  # without attention


def test_products_compute_and_then_read_the_weights() -> None:
    assert PLAIN.seconds(LAYER, Op.F, 10, 0) == pytest.approx((10 * 2000 + WEIGHTS) / 1e9)
    assert PLAIN.seconds(LAYER, Op.B, 10, 0) == pytest.approx(2 * PLAIN.seconds(LAYER, Op.F, 10, 0))
    assert PLAIN.seconds(LAYER, Op.R, 10, 0) == PLAIN.seconds(LAYER, Op.F, 10, 0)


def test_unaligned_products_compute_at_a_share_of_the_rate() -> None:
    """Half of the operations at a quarter of the rate take five halves of the time."""
    count = replace(PRODUCTS, unaligned_flops=Amount(0, PRODUCTS.flops.per_token / 2))
    slow = on_device(unaligned_rate=0.25)
    layer = part("layer", count)
    assert slow.product_seconds(layer, count, 10) - slow.product_seconds(layer, PRODUCTS, 10) == pytest.approx(
        1.5 * 10 * PRODUCTS.flops.per_token / 1e9
    )


def test_kernels_and_layers_have_a_shortest_time() -> None:
    """The host starts a layer's kernels however short the slice."""
    kernels, host = on_device(kernel_seconds=1.0), on_device(layer_seconds=1e-3)
    assert [kernels.seconds(LAYER, op, 1, 0) for op in (Op.F, Op.B)] == [1.0, 2.0]
    assert host.seconds(LAYER, Op.F, 1, 0) == host.seconds(LAYER, Op.B, 1, 0) == pytest.approx(1e-3)
    assert host.seconds(range(0, 2), Op.F, 1, 0) == pytest.approx(2e-3, rel=1e-2)
    assert host.seconds(LAYER, Op.F, 10**6, 0) == ONE.seconds(LAYER, Op.F, 10**6, 0)


def test_a_narrow_product_computes_for_less_of_its_time() -> None:
    """Of its 40 bytes of a token the side that is as wide as the hidden state, 16, is whole on each of two ranks."""
    count = replace(PRODUCTS, matmul_bytes=Amount(WEIGHTS, 40))
    layer = part("layer", count)
    one, two = (CountedCosts(MODEL, CLUSTER, Degrees(t)).product_seconds(layer, count, 10) for t in (1, 2))
    assert one == pytest.approx((10 * 2000 + WEIGHTS + 10 * 40) / 1e9)
    assert two == pytest.approx((10 * 2000 / 2 + WEIGHTS / 2 + 10 * (16 + 24 / 2)) / 1e9)


@pytest.mark.parametrize(("ranks", "depth"), [(1, 8 + 6 + 3 * 10), (2, 8 + 3 + 3 * 10)])
def test_half_of_a_products_last_wave_of_tiles_is_empty(ranks: int, depth: int) -> None:
    """On two ranks each adds up as many terms of the hidden state, half of others, and all tokens."""
    few = replace(CLUSTER, device=replace(CLUSTER.device, multiprocessors=10))
    count = replace(PRODUCTS, hidden_depth=Amount(8, 0), other_depth=Amount(6, 3))
    layer = part("layer", count)
    whole, wasted = (
        CountedCosts(MODEL, each, Degrees(ranks)).product_seconds(layer, count, 10) for each in (CLUSTER, few)
    )
    tile = 2 * 128 * 128 / (1e9 / 10)  # seconds of a term of all a tile's elements on one of ten multiprocessors
    assert wasted - whole == pytest.approx(tile / 2 * depth)


def test_heads_take_as_long_as_those_of_the_next_multiple_of_32() -> None:
    narrow = replace(CALL, key_width=20, value_width=20)
    assert ONE.attention_seconds(CALL, Op.F, 10, 0) == ONE.attention_seconds(narrow, Op.F, 10, 0)


@pytest.mark.parametrize("window", [AttentionWindow(), AttentionWindow("sliding", 5), AttentionWindow("blockwise", 8)])
def test_attention_costs_the_scores_under_the_mask(window: AttentionWindow) -> None:
    """Every query counted one by one, four products a score and head forward, ten backward."""
    costs = CountedCosts(with_layer(replace(CALL, window=window)), CLUSTER)
    for length, context in ((1, 0), (7, 0), (7, 9), (16, 24)):
        scores = sum(query - window.first(query) + 1 for query in range(context, context + length))
        for op, products in ((Op.F, 2), (Op.I, 5), (Op.W, 0)):
            expected = 2 * products * 32 * 4 * scores / 1e9  # 32 wide, 4 heads
            if op is Op.I:  # and the gradients of the context's keys and values are added: 128 numbers of a key
                expected += (context - window.first(context)) * 128 * 12 / 1e9
            found = costs.seconds(LAYER, op, length, context) - PLAIN.seconds(LAYER, op, length, context)
            assert found == pytest.approx(expected)


def test_without_a_fused_kernel_all_scores_are_computed_and_written() -> None:
    scores = 4 * 6 * (6 + 10)
    expected = (6 * 2000 + WEIGHTS) / 1e9 + 2 * 64 * scores / 1e9 + 6 * 2 * scores / 1e9
    costs = CountedCosts(MODEL, CLUSTER, system=System("of 2019", writes_scores=True))
    assert costs.seconds(LAYER, Op.F, 6, 10) == pytest.approx(expected)


def test_times_of_arrays_are_the_times_one_by_one() -> None:
    costs = CountedCosts(MODEL, CLUSTER, Degrees(2))
    lengths, contexts = np.array([[1, 5], [9, 2]]), np.array([[0, 3], [1, 40]])
    for op in (Op.F, Op.B, Op.W):
        found = costs.seconds(range(0, 4), op, lengths, contexts)
        pairs = zip(lengths.flat, contexts.flat, strict=True)
        each = [costs.seconds(range(0, 4), op, int(length), int(context)) for length, context in pairs]
        np.testing.assert_allclose(found.ravel(), each)


def test_tensor_parallelism_halves_products_and_adds_two_all_reduces() -> None:
    two = CountedCosts(MODEL, CLUSTER, Degrees(2))
    reduce = 16 * HIDDEN * 2 / 1e8  # of two ranks each sends its half and the other's sum: all bytes once
    assert two.seconds(LAYER, Op.F, 16, 0) == pytest.approx(ONE.seconds(LAYER, Op.F, 16, 0) / 2 + 2 * reduce)
    assert two.seconds(LAYER, Op.W, 16, 0) == pytest.approx(ONE.seconds(LAYER, Op.W, 16, 0) / 2)
    assert two.num_parameters(LAYER) == ONE.num_parameters(LAYER) / 2 == 250


@pytest.mark.parametrize(("ranks", "key_heads"), [(2, 1), (4, 1)])
def test_context_parallelism_shares_tokens_and_exchanges_heads(ranks: int, key_heads: int) -> None:
    """Of 4 query heads and 2 of keys, all 32 wide: g ranks exchange 2 Hq + 2 max(Hkv, g) heads of n/g tokens, and each
    reads all weights."""
    one, shared = (CountedCosts(MODEL, ONE_NODE, Degrees(context=g)) for g in (1, ranks))
    moved = (ranks - 1) / ranks * (16 / ranks) * (2 * 4 + 2 * max(2, ranks)) * 32 * 2 / 1e8
    weights = (1 - 1 / ranks) * WEIGHTS / 1e9
    for op, exchanged in ((Op.F, moved), (Op.I, moved), (Op.W, 0)):
        expected = one.seconds(LAYER, op, 16, 0) / ranks + weights + exchanged
        assert shared.seconds(LAYER, op, 16, 0) == pytest.approx(expected)
        assert exchanged_by(shared, op, 16) == (0, pytest.approx(exchanged), 0)
    context = shared.seconds(LAYER, Op.I, 16, 9) - shared.seconds(LAYER, Op.I, 16, 0)
    scores = 2 * 5 * 32 * 4 / ranks * 9 * 16 / 1e9
    assert context == pytest.approx(scores + 9 * key_heads * 64 * 12 / 1e9)  # a rank adds gradients of its heads alone
    assert shared.context_bytes(LAYER, 16) == one.context_bytes(LAYER, 16) / min(ranks, 2)
    outputs = 16 / ranks * 4 * 32 * 2  # attention's, before they are exchanged and after
    assert shared.activation_bytes(LAYER, 16) == one.activation_bytes(LAYER, 16) / ranks + outputs
    assert shared.message_bytes(16) == one.message_bytes(16) / ranks
    assert shared.num_parameters(LAYER) == one.num_parameters(LAYER)


@pytest.mark.parametrize("ranks", [2, 4])
def test_gathered_keys_move_all_heads_and_the_last_rank_sees_most(ranks: int) -> None:
    """Forward n tokens of both heads of keys and values, backward as many sums in float32; the last n/g queries see a
    triangle below what was before them; every rank has the whole context."""
    one = CountedCosts(MODEL, ONE_NODE)
    shared = CountedCosts(MODEL, ONE_NODE, Degrees(context=ranks, exchange="keys"))
    moved = (ranks - 1) / ranks * 16 * 2 * 2 * 32 * 2 / 1e8
    assert exchanged_by(shared, Op.F, 16) == (0, pytest.approx(moved), 0)
    assert exchanged_by(shared, Op.I, 16) == (0, pytest.approx(2 * moved), 0)
    assert exchanged_by(shared, Op.R, 16) == (0, 0, 0)
    own = 16 // ranks
    scores = 4 * sum(range(9 + 16 - own + 1, 9 + 16 + 1))
    assert shared.attention_seconds(CALL, Op.F, 16, 9) == pytest.approx(2 * scores * 64 / 1e9)
    even = sum(4 * sum(range(1, 17)) / ranks * 2 * width / 1e9 for width in (64, 160))
    last = sum(4 * sum(range(17 - own, 17)) * 2 * width / 1e9 for width in (64, 160))
    assert shared.uneven_seconds(LAYER, 16) == pytest.approx(last - even)
    assert shared.context_bytes(LAYER, 16) == one.context_bytes(LAYER, 16)
    assert shared.activation_bytes(LAYER, 16) == one.activation_bytes(LAYER, 16) / ranks


def test_keys_are_gathered_where_that_is_less_or_heads_do_not_divide() -> None:
    """In bfloat16, keys move less where 3 g Hkv < 2 (Hq + lcm(Hkv, g)): of 4 and 2 heads never, of 4 and 1 always, and
    of 12 and 4 where each of 3 ranks would get all 4."""
    many, one, odd = (source_of_heads(*heads) for heads in ((4, 2), (4, 1), (12, 4)))
    assert [odd.exchanges(Degrees(context=ranks)) for ranks in (2, 3)] == [("heads", "keys"), ("heads", "keys")]
    assert [many.exchanges(Degrees(context=ranks)) for ranks in (1, 2, 3, 4)] == [
        ("heads",),
        ("heads",),
        ("keys",),
        ("heads",),
    ]
    assert [one.exchanges(Degrees(context=ranks)) for ranks in (2, 3, 4)] == [
        ("heads", "keys"),
        ("keys",),
        ("heads", "keys"),
    ]
    assert many.exchanges(Degrees(context=2), ("keys",)) == ("keys",)
    assert many.exchanges(Degrees(context=3), ("heads",)) == ()


def source_of_heads(queries: int, keys: int) -> CountedSource:
    return CountedSource(with_layer(replace(CALL, num_heads=queries, num_key_value_heads=keys)), CLUSTER, "")


def test_plans_gather_keys_where_runs_do() -> None:
    for queries, keys, ranks in product((4, 6, 8), (1, 2), (2, 3, 4, 8)):
        group = RankGroup()
        group.size = ranks
        query, key = (torch.empty(1, heads, 1, 1, dtype=torch.float16) for heads in (queries, keys))
        run = "heads" if SliceExchange(group, ()).moves_heads(query, key, is_whole=False) else "keys"
        assert source_of_heads(queries, keys).exchanges(Degrees(context=ranks))[-1] == run, (queries, keys, ranks)


def test_ranks_that_share_layers_have_whole_heads_of_keys() -> None:
    """Of 6 query heads and 2 of keys each of 3 ranks has 2 queries, the second of which needs both heads: they can't
    share the layer, though they can exchange its heads."""
    assert [replace(CALL, num_heads=6).key_heads_of_rank(ranks) for ranks in (1, 2, 3, 6)] == [2, 1, 2, 1]
    source = source_of_heads(6, 2)
    assert source.degrees["tensor"] == (1, 2, 6)
    assert source.degrees["context"] == (1, 2, 3, 4, 6)


def test_expert_parallelism_spreads_weights_and_sends_rows_there_and_back() -> None:
    """400 of 500 parameters are in 4 experts, of which a token chooses 2; other copies have the same experts."""
    experts = {"num_in_experts": 400, "num_trained_in_experts": 400, "num_experts": 4, "experts_per_token": 2}
    model = with_layer(**experts)
    one, spread = (CountedCosts(model, CLUSTER, Degrees(experts=e)) for e in (1, 2))
    sent = 1 / 2 * 16 * 2 * HIDDEN * 2 / 1e8
    assert exchanged_by(spread, Op.F, 16) == (0, 0, pytest.approx(2 * sent))
    for op, exchanged in ((Op.F, 2 * sent), (Op.I, 2 * sent), (Op.W, 0)):
        expected = one.seconds(LAYER, op, 16, 0) - 0.4 * WEIGHTS / 1e9 + exchanged  # it reads 0.6 of the weights
        assert spread.seconds(LAYER, op, 16, 0) == pytest.approx(expected)
    assert (spread.num_parameters(LAYER), spread.num_trained(LAYER)) == (300, 300)
    assert spread.num_optimized(LAYER, sharded(4)) == pytest.approx(100 / 4 + 400 / 4)
    reduced = CLUSTER.exchange_seconds(4 * 100, 4) + CLUSTER.exchange_seconds(4 * 200, 2, stride=2)
    reduced += (3 + 1) * 50e-6  # for the steps of both rings
    assert spread.gradient_seconds(LAYER, sharded(4)) == pytest.approx(reduced)
    both = CountedCosts(model, CLUSTER, Degrees(tensor=2, experts=2))
    assert both.num_parameters(LAYER) == 100 / 2 + 400 / 2  # experts are whole on each of the ranks that share layers


def test_a_sharded_optimizer_sends_six_bytes_of_a_parameter_and_not_eight() -> None:
    """bfloat16 trains with float32 gradients: a reduce-scatter of four bytes and an all-gather of two."""
    costs = CountedCosts(replace(MODEL, dtype="bfloat16"), CLUSTER)
    whole, scattered = (costs.gradient_seconds(LAYER, update) for update in (Update(STATE, 2), sharded(2)))
    gathered = costs.gather_seconds(LAYER, sharded(2))
    assert scattered == pytest.approx(500 * 4 / 2 / 1e8)
    assert gathered == pytest.approx(500 * 2 / 2 / 1e8)
    assert scattered + gathered == pytest.approx(6 / 8 * whole)
    assert costs.gradient_seconds(LAYER, sharded(1)) == costs.gather_seconds(LAYER, sharded(1)) == 0


def test_ranks_that_share_tokens_move_and_keep_their_part_of_wide_tensors() -> None:
    """Of 100 bytes of a token 60 are as wide as the hidden state, of which two products' inputs are gathered whole."""
    wide = dict.fromkeys((Op.F, Op.I, Op.W), replace(PRODUCTS, wide_bytes=Amount(0, 1000)))
    model = with_layer(CALL, ops=wide, wide_activation_bytes=60.0)
    whole, shared = (CountedCosts(model, CLUSTER, Degrees(2), sequence_parallel=spread) for spread in (False, True))
    assert whole.activation_bytes(LAYER, 10) == 10 * (60 + 40 / 2)
    gathered = 2 * HIDDEN * 2
    assert shared.activation_bytes(LAYER, 10) == 10 * (gathered + (60 - gathered) / 2 + 40 / 2)
    saved = 10 * 1000 / 2 / 1e9
    assert whole.seconds(LAYER, Op.F, 10, 0) - shared.seconds(LAYER, Op.F, 10, 0) == pytest.approx(saved)
    assert shared.message_bytes(10) == whole.message_bytes(10) / 2
    assert shared.kept_bytes(LAYER, "full", 10) == whole.kept_bytes(LAYER, "full", 10) / 2
    # Half of the message each at half the bandwidth, and nothing to gather.
    assert shared.action_costs({}, [10]).link_seconds(SEND, 0, 1) == pytest.approx(1e-3 + 80 / 5e6)


def test_a_later_slice_is_dearer_by_its_context() -> None:
    """t = b n + a (2 n c + n²), and backward g c: the context's gradients are written, read, and read and written."""
    n, numbers = 10, 2 * (32 + 32)  # of a token's keys and values
    for c in (0, 10, 1000):
        scores = 4 * (n * c + n * (n + 1) / 2)
        assert ONE.attention_seconds(CALL, Op.F, n, c) == pytest.approx(2 * scores * 64 / 1e9)
        backward = 2 * scores * 160 / 1e9 + c * numbers * (2 * 2 + 8) / 1e9
        assert ONE.attention_seconds(CALL, Op.I, n, c) == pytest.approx(backward)


def test_short_slices_reach_less_of_the_attention_kernels_rate() -> None:
    curve = on_device(attention_curve=((1.0, 0.1), (100.0, 1.0)))
    for tokens, rate in ((10, 0.55), (100, 1.0)):
        seconds = ONE.attention_seconds(CALL, Op.F, tokens, 50)
        assert curve.attention_seconds(CALL, Op.F, tokens, 50) == pytest.approx(seconds / rate)


def test_messages_take_the_link_between_their_nodes() -> None:
    """Scattered ones of two ranks share it: half of the message each at half the bandwidth, and gathered inside."""
    cost = ONE.action_costs({}, [10, 6])
    assert cost.message_bytes == [160, 96]
    between = Action(Op.SEND_F, 1, 0, 1)
    assert cost.link_seconds(SEND, 0, 1) == pytest.approx(160 / 1e8)
    assert cost.link_seconds(between, 1, 2) == pytest.approx(1e-3 + 96 / 1e7)
    assert cost.link_occupied(between, 1, 2) == pytest.approx(96 / 1e7)
    two = CountedCosts(MODEL, CLUSTER, Degrees(2)).action_costs({}, [10])
    assert two.link_seconds(SEND, 0, 1) == pytest.approx(1e-3 + 80 / 5e6 + 80 / 1e8)


def test_the_simulator_takes_the_costs_and_keeps_the_bytes() -> None:
    timeline = simulate(make_schedule("gpipe", 2, 1, 2), pipeline_cost(ONE, [2, 2], [10, 6]))
    work = sum(float(ONE.seconds(range(2, 4), op, n, j)) for op in (Op.F, Op.B) for n, j in ((10, 0), (6, 10)))
    assert timeline.makespan > work
    assert timeline.peak_memory[1] == 16 * 3 * 100  # two layers and the head
    heads = 2 * (32 + 32) * 2  # two of keys and of values, each 32 wide, in two bytes
    assert ONE.context_bytes(range(2, 4), 16) == 16 * 2 * heads


def test_the_optimizer_and_the_reduction_move_what_is_kept_of_every_parameter() -> None:
    stage = range(0, 2)
    assert ONE.num_parameters(stage) == 3 * 500  # with the embedding
    for shards in (1, 3):
        # Parameters in float16 are read and written, gradients read, and so are master weights and two moments.
        moved = 2 * 2 + 4 + 2 * 12 / shards
        assert ONE.optimizer_step_seconds(stage, sharded(shards)) == pytest.approx(1500 * moved / 1e9)
    assert ONE.gradient_seconds(stage, Update(STATE, 2)) == pytest.approx(1500 * 4 / 1e8)


def test_the_slicing_program_takes_the_times() -> None:
    found = slice_tokens(lambda i, j: ONE.seconds(LAYER, Op.F, i, j), 256, 8, 16)
    assert list(found.slices) == sorted(found.slices, reverse=True)  # later slices attend to more
    assert len(found.slices) > 1


# --- of models that are counted --------------------------------------------------------------------------------------

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
    costs = CountedCosts(model, load_cluster("h100-dgx"), Degrees(tensor), size)
    tabulated = Tabulated(costs, SEQ_LEN, Cuts(1))
    places = [0, *sorted(cuts), SEQ_LEN]
    slices = tuple(np.diff(places).tolist())
    lengths, contexts = np.diff(places), np.array(places[:-1])
    bounds = [*sorted({0, len(model.parts), *(end for end in ends if end < len(model.parts))})]
    sliced = SlicedUnits(tabulated, slices, costs.link(2))
    stages = StageParts.of_units(bounds)
    for op in OPS:
        expected = [np.broadcast_to(costs.seconds(stage, op, lengths, contexts), lengths.shape) for stage in stages]
        np.testing.assert_allclose(sliced.stage_seconds(op, bounds), np.array(expected), rtol=1e-9, atol=1e-15)
        whole = costs.seconds(range(len(model.kinds)), op, lengths, contexts)
        of_units, fixed = sliced.seconds(op)
        np.testing.assert_allclose(of_units.sum(axis=0) + fixed, whole, rtol=1e-9)
    held = [[costs.activation_bytes(s, n) + kept(costs, s, n) for n in slices] for s in stages]
    np.testing.assert_allclose(sliced.stage_activations(bounds), held, rtol=1e-9)
    state = StateBytes.of(model.dtype)
    each = state.weights + state.gradients + state.optimizer
    problem = JointProblem(costs, SEQ_LEN, num_ranks=2, update=Update(state))
    assert problem.state_sums[-1] == pytest.approx(each * costs.num_parameters(range(len(model.kinds))))


def kept(costs: CountedCosts, stage: StageParts, length: int) -> float:
    return costs.context_bytes(stage, length) + costs.context_gradient_bytes(stage, length)


def test_the_slowest_link_counts_for_all() -> None:
    """Two nodes of eight: of a pipeline of 16 the link between the nodes, of one of 8 that inside."""
    costs = CountedCosts(counted("llama"), load_cluster("h100-dgx").with_nodes(2))
    for num_ranks, pair in ((16, (7, 8)), (8, (0, 1))):
        exact = costs.action_costs({}, [SEQ_LEN]).link_seconds(Action(Op.SEND_F, 0, 0, 0), *pair)
        assert SlicedUnits(costs, (SEQ_LEN,), costs.link(num_ranks)).message_seconds[0] == pytest.approx(exact)


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
