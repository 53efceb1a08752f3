"""A toy has every kind of layer of its model, and what is no language model in it is small, too."""

from __future__ import annotations

import copy
from itertools import chain

import pytest
import torch
from transformers import AutoConfig, DbrxConfig, PretrainedConfig

from slipstream import Pipeline
from slipstream.model.toy import full_precision, reference_model, toy_config, toy_tokens
from support.architectures import (
    BOUND,
    build,
    gradient_error,
    no_rounding_inside,
    tokens,
    unsplit_step,
)
from support.versions import provided

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
    pipe = Pipeline(copy.deepcopy(model), num_ranks=2, slices=[13, 17], partition=[2, 2])
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
