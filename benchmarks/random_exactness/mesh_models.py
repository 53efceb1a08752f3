"""Draws models of which ranks can share slices and have different experts."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from benchmarks.random_exactness.cuts import Dice, Place, happens

_MIXTURES = ("gpt_oss", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "qwen3_5_moe_text")
_ALL = ("llama", "qwen3", "gemma3_text", *_MIXTURES)
_NOT_CUT = {"gpt_oss"}  # by tensor parallelism
_WIDTH, _HEAD, _WINDOW = 32, 8, 7


def mesh_config(dice: Dice, place: Place, num_stages: int) -> PretrainedConfig:
    """Returns the configuration of a model whose heads and experts the ranks can share."""
    names = _MIXTURES if place.ep > 1 else _ALL
    name = dice.choice([each for each in names if place.tp == 1 or each not in _NOT_CUT])
    heads = place.cp * place.tp * dice.choice([1, 2, 2]) if place.cp * place.tp > 1 else 4
    layers = max(2, num_stages + dice.randint(0, 2))
    experts = dice.choice([4, 4, 8])
    common: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": _WIDTH,
        "intermediate_size": 24,
        "moe_intermediate_size": 16,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": dice.choice([each for each in range(1, heads + 1) if heads % each == 0]),
        "head_dim": _HEAD,
        "max_position_embeddings": 64,
        "num_experts_per_tok": dice.randint(1, 2),
        "tie_word_embeddings": happens(dice, 0.3),
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
        "attention_dropout": 0.0,
    }
    own = {
        "llama": {"attention_bias": happens(dice, 0.3)},
        "qwen3": {},
        "gemma3_text": {
            "sliding_window": _WINDOW,
            "layer_types": _alternately(layers, "sliding_attention"),
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
            "query_pre_attn_scalar": _HEAD,
        },
        "gpt_oss": {
            "num_local_experts": experts,
            "sliding_window": _WINDOW,
            "layer_types": _alternately(layers, "sliding_attention"),
        },
        "qwen3_moe": {"num_experts": experts, "mlp_only_layers": [0] if happens(dice, 0.3) else []},
        "mixtral": {"num_local_experts": experts, "sliding_window": dice.choice([None, _WINDOW])},
        "deepseek_v3": {
            **{"n_routed_experts": experts, "n_group": experts // 2, "topk_group": 2, "first_k_dense_replace": 1},
            **{"q_lora_rank": dice.choice([None, 12]), "kv_lora_rank": 16, "v_head_dim": 8},
            **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "num_key_value_heads": heads},
        },
        "glm4_moe": {"n_routed_experts": experts, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
        "qwen3_5_moe_text": {
            **{"num_experts": experts, "shared_expert_intermediate_size": 16},
            # layers that carry a state can't share slices
            "layer_types": _alternately(layers, "full_attention" if place.cp > 1 else "linear_attention"),
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
            **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 3},
        },
    }
    return AutoConfig.for_model(name, **common | own[name])


def _alternately(layers: int, kind: str) -> list[str]:
    return [(kind, "full_attention")[place % 2] for place in range(layers)]
