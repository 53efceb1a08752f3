"""Counting on meta tensors finds what the shapes say, what the model has, and what a real run saves."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from benchmarks.papers.formulas import GPT
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, GPT2Config, PretrainedConfig

import slipstream
from slipstream import SlipstreamError
from slipstream.cost import AttentionWindow, ModelCount, load_cluster
from slipstream.model import CausalLMStage, LayerRange, find_anatomy, random_model
from slipstream.model.toy import toy_config
from slipstream.profile import count_model
from slipstream.profile.stage_bench import StageBench
from slipstream.schedule import Op
from support.architectures import ARCHITECTURES, LENGTH, build, llama, tokens
from support.parameters import first_of

HIDDEN, MLP, KV, VOCABULARY = 32, 48, 16, 61  # of tests/support/architectures.py
ATTENTION = 2 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV)  # FLOPs a token of q, o, k, v
EXPERT = 2 * 3 * HIDDEN * MLP


@cache
def counted(name: str, dtype: torch.dtype = torch.bfloat16) -> ModelCount:
    return count_model(ARCHITECTURES[name], LENGTH, dtype)


def flops(count: ModelCount, op: Op = Op.F) -> list[float]:
    return [part.ops[op].flops.per_token for part in count.layers]


@pytest.mark.parametrize(
    ("name", "expected"),
    first_of(
        [
            ("llama", ATTENTION + EXPERT),
            ("mixtral", ATTENTION + 2 * HIDDEN * 4 + 2 * EXPERT),  # the router, and two of four experts
            ("gpt2", 24 * HIDDEN**2),
            ("gpt_neox", 2 * 4 * HIDDEN**2 + 2 * 2 * HIDDEN * MLP),
        ],
        2,
    ),
)
def test_a_layers_products_are_those_of_its_shapes(name: str, expected: int) -> None:
    count = counted(name)
    for op in (Op.F, Op.I, Op.W):
        assert flops(count, op) == [expected]
    assert count.head.ops[Op.F].flops.per_token == 2 * HIDDEN * VOCABULARY
    assert count.embedding.ops[Op.F].flops.per_token == 0


@pytest.mark.parametrize(
    "name", first_of(["qwen2_moe", "llama, tied", "gpt2", "llama", "gemma2", "llama4_text", "gpt_oss"])
)
def test_parameters_are_the_models(name: str) -> None:
    assert counted(name).num_parameters == build(ARCHITECTURES[name]).num_parameters()


@pytest.mark.parametrize("name", first_of(["llama", "gemma3", "qwen3", "olmo2"]))
def test_products_are_those_of_a_real_run(name: str) -> None:
    """The unsplit model with eager attention, whose scores are counted apart: all of them, masked ones too."""
    count, model = counted(name), build(ARCHITECTURES[name])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=tokens(1), use_cache=False)
    parts = count.counted(count.whole)
    products = LENGTH * sum(number * part.ops[Op.F].flops.per_token for number, part in parts)
    scores = sum(
        2 * number * call.num_heads * (call.key_width + call.value_width) * LENGTH**2
        for number, part in parts
        for call in part.attentions
    )
    rotary = counter.get_total_flops() - products - scores  # the frequencies by the positions, a product of width 1
    assert 0 <= rotary <= 0.01 * products


def test_grouped_heads_and_windows_are_found() -> None:
    count = counted("gemma2")
    calls = [part.attentions[0] for part in count.layers]
    assert [call.window for call in calls] == [AttentionWindow("sliding", 7), AttentionWindow()]
    assert {(call.num_heads, call.num_key_value_heads, call.key_width) for call in calls} == {(4, 2, 8)}
    assert count.kinds == (0, 1, 0, 1)
    blocks = counted("llama4_text")
    assert blocks.layers[0].attentions[0].window == AttentionWindow("blockwise", 16)


@pytest.mark.parametrize("name", first_of(["phi3, longrope", "llama, dynamic rope"]))
def test_frequencies_that_depend_on_the_length_change_nothing(name: str) -> None:
    assert flops(counted(name)) == [ATTENTION + EXPERT]


def test_bytes_of_short_slices_are_the_weights() -> None:
    part = counted("llama").layers[0]
    weights = 2 * (part.num_parameters - 2 * HIDDEN)  # two bytes each, norms aside
    assert [part.ops[op].matmul_bytes.constant for op in (Op.F, Op.I, Op.W)] == [weights] * 3
    moved = part.ops[Op.F]
    assert moved.wide_bytes.per_token > 0
    assert moved.num_kernels > moved.num_matmuls == 7


def test_products_add_up_what_they_are_deep() -> None:
    """Forward over their inputs, backward over their outputs and, for the weights, over the tokens."""
    ops = count_model(llama(), LENGTH).layers[0].ops
    forward, inputs, weights = (ops[op] for op in (Op.F, Op.I, Op.W))
    assert (forward.hidden_depth.constant, forward.other_depth.constant) == (6 * HIDDEN, MLP)
    assert (inputs.hidden_depth.constant, inputs.other_depth.constant) == (3 * HIDDEN, 2 * KV + 2 * MLP)
    assert (weights.other_depth.constant, weights.other_depth.per_token) == (0, 7)


@pytest.mark.parametrize(("words", "unaligned"), [(1024, 0.0), (1025, 1.0), (1028, 1.0)])
def test_products_of_widths_that_are_no_multiples_of_8_are_unaligned(words: int, unaligned: float) -> None:
    """The head's products, and no others, in 16 bits: of logits, of their input's gradient and of the weight's."""
    count = count_model(llama(vocab_size=words), LENGTH)
    for op in (Op.F, Op.I, Op.W):
        head, layer = count.head.ops[op], count.layers[0].ops[op]
        assert head.unaligned_flops.per_token == pytest.approx(unaligned * head.flops.per_token)
        assert layer.unaligned_flops.per_token == 0
        assert count_model(llama(vocab_size=words), LENGTH, torch.float32).head.ops[op].unaligned_flops.per_token == 0


@pytest.mark.parametrize("config", [GPT2Config(n_embd=256, n_layer=4, n_head=4, vocab_size=1024, n_positions=512)])
def test_a_gpt_has_the_papers_parameters_and_operations(config: PretrainedConfig) -> None:
    """PTD-P eqs. 2 and 3, of which eq. 2 leaves out the last norm's 2h and counts 13 where GPT-2 has 13 l h."""
    count = count_model(config, 512)
    paper = GPT(4, 256, 1024, 512)
    assert count.num_parameters == pytest.approx(paper.num_parameters + 2 * 256)
    products = sum(number * part.ops[Op.F].flops.per_token for number, part in count.counted(count.whole))
    scores = 4 * 4 * 256 * 512  # both products of all scores
    assert 3 * 512 * (products + scores) == pytest.approx(paper.flops(1, recompute=False))


def test_dropout_is_the_kernel_of_a_gpu() -> None:
    """Of a GPT-2's layer, two: of 2 bytes read and written and a mask of 1, and backward as much. CPUs save 2 bytes."""
    without, with_it = (count_model(gpt2(rate), 64).layers[0] for rate in (0.0, 0.1))
    for op, num_kernels in ((Op.F, 2), (Op.I, 2), (Op.W, 0)):
        more, less = with_it.ops[op], without.ops[op]
        assert more.num_kernels - less.num_kernels == num_kernels
        assert more.wide_bytes.per_token - less.wide_bytes.per_token == num_kernels * 5 * 64
    assert with_it.activation_bytes - without.activation_bytes == 2 * 64


def gpt2(dropout: float) -> GPT2Config:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64, **rates)


@pytest.mark.parametrize("name", first_of(["llama", "mixtral", "gpt2", "gemma2"]))
def test_a_layer_saves_what_a_real_stage_saves_for_one_layer_more(name: str) -> None:
    config = ARCHITECTURES[name]
    anatomy = find_anatomy(config)

    def per_token(owned: range) -> float:
        model = random_model(config, 0, anatomy, owned, torch.float32).train()
        stage = CausalLMStage(model, anatomy, LayerRange(owned.start, owned.stop), torch.device("cpu"))
        bench = StageBench(stage, 1, LENGTH)
        return (bench.activation_bytes(48) - bench.activation_bytes(16)) / 32

    real = per_token(range(1, 3)) - per_token(range(1, 2))
    count = counted(name, torch.float32)
    assert count.layers[count.kinds[2]].activation_bytes == real


def test_fused_kernels_move_and_keep_less() -> None:
    """A norm reads the hidden state and its weight, and writes the one of its result: nothing wide lies between."""
    plain, fused = counted("llama", torch.float32), count_model(llama(), LENGTH, torch.float32, fused=True)
    for op in (Op.F, Op.I):
        less, more = fused.layers[0].ops[op], plain.layers[0].ops[op]
        assert less.flops == more.flops
        assert less.num_kernels < more.num_kernels
        assert less.wide_bytes.per_token < more.wide_bytes.per_token
    assert fused.layers[0].ops[Op.F].wide_bytes.per_token == (2 * 2 + 2 * 3) * HIDDEN * 4  # norms and residuals
    assert fused.layers[0].activation_bytes < plain.layers[0].activation_bytes
    assert fused.layers[0].wide_activation_bytes == 4 * HIDDEN * 4  # both norms' inputs and results
    for half, other in zip(fused.halves[0], plain.halves[0], strict=True):
        assert half.activation_bytes <= other.activation_bytes


def test_halves_that_nobody_needs_are_not_counted() -> None:
    config = ARCHITECTURES["llama, tied"]
    count = count_model(config, LENGTH)
    assert len(count.halves) == len(count.layers) == 1
    assert count_model(config, LENGTH, halves=False) == replace(count, halves=())


@pytest.mark.parametrize(
    ("name", "reason"), first_of([("mpt", "AttentionInterface"), ("mamba", ""), ("bloom", "AttentionInterface")], 2)
)
def test_what_can_not_be_counted_is_refused_by_name(name: str, reason: str) -> None:
    config = toy_config(AutoConfig.for_model(name))
    words = (
        f"model_type {name!r} computes can't be counted, as .*{reason}.*: profile it instead with `slipstream profile`"
    )
    with pytest.raises(SlipstreamError, match=words):
        count_model(config, LENGTH)
    with pytest.raises(SlipstreamError, match=words):
        slipstream.plan(config, load_cluster("h100-dgx"), seq_len=LENGTH, global_batch=2)
