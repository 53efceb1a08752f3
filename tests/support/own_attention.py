"""Small configs of architectures whose layers attend by code of their own, a feature each."""

from __future__ import annotations

from transformers import (
    BloomConfig,
    CodeGenConfig,
    FalconConfig,
    GPTJConfig,
    GPTNeoConfig,
    MptConfig,
    PretrainedConfig,
    XGLMConfig,
)

from support.architectures import VOCABULARY

LENGTH = 96
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
