"""A tensor-parallel plan cuts every parameter once, and what cannot be shared is refused by name beforehand."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PretrainedConfig

from slipstream import SlipstreamError
from slipstream.model import LayerRange, find_anatomy
from slipstream.model.cutting import keep_layers
from slipstream.parallel import RankGroup
from slipstream.parallel.parameter_share import ParameterCut
from slipstream.parallel.tensor import TensorParallel
from slipstream.parallel.tensor.plan import TensorPlan, TensorStyle, find_tensor_plan
from support.architectures import ARCHITECTURES, build, llama
from support.examples import examples

PLAN = {f"model.{key}": style for key, style in LlamaConfig.base_model_tp_plan.items()}


def plan_of(config: PretrainedConfig, tensor_ranks: int, given: dict[str, str] | None = None) -> TensorPlan:
    anatomy = find_anatomy(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    return find_tensor_plan(model, config, tensor_ranks, anatomy, given)


def ranges(plan: TensorPlan, name: str) -> list[tuple[tuple[int, int], ...]]:
    return [plan.cuts[name].share(rank, plan.tensor_ranks).ranges for rank in range(plan.tensor_ranks)]


def test_columns_rows_and_vocabulary() -> None:
    plan = plan_of(llama(attention_bias=True), 2)
    assert (plan.layers, plan.embedding, plan.head) == ("model.layers", "model.embed_tokens", "lm_head")
    assert plan.after_layers == ("model.norm",)
    assert ranges(plan, "model.layers.3.mlp.up_proj.weight") == [((0, 24),), ((24, 48),)]
    down, bias = plan.cuts["model.layers.3.mlp.down_proj.weight"], plan.cuts["model.layers.0.self_attn.q_proj.bias"]
    assert (down.dim, bias.dim) == (1, 0)
    assert "model.layers.0.self_attn.o_proj.bias" not in plan.cuts
    assert ranges(plan, "lm_head.weight") == [((0, 31),), ((31, 61),)]
    assert [region.is_direct for region in plan.regions] == [True] * 8


def test_a_head_that_several_ranks_share_is_one_share_with_copies() -> None:
    plan = plan_of(llama(), 4)
    shares = [plan.cuts["model.layers.0.self_attn.k_proj.weight"].share(rank, 4) for rank in range(4)]
    assert [share.ranges for share in shares] == [((0, 8),), ((0, 8),), ((8, 16),), ((8, 16),)]
    assert [share.copy for share in shares] == [0, 1, 0, 1]
    assert plan.cuts["model.layers.0.self_attn.k_proj.weight"].holders(2, 4) == (2, 3)
    assert plan.attributes["model.layers.0.self_attn"] == {"num_key_value_groups": 1}


def test_gpt2_has_a_plan_of_our_own() -> None:
    plan = plan_of(ARCHITECTURES["gpt2"], 2)
    assert ranges(plan, "transformer.h.0.attn.c_attn.weight")[1] == ((16, 32), (48, 64), (80, 96))
    assert plan.cuts["transformer.h.0.attn.c_attn.weight"].dim == 1
    assert plan.cuts["transformer.h.0.attn.c_proj.weight"].dim == 0
    assert plan.attributes["transformer.h.0.attn"] == {"num_heads": 2, "split_size": 16}


def test_experts_are_cut_inside_and_routers_stay_whole() -> None:
    config, given = ARCHITECTURES["qwen2_moe"], None
    if "layers.*.mlp.experts" not in config.base_model_tp_plan:  # transformers 5.17
        given = {f"model.{key}": style for key, style in MixtralConfig.base_model_tp_plan.items()}
    plan = plan_of(config, 2, given)
    assert ranges(plan, "model.layers.0.mlp.experts.gate_up_proj")[1] == ((8, 16), (24, 32))
    assert plan.cuts["model.layers.0.mlp.experts.down_proj"].dim == 2
    assert "model.layers.0.mlp.gate.weight" not in plan.cuts
    mlp = next(region for region in plan.regions if region.name == "model.layers.0.mlp")
    assert mlp.styles == {"model.layers.0.mlp.experts": TensorStyle.EXPERTS}
    assert not mlp.is_direct
    assert not plan.is_spread("model.layers.0.mlp.gate.weight")
    assert plan.is_spread("model.layers.0.input_layernorm.weight")


def test_what_is_left_of_a_model_has_the_same_plan() -> None:
    config = ARCHITECTURES["mixtral"]
    anatomy, model = find_anatomy(config), build(config)
    whole = find_tensor_plan(model, config, 2, anatomy)
    keep_layers(model, anatomy, LayerRange(1, 2.0))
    plan = find_tensor_plan(model, config, 2, anatomy)
    assert [region.name for region in plan.regions] == ["model.layers.1.self_attn", "model.layers.1.mlp"]
    assert plan.cuts == {name: cut for name, cut in whole.cuts.items() if name.startswith("model.layers.1.")}
    assert (plan.embedding, plan.head, plan.layers) == (whole.embedding, whole.head, whole.layers)


@given(
    sizes=st.lists(st.integers(4, 30), min_size=1, max_size=3), num_parts=st.integers(1, 4), copies=st.integers(1, 3)
)
@examples(50)
def test_parts_cover_a_parameter_once(sizes: list[int], num_parts: int, copies: int) -> None:
    """Copy 0 of each part, put back, is the whole; parts are those of torch.tensor_split."""
    whole = torch.arange(sum(sizes) * 2.0).reshape(-1, 2)
    cut, num_ranks = ParameterCut(tuple(whole.shape), 0, tuple(sizes), num_parts), num_parts * copies
    found = torch.full_like(whole, torch.nan)
    for rank in range(num_ranks):
        share = cut.share(rank, num_ranks)
        pieces = [m.tensor_split(num_parts)[rank // copies] for m in whole.split(sizes)]
        assert torch.equal(share.take(whole), torch.cat(pieces))
        assert rank in cut.holders(rank, num_ranks)
        if share.copy == 0:
            share.put(share.take(whole), found)
    assert torch.equal(found, whole)


@pytest.mark.parametrize(
    ("config", "tensor_ranks", "given", "message"),
    [
        (llama(), 3, None, r"model.layers.0.self_attn has 4 attention heads, which 3 tensor ranks can't share evenly"),
        (
            llama(hidden_size=48, num_attention_heads=12, num_key_value_heads=6),
            4,
            None,
            r"6 key-value heads for 12 query heads: 4 tensor ranks can neither",
        ),
        (llama(intermediate_size=46), 4, None, r"mlp.gate_proj has 46 features, which 4 tensor ranks can't"),
        (llama(vocab_size=3), 4, None, r"model.embed_tokens has 3 rows, too few for 4 tensor ranks"),
        (ARCHITECTURES["gpt_oss"], 2, None, r"'gpt_oss' has no plan.*model.layers.\*.self_attn.q_proj.*tensor_plan="),
        (ARCHITECTURES["llama4_text"], 2, None, r"in the style 'packed_rowwise', which isn't supported. Supported are"),
        (llama(), 2, PLAN | {"model.layers.*.mlp.up": "colwise"}, r"tensor_plan names 'model.layers.\*.mlp.up', which"),
        (llama(), 2, PLAN | {"model.layers.*.mlp.up_proj": "columns"}, r"in the style 'columns'"),
        (llama(), 2, PLAN | {"model.norm": "colwise"}, r"must spread modules of one list of layers"),
        (
            llama(),
            2,
            PLAN | {"model.layers.*.input_layernorm": "colwise"},
            r"cuts model.layers.0.input_layernorm, a Ll",
        ),
        (llama(), 2, PLAN | {"lm_head": "rowwise"}, r"must spread modules of one list of layers"),
        (
            ARCHITECTURES["mixtral"],
            2,
            {"model.layers.*.mlp.experts": "moe_tp_experts", "model.layers.*.mlp.experts.down_proj": "rowwise"},
            r"cuts the experts model.layers.0.mlp.experts, but not their gate_up_proj",
        ),
        (
            ARCHITECTURES["phi3, longrope"],
            4,
            {"model.layers.*.self_attn.qkv_proj": "packed_colwise", "model.layers.*.self_attn.o_proj": "rowwise"},
            r"query, key and value in one weight, so 4 tensor ranks can't each have one of its 2 key-value heads",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(
    config: PretrainedConfig, tensor_ranks: int, given: dict[str, str] | None, message: str
) -> None:
    with pytest.raises(SlipstreamError, match=message):
        plan_of(config, tensor_ranks, given)


def test_a_head_or_embedding_that_is_none_is_refused() -> None:
    anatomy = find_anatomy(llama())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(llama())
    with pytest.raises(SlipstreamError, match=r"the head of LlamaForCausalLM is not among model.norm"):
        find_tensor_plan(model, model.config, 2, replace(anatomy, after=("model.norm",)))
    model.model.embed_tokens = nn.Embedding(61, 32, max_norm=1.0, device="meta")
    with pytest.raises(SlipstreamError, match=r"model.embed_tokens has max_norm"):
        find_tensor_plan(model, model.config, 2, anatomy)


def test_sequence_parallelism_needs_one_norm_at_the_end() -> None:
    anatomy = find_anatomy(llama())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(llama())
    plan = find_tensor_plan(model, model.config, 1, replace(anatomy, after=("model.norm", "model.layers.0", "lm_head")))
    TensorParallel(plan, RankGroup(), sequence=False)
    with pytest.raises(SlipstreamError, match=r"here run model.norm, model.layers.0"):
        TensorParallel(plan, RankGroup(), sequence=True)
