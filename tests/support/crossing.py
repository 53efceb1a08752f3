"""Small configs of architectures whose layers take more than hidden states from the layers before."""

from __future__ import annotations

from transformers import Gemma3nTextConfig, Gemma4TextConfig, PretrainedConfig

from support.architectures import VOCABULARY

LENGTH = 64
_SIZES = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "hidden_size_per_layer_input": 8,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 7,
    "max_position_embeddings": LENGTH,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}

CROSSING: dict[str, PretrainedConfig] = {
    "gemma3n_text": Gemma3nTextConfig(
        **_SIZES, laurel_rank=4, altup_num_inputs=3, activation_sparsity_pattern=[0.5, 0.5, 0.0, 0.0, 0.0, 0.0]
    ),
    "gemma4_text": Gemma4TextConfig(**_SIZES, global_head_dim=16),
    "gemma4_text, experts": Gemma4TextConfig(
        **_SIZES | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}, **_EXPERTS, global_head_dim=16
    ),
}
