"""Small configs of architectures whose queries see the keys that an indexer selects for them."""

from __future__ import annotations

from transformers import DeepseekV32Config, GlmMoeDsaConfig, PretrainedConfig

from support.architectures import VOCABULARY

LENGTH = 96
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": LENGTH,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 7,
}

SPARSE: dict[str, PretrainedConfig] = {
    "deepseek_v32": DeepseekV32Config(**_SIZES),
    "glm_moe_dsa": GlmMoeDsaConfig(**_SIZES, indexer_types=["full", "shared", "full", "shared"]),
}
