"""Fused rotary embeddings are exact, are found by what they compute, and stay out of other models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CohereConfig, DeepseekV3Config, GPTNeoXConfig, PretrainedConfig
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3

from slipstream.model import fuse_kernels
from slipstream.model.fusion import fuse_rotary_embeddings, fused_rotation, is_rotation
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    LENGTH,
    VOCABULARY,
    build,
    gradient_error,
    gradients,
    labels_of,
    tokens,
    unsplit_step,
)
from support.fusing import COMPILING, compiles, in_slices
from support.parameters import first_of

pytestmark = COMPILING
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
MODELS: dict[str, PretrainedConfig] = {
    "llama": ARCHITECTURES["llama"],
    "qwen3": ARCHITECTURES["qwen3"],
    "mixtral": ARCHITECTURES["mixtral"],
    "gemma3": ARCHITECTURES["gemma3"],  # two tables, of local and of global layers
    "olmo2": ARCHITECTURES["olmo2"],  # in float32
    "phi3, longrope": ARCHITECTURES["phi3, longrope"],  # queries and keys are parts of one product
    "gpt_oss": ARCHITECTURES["gpt_oss"],  # tables half as wide as heads
    "gpt_neox, half of each head": GPTNeoXConfig(
        **SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "cohere": CohereConfig(**SIZES, num_key_value_heads=2),  # neighbours are pairs
    "deepseek_v3": DeepseekV3Config(  # one key for all heads
        **SIZES,
        num_key_value_heads=4,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    ),
}


@compiles
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", [*first_of(["llama", *[*MODELS][3:]], 0), *first_of(["qwen3", "mixtral"], 0, "grid")])
def test_gradients_are_those_of_the_unsplit_model(
    name: str, compiled: list[str], by_torch_compile: Callable[[], int]
) -> None:
    model = build(MODELS[name])
    whole = copy.deepcopy(model)
    unsplit_step(whole, tokens(batch=4), labels_of(tokens(batch=4)))
    wanted = gradients(whole)
    attention = [module for module in model.modules() if fuse_rotary_embeddings(module)]
    assert len(attention) == model.config.num_hidden_layers
    for slices in ([5, 30, 17, 12], [20, 9, 33, 2]):
        pipe = in_slices(model, slices)
        assert gradient_error(wanted, gradients(pipe)) < BOUND
    assert len(compiled) == 2  # a forward and a backward
    assert not by_torch_compile()


@compiles
def test_nothing_but_tables_is_kept_for_the_backward(compiled: list[str], by_torch_compile: Callable[[], int]) -> None:
    saved: list[Tensor] = []
    given, rotate = rotary_inputs(dtype=torch.float32), fused_rotation(modeling_llama.apply_rotary_pos_emb)
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        rotate(*given)
    assert [each.data_ptr() for each in saved] == [each.data_ptr() for each in given[2:]]
    assert len(compiled) == 2
    assert not by_torch_compile()


@compiles
def test_sizes_that_happen_to_be_equal_are_not_taken_to_be_so_always(compiled: list[str]) -> None:
    """As many tokens as heads, as many rows as heads of keys."""
    rotate = fused_rotation(modeling_llama.apply_rotary_pos_emb)
    for length in (4, 6, 2, 8):
        rotate(*rotary_inputs(torch.float32, length))
    assert len(compiled) == 2


def rotary_inputs(dtype: torch.dtype, length: int = 6) -> list[Tensor]:
    """Queries and keys as models give them, (B,H,T,D) stored as (B,T,H,D), and tables of one row."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, length, 4, 8), (2, length, 2, 8), (1, length, 8), (1, length, 8)
    q, k, *tables = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    return [*(each.requires_grad_().transpose(1, 2) for each in (q, k)), *tables]


@compiles
def test_results_are_stored_as_queries_and_keys_are() -> None:
    for own in (modeling_llama.apply_rotary_pos_emb, modeling_gpt_neox.apply_rotary_pos_emb):
        given = rotary_inputs(torch.float64)
        for wanted, found in zip(own(*given), fused_rotation(own)(*given), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)
            assert found.transpose(1, 2).is_contiguous()


def test_what_is_unusual_is_left_to_the_model() -> None:
    """A lone token, heads after tokens, more queries than keys, three tables of one token."""
    seen = []

    def own(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        seen.append(unsqueeze_dim)
        return q, k

    q, k, cos, sin = rotary_inputs(torch.float64)
    rotate = fused_rotation(own)
    for given in (rotary_inputs(torch.float64, 1), [q, k[:, :, 1:], cos, sin], [q, k, cos[None], sin[None]]):
        assert rotate(*given) == (given[0], given[1])
    rotate(q, k, cos, sin, 2)
    rotate(q, k, cos, sin, unsqueeze_dim=2)
    assert seen == [1, 1, 1, 2, 2]


def test_other_models_of_the_same_file_call_their_own() -> None:
    config, own = ARCHITECTURES["llama"], modeling_llama.apply_rotary_pos_emb
    fused, other = build(config), build(config)
    fuse_kernels(fused)
    assert modeling_llama.apply_rotary_pos_emb is own
    names = type(other.model.layers[0].self_attn).forward.__code__.co_names
    assert own.__name__ in names
    assert own.__name__ not in fused.model.layers[0].self_attn.forward.__func__.__code__.co_names
    assert "forward" not in vars(other.model.layers[0].self_attn)


def test_a_fused_forward_sees_what_is_replaced_in_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(ARCHITECTURES["llama"])
    fuse_kernels(model)
    seen = []
    own = modeling_llama.eager_attention_forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[0])
        return own(*args, **kwargs)

    model.set_attn_implementation("eager")
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", noted)
    model(tokens(batch=1, length=1))
    assert seen == [layer.self_attn for layer in model.model.layers]


def halves(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def heads_fixed(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Doesn't do what its argument says."""
    cos, sin = cos[:, None], sin[:, None]
    return q * cos + halves(q) * sin, k * cos + halves(k) * sin


def in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    return q.clamp_(-1, 1).clone(), k * cos.unsqueeze(unsqueeze_dim)


def noisy(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    return q + torch.rand_like(q), k


def across_tokens(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    return q.cumsum(2), k * cos.unsqueeze(unsqueeze_dim)


def failing(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    raise RuntimeError("no")


def swapped(q: Tensor, k: Tensor, sin: Tensor, cos: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    return heads_fixed(q, k, cos, sin)


def without_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return heads_fixed(q, k, cos, sin)


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, k, cos, sin)


class OwnName(nn.Module):
    """Calls a method by the name of a function."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotate(*rotate(q, k, cos, sin), cos, sin)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return q, k


rotate = modeling_phi3.apply_rotary_pos_emb


OTHERS = [heads_fixed, in_place, noisy, across_tokens, failing, swapped, without_place]


@pytest.mark.parametrize("function", OTHERS, ids=lambda each: each.__name__)
def test_other_functions_are_not_taken_for_rotary_embeddings(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_rotation(function)
    monkeypatch.setitem(globals(), "rotate", function)
    module = Attention()
    assert not fuse_rotary_embeddings(module)
    assert "forward" not in vars(module)


def test_a_function_is_known_by_what_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    module, given = Attention(), rotary_inputs(torch.float64, 1)
    monkeypatch.setitem(globals(), "rotate", modeling_llama.apply_rotary_pos_emb)
    assert fuse_rotary_embeddings(module)
    monkeypatch.setitem(globals(), "rotate", noisy)
    for wanted, found in zip(modeling_llama.apply_rotary_pos_emb(*given), module(*given), strict=True):
        assert torch.equal(wanted, found)


def test_a_method_of_the_same_name_is_not_replaced() -> None:
    assert not fuse_rotary_embeddings(OwnName())


def test_what_was_replaced_before_stays() -> None:
    module = build(ARCHITECTURES["llama"]).model.layers[0].self_attn
    module.forward = lambda *_: None
    assert not fuse_rotary_embeddings(module)
