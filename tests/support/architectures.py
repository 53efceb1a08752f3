"""Small configs of real architectures, and the float64 comparison that says whether two runs are equal."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3Config,
)

from slipstream.model import causal_cross_entropy
from slipstream.model.toy import REFERENCE_ATTENTION, full_precision

VOCABULARY = 61
LENGTH = 64
BOUND = 1e-10  # the largest relative error that still counts as exact in float64

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": LENGTH,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def _rope(**parameters: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


def llama(**changes: object) -> LlamaConfig:
    return LlamaConfig(**_COMMON | changes)


ARCHITECTURES: dict[str, PretrainedConfig] = {
    "llama": llama(),
    "llama, tied": llama(tie_word_embeddings=True),
    "llama, dynamic rope": llama(max_position_embeddings=24, **_rope(rope_type="dynamic", factor=2.0)),
    "qwen3": Qwen3Config(**_COMMON),
    "qwen2_moe": Qwen2MoeConfig(
        **_COMMON, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4, num_experts_per_tok=2
    ),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=4,
        n_head=4,
        n_positions=LENGTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "mixtral": MixtralConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2),
    "mistral, window of 7": MistralConfig(**_COMMON, sliding_window=7),
    "gemma2": Gemma2Config(**_COMMON, sliding_window=7, query_pre_attn_scalar=8),
    "gemma3": Gemma3TextConfig(**_COMMON, sliding_window=7, query_pre_attn_scalar=8, sliding_window_pattern=2),
    "olmo2": Olmo2Config(**_COMMON),
    "phi3, longrope": Phi3Config(
        **_COMMON,
        original_max_position_embeddings=24,  # which outdoes that of the rope's own parameters
        **_rope(rope_type="longrope", long_factor=[2.0] * 4, short_factor=[1.0] * 4, partial_rotary_factor=1.0),
    ),
    "gpt_neox": GPTNeoXConfig(**_COMMON),
    "llama4_text": Llama4TextConfig(
        **_COMMON, intermediate_size_mlp=48, num_local_experts=4, attention_chunk_size=16, attn_temperature_tuning=True
    ),
    "gpt_oss": GptOssConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=7),
}


# What has gradients: they themselves by name, or a model, a Pipeline, or whatever has named parameters.
Gradients = Mapping[str, Tensor] | Any


def build(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """The unsplit model in float64, with its own eager attention."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(
        copy.deepcopy(config),
        dtype=torch.float64,
        attn_implementation=REFERENCE_ATTENTION,
        experts_implementation="eager",
    )


def tokens(batch: int = 2, length: int = LENGTH, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)


def labels_of(inputs: Tensor) -> Tensor:
    """The inputs, with some that do not count: at the beginning of the first row, and here and there."""
    labels = inputs.clone()
    labels[0, :11] = -100
    labels[-1, 20::7] = -100
    return labels


def unsplit_step(model: PreTrainedModel, inputs: Tensor, labels: Tensor, **kwargs: Tensor) -> Tensor:
    """Loss and gradients of the whole model in one piece: mean over all valid tokens of the batch."""
    logits = model(input_ids=inputs, use_cache=False, **kwargs).logits
    total, count = causal_cross_entropy(logits[:, :-1], labels[:, 1:])
    loss = total / count
    loss.backward()
    return loss.detach()


def gradient_error(expected: Gradients, found: Gradients) -> float:
    """max|g-g'| / max(max|g'|, 1e-6 of the largest gradient), the worst over all parameters."""
    expected, found = gradients(expected), gradients(found)
    floor = 1e-6 * max(gradient.abs().max() for gradient in expected.values())
    return max(
        float((found[name] - gradient).abs().max() / max(gradient.abs().max(), floor))
        for name, gradient in expected.items()
    )


def gradients(model: Gradients) -> dict[str, Tensor]:
    """Copies of the gradients of a model, a Pipeline, or whatever has named parameters; a mapping is one already."""
    if isinstance(model, Mapping):
        return dict(model)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@contextmanager
def no_rounding_by_float() -> Iterator[None]:
    """Leaves float64 as it is in `Tensor.float` of every thread, and in backwards, which `no_rounding_inside` doesn't
    reach."""
    narrow = Tensor.float
    with patch.object(Tensor, "float", lambda x: x if x.dtype == torch.float64 else narrow(x)):
        yield


@contextmanager
def no_rounding_inside() -> Iterator[None]:
    """Models' own norms and softmaxes stay in float64, so that a difference is a mistake and not a flipped rounding."""
    with full_precision(), warnings.catch_warnings():
        yield


def with_dropout(name: str, rate: float) -> PretrainedConfig:
    """The configuration of an architecture with every dropout that it has."""
    config = copy.deepcopy(ARCHITECTURES[name])
    for dropout in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"):
        if hasattr(config, dropout):
            setattr(config, dropout, rate)
    return config
