"""Small configs of architectures whose layers carry states from token to token, a feature each."""

from __future__ import annotations

from transformers import (
    BambaConfig,
    FalconH1Config,
    FalconMambaConfig,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Mamba2Config,
    MambaConfig,
    MiniMaxConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    PretrainedConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
    ZayaConfig,
    xLSTMConfig,
)

from support.architectures import VOCABULARY

LENGTH = 96
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": LENGTH,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_KINDS = ["linear_attention", "full_attention"] * 2
_DELTA_RULE = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 16,
    "initializer_range": 0.2,  # with less, the gradients of the first decays are as small as rounding
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_STATE_SPACE = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}

_SCAN = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "state_size": 8,
    "time_step_rank": 4,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}

HYBRIDS: dict[str, PretrainedConfig] = {
    "qwen3_next": Qwen3NextConfig(
        **SIZES, **_DELTA_RULE, **_EXPERTS, shared_expert_intermediate_size=16, layer_types=_KINDS
    ),
    "qwen3_5_text": Qwen3_5TextConfig(**SIZES, **_DELTA_RULE, layer_types=_KINDS),
    "lfm2": Lfm2Config(**SIZES, layer_types=["conv", "full_attention"] * 2),
    "bamba": BambaConfig(**SIZES, **_STATE_SPACE, attn_layer_indices=[1, 3]),
    "falcon_h1": FalconH1Config(**SIZES, **_STATE_SPACE, mamba_d_ssm=64),
    "nemotron_h": NemotronHConfig(
        **SIZES | {"num_hidden_layers": None},
        layers_block_type=["mamba", "moe", "attention", "mlp", "mamba"],
        head_dim=16,
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=16,
        n_routed_experts=4,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
    ),
    "minimax": MiniMaxConfig(**SIZES, head_dim=16, block_size=16, layer_types=_KINDS, num_local_experts=4),
    "mamba2": Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=3,
        num_heads=4,
        head_dim=16,
        state_size=8,
        n_groups=2,
        chunk_size=16,
        pad_token_id=None,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "mamba": MambaConfig(**_SCAN),
    "falcon_mamba": FalconMambaConfig(**_SCAN),
    "jamba": JambaConfig(
        **SIZES,
        mamba_d_state=8,
        mamba_dt_rank=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
    ),
    "kimi_linear": KimiLinearConfig(
        **SIZES | {"num_key_value_heads": 2},
        **_LATENT,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        linear_head_dim=8,
        linear_num_heads=4,
        layer_types=_KINDS,
    ),
    "olmo_hybrid": OlmoHybridConfig(**SIZES, **_DELTA_RULE, layer_types=_KINDS),
    "recurrent_gemma": RecurrentGemmaConfig(
        **SIZES, lru_width=32, attention_window_size=16, block_types=["recurrent", "recurrent", "attention"]
    ),
    "rwkv": RwkvConfig(
        vocab_size=VOCABULARY, context_length=LENGTH, hidden_size=32, num_hidden_layers=4, intermediate_size=48
    ),
    "xlstm": xLSTMConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=4, num_heads=2, chunk_size=16, pad_token_id=None
    ),
    "zaya": ZayaConfig(
        **SIZES, head_dim=16, num_experts=4, moe_intermediate_size=16, router_hidden_size=16, layer_types=["hybrid"] * 4
    ),
}
