"""Small configs of architectures whose layers attend by code of their own, take more than hidden states from the layers
before, or let queries see the keys that an indexer selects for them."""

from __future__ import annotations

from transformers import (
    BloomConfig,
    CodeGenConfig,
    DeepseekV32Config,
    FalconConfig,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    GlmMoeDsaConfig,
    GPTJConfig,
    GPTNeoConfig,
    MptConfig,
    PretrainedConfig,
    XGLMConfig,
)

from support.architectures import VOCABULARY
from support.hybrids import LENGTH, SIZES

_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_FALCON = {"vocab_size": VOCABULARY, "num_hidden_layers": 4, "eos_token_id": 0, "bos_token_id": 0}

OWN_ATTENTION: dict[str, PretrainedConfig] = {
    "bloom": BloomConfig(vocab_size=VOCABULARY, hidden_size=48, n_layer=4, n_head=6),  # ALiBi
    "gptj": GPTJConfig(  # attention from a list of its own
        vocab_size=VOCABULARY, n_embd=32, n_layer=4, n_head=4, rotary_dim=4, n_positions=LENGTH, **_NO_DROPOUT
    ),
    "falcon, alibi": FalconConfig(  # rounded to bfloat16
        **_FALCON, hidden_size=48, num_attention_heads=6, alibi=True, multi_query=False, parallel_attn=False
    ),
    "gpt_neo": GPTNeoConfig(  # windows in a buffer of its own
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_layers=4,
        num_heads=4,
        window_size=7,
        attention_types=[[["global", "local"], 2]],
        max_position_embeddings=LENGTH,
    ),
    "mpt": MptConfig(vocab_size=VOCABULARY, d_model=48, n_layers=4, n_heads=6, max_seq_len=128),  # ALiBi from the end
    "falcon": FalconConfig(**_FALCON, hidden_size=32, num_attention_heads=4),  # one head of keys and values
    "codegen": CodeGenConfig(
        vocab_size=VOCABULARY, n_embd=32, n_layer=4, n_head=4, rotary_dim=4, n_positions=LENGTH, **_NO_DROPOUT
    ),
    "xglm": XGLMConfig(  # positions looked up in a table of sines; scores masked by float64's smallest number
        vocab_size=VOCABULARY,
        d_model=32,
        ffn_dim=48,
        num_layers=4,
        attention_heads=4,
        attention_dropout=0.0,
        dropout=0.0,
    ),
}

_CROSSING = {
    **SIZES,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 7,
}
_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}

CROSSING: dict[str, PretrainedConfig] = {
    "gemma3n_text": Gemma3nTextConfig(
        **_CROSSING, laurel_rank=4, altup_num_inputs=3, activation_sparsity_pattern=[0.5, 0.5, 0.0, 0.0, 0.0, 0.0]
    ),
    "gemma4_text": Gemma4TextConfig(**_CROSSING, global_head_dim=16),
    "gemma4_text, experts": Gemma4TextConfig(
        **_CROSSING | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}, **_EXPERTS, global_head_dim=16
    ),
}

_SPARSE = {
    **SIZES,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
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
    "deepseek_v32": DeepseekV32Config(**_SPARSE),
    "glm_moe_dsa": GlmMoeDsaConfig(**_SPARSE, indexer_types=["full", "shared", "full", "shared"]),
}
