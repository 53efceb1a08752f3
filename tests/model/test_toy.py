"""The toy of a model is small and of full precision, and has every kind of layer and what depends on its numbers."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DbrxConfig,
    DeepseekV32Config,
    GPTNeoConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM3VLTextConfig,
    MistralConfig,
    ModernBertDecoderConfig,
    PretrainedConfig,
)
from transformers.models.llama.modeling_llama import LlamaModel

from slipstream import Pipeline, SlipstreamError
from slipstream.model import check_sliceable
from slipstream.model.hooks.slice_cache import SliceCache
from slipstream.model.toy import TOY_LENGTH, full_precision, reference_model, toy_config, toy_tokens
from support.architectures import BOUND, build, gradient_error, no_rounding_inside, tokens, unsplit_step
from support.versions import provided


def test_float64_stays_float64() -> None:
    wide, narrow = torch.rand(2, 3, dtype=torch.float64), torch.rand(3, 2)
    with full_precision():
        kept = (
            wide.float(),
            wide.to(torch.float32),
            wide.to(dtype=torch.float32),
            torch.nn.functional.softmax(wide, dim=-1, dtype=torch.float32),
            wide @ narrow,
            narrow @ wide,
            torch.sum(wide, dim=0, dtype=torch.float32),
        )
        assert narrow.float().dtype == (narrow @ narrow.T).dtype == torch.float32
    assert {tensor.dtype for tensor in kept} == {torch.float64}
    assert torch.equal(kept[4], wide @ narrow.double())
    assert wide.float().dtype == torch.float32


def test_full_precision_leaves_devices_alone() -> None:
    with full_precision(), torch.device("meta"):
        assert torch.full((2,), 1.0).is_meta


def test_full_precision_leaves_other_threads_alone() -> None:
    wide = torch.rand(2, 3, dtype=torch.float64)
    with full_precision(), ThreadPoolExecutor(1) as thread:
        assert thread.submit(wide.float).result().dtype == torch.float32


MOST_PARAMETERS = 30_000_000  # 240 MB
COMPOSITE = {  # what a composite configuration needs to be small -> architectures
    "towers for images": ("gemma3", "got_ocr2", "qwen3_5", "fuyu"),
    "widths that two parts share": ("moss_transcribe_diarize", "llama4"),
    "values of single layers": ("gemma4", "dots3_note"),
    "layers that reuse keys of earlier ones": ("gemma3n_text",),
    "a router in float32": ("ernie4_5_moe",),
    "heads in groups of four": ("codegen",),
    "multiples of the model's width": ("zamba", "zamba2"),
    "layers counted twice": ("xlstm",),
}


@pytest.mark.parametrize("name", [pytest.param(each, marks=provided(each)) for each in chain(*COMPOSITE.values())])
def test_a_toy_of_the_default_configuration_is_small_and_runs(name: str) -> None:
    config = AutoConfig.for_model(name)
    with torch.no_grad(), full_precision():
        model = reference_model(toy_config(config))
        assert sum(parameter.numel() for parameter in model.parameters()) < MOST_PARAMETERS
        assert model(input_ids=toy_tokens(config), use_cache=False).logits.shape[:2] == (2, 48)


@pytest.mark.parametrize("size", [32, 16, 64])
@pytest.mark.parametrize("name", ["electra", "opt"])
def test_embeddings_of_another_width_stay_so(name: str, size: int) -> None:
    """They are projected, and only they; a toy has the same parts."""
    field = {"electra": "embedding_size", "opt": "word_embed_proj_dim"}[name]
    more = {"is_decoder": True} if name == "electra" else {"do_layer_norm_before": False}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "dropout": 0.0}
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, field: size}
    config = AutoConfig.for_model(name, **sizes, **more, **dropout)
    toy = toy_config(config)
    assert (getattr(toy, field) > toy.hidden_size) == (size > 32)
    assert (getattr(toy, field) < toy.hidden_size) == (size < 32)
    model, inputs = build(config), tokens(length=30)
    pipe = Pipeline(copy.deepcopy(model), num_ranks=2, schedule="1f1b", slices=[13, 17], partition=[2, 2])
    with no_rounding_inside():
        assert float(pipe.step(inputs, inputs)) == pytest.approx(float(unsplit_step(model, inputs, inputs)), rel=BOUND)
    assert gradient_error(model, pipe) < BOUND


@pytest.mark.parametrize(
    "name",
    [
        *("recurrent_gemma", "inkling_text", "deepseek_v4", "codegen", "longcat_flash", "roc_bert"),
        *("phi4_multimodal", "gemma3n_text"),
    ],
)
def test_what_a_check_runs_many_times_is_smaller(name: str) -> None:
    """Widths of recurrences, heads of layers with a window, ranks, other vocabularies, experts that do nothing."""
    decodes = {"is_decoder": True} if name == "roc_bert" else {}
    with torch.device("meta"):
        model = reference_model(toy_config(AutoConfig.for_model(name, **decodes)))
    assert sum(parameter.numel() for parameter in model.parameters()) < MOST_PARAMETERS * 2 // 5


def test_fewer_features_of_a_head_are_left_only_beside_those_that_are_rotated() -> None:
    toy = toy_config(AutoConfig.for_model("codegen"))
    assert (toy.n_embd // toy.n_head, toy.rotary_dim) == (128, 64)


def test_the_width_of_wide_heads_is_smaller_than_all_heads_together() -> None:
    toy = toy_config(AutoConfig.for_model("gemma3n_text"))
    assert (toy.num_attention_heads, toy.head_dim, toy.hidden_size) == (2, 256, 128)


def test_parts_of_a_layer_become_small_with_it() -> None:
    """DBRX has a configuration for its feed-forward, as wide as the model, and one for its attention."""
    toy = toy_config(DbrxConfig(n_heads=16, attn_config={"kv_n_heads": 8}))
    assert toy.ffn_config.hidden_size == toy.d_model == 256
    assert toy.ffn_config.ffn_hidden_size == 32
    assert (toy.n_heads, toy.attn_config.kv_n_heads) == (2, 1)


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({"model_type": "lfm2"}, 1),
        pytest.param({"model_type": "flint"}, 3, marks=provided("flint")),
        ({"model_type": "deepseek_v3", "first_k_dense_replace": 6}, 2),
        ({"model_type": "gemma4_text"}, 2),
    ],
)
def test_a_toy_has_every_kind_of_layer(settings: dict[str, object], kinds: int) -> None:
    config = AutoConfig.for_model(**settings)
    toy = toy_config(config)
    assert len(_kinds(toy)) == len(_kinds(config)) == kinds
    assert toy.num_hidden_layers < 10


def _kinds(config: PretrainedConfig) -> set[tuple[object, ...]]:
    """Returns the attention's type and whether the feed-forward is dense, of every layer."""
    dense = getattr(config, "mlp_only_layers", None) or range(getattr(config, "first_k_dense_replace", 0))
    types = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    return {(each, index in dense) for index, each in enumerate(types)}


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (Llama4TextConfig(), ["floor_scale", "attention_chunk_size"]),
        (MistralConfig(sliding_window=4096), ["sliding_window"]),
        (MiniMaxM3VLTextConfig(), ["index_block_size", "index_topk_blocks"]),
        (DeepseekV32Config(), ["index_topk"]),
        (GPTNeoConfig(), ["window_size"]),
        (ModernBertDecoderConfig(), ["local_attention", "sliding_window"]),
    ],
    ids=lambda each: each.model_type if isinstance(each, PretrainedConfig) else "",
)
def test_what_counts_tokens_is_small(config: PretrainedConfig, names: list[str]) -> None:
    toy = toy_config(config)
    for name in names:
        assert 1 < getattr(toy, name) < TOY_LENGTH // 2 < getattr(config, name) or name == "index_topk_blocks"
    assert getattr(toy, "index_topk_blocks", 1) * getattr(toy, "index_block_size", 1) < TOY_LENGTH


def test_sizes_stay() -> None:
    toy = toy_config(LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
    assert (toy.max_position_embeddings, toy.rope_parameters["rope_theta"]) == (2048, 5e5)


def test_the_reference_selects_keys_as_the_model_itself_does() -> None:
    """MiniMax M3 selects blocks of keys under the name "eager" only: under another, wrong would equal wrong."""
    config = toy_config(MiniMaxM3VLTextConfig(layer_types=["full_attention", "minimax_m3_sparse"] * 30))
    with torch.no_grad(), full_precision():
        logits = [
            reference_model(config, *name)(input_ids=toy_tokens(config), use_cache=False).logits
            for name in (["eager"], [])
        ]
    assert (logits[0] - logits[1]).abs().max() > 1e-3 * logits[0].abs().max()


@pytest.mark.parametrize("floor_scale", [64, 8192])
def test_a_scale_of_positions_is_seen_at_any_value(monkeypatch: pytest.MonkeyPatch, floor_scale: int) -> None:
    """If every slice began at position 0, then Llama 4's last layer of four would be wrong in long sequences."""
    monkeypatch.setattr(SliceCache, "get_seq_length", lambda *_: 0)
    with pytest.raises(SlipstreamError, match=r"'llama4_text'.*differs from the whole one in layer 3"):
        check_sliceable(Llama4TextConfig(floor_scale=floor_scale))


class PacedConfig(LlamaConfig):
    """A Llama whose embeddings are scaled by how often `pace` tokens have passed, which slices don't know."""

    model_type = "paced_llama"
    pace: int = 4096
    least: int = 0


class PacedModel(LlamaModel):
    def forward(self, input_ids: Tensor, inputs_embeds: None, **kwargs: Any) -> Any:
        steps = torch.arange(input_ids.shape[1]) // self.config.pace
        embeds = self.embed_tokens(input_ids) * (1.0 + steps.double()[None, :, None])
        return super().forward(inputs_embeds=embeds, **kwargs)


class PacedForCausalLM(LlamaForCausalLM):
    config_class = PacedConfig

    def __init__(self, config: PacedConfig) -> None:
        if config.pace < config.least:
            raise ValueError("as the size of a weight would")
        super().__init__(config)
        self.model = PacedModel(config)


AutoConfig.register("paced_llama", PacedConfig)
AutoModelForCausalLM.register(PacedConfig, PacedForCausalLM)


@pytest.mark.parametrize(("pace", "least"), [(4096, 0), (100, 100)], ids=["made small", "at its own value"])
def test_a_number_of_unknown_meaning_is_tried(pace: int, least: int) -> None:
    config = PacedConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, pace=pace, least=least)
    with pytest.raises(SlipstreamError, match="differs from the whole one in the input of layer 0"):
        check_sliceable(config)
