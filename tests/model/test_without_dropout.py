"""A model whose dropout is switched off computes in training what it does in evaluation, wherever the rate is kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoKrConfig, PeftConfig
from transformers import AutoModelForCausalLM, BloomConfig, FalconConfig, GPTJConfig, OPTConfig, PretrainedConfig

from slipstream.model.anatomy import random_rates, switch_off_dropout, uses_randomness
from support.adapters import adapted, lora
from support.architectures import VOCABULARY, tokens, with_dropout

SIZES: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
OPT: dict[str, Any] = {"ffn_dim": 32, "word_embed_proj_dim": 32, "max_position_embeddings": 64}
MODELS: dict[str, PretrainedConfig] = {
    "gpt2, by modules": with_dropout("gpt2", 0.3),
    "llama, by an attribute": with_dropout("llama", 0.3),
    "bloom, by attributes": BloomConfig(**SIZES, n_layer=2, n_head=4, hidden_dropout=0.3, attention_dropout=0.3),
    "falcon, by its configuration": FalconConfig(**SIZES, hidden_dropout=0.3, attention_dropout=0.0),
    "gptj": GPTJConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, resid_pdrop=0.3),
    "opt": OPTConfig(**SIZES, **OPT, dropout=0.3),
}
TARGETS = ["q_proj", "v_proj"]
ADAPTERS: dict[str, PeftConfig] = {
    "lora": lora(lora_dropout=0.3),
    "loha": LoHaConfig(target_modules=TARGETS, rank_dropout=0.3, module_dropout=0.3, init_weights=False),
    "lokr": LoKrConfig(target_modules=TARGETS, rank_dropout=0.3, module_dropout=0.3, init_weights=False),
}


def drops(model: Any, inputs: torch.Tensor) -> bool:
    """Whether one of a few forwards in training differs from that in evaluation."""

    def logits() -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = model(input_ids=inputs, use_cache=False).logits
        return result

    expected = copy.deepcopy(model).eval()
    model, wanted = model.train(), expected(input_ids=inputs, use_cache=False).logits
    return any(not torch.equal(logits(), wanted) for _ in range(4))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_drops_nothing(name: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name]), attn_implementation="eager")
    config, given = model.config, model.config.to_dict()
    assert uses_randomness(model)
    assert drops(model, tokens())
    switch_off_dropout(model)
    assert not drops(model, tokens())
    assert not uses_randomness(model)
    assert config.to_dict() == given


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_drops_nothing(name: str) -> None:
    model = adapted(ADAPTERS[name])
    assert drops(model, tokens())
    switch_off_dropout(model)
    assert not drops(model, tokens())
    assert not any(getattr(module, rate) for module, rate in random_rates(model))
