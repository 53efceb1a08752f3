"""What counts tokens is small in a toy, so that the self-check sees what happens beyond it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
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

from slipstream import SlipstreamError
from slipstream.model import check_sliceable
from slipstream.model.hooks.slice_cache import SliceCache
from slipstream.model.toy import TOY_LENGTH, full_precision, reference_model, toy_config, toy_tokens


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
