"""Makes a configuration's heads, widths, vocabularies and experts few and small."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import gcd
from typing import Any

from transformers import PretrainedConfig

_NUM_HEADS = 2
_MOST_HEADS = {"codegen": 4}  # its code divides them into four groups
_FEATURES = ("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size", "shared_expert_intermediate_size")
_MORE_FEATURES = (
    *(
        "intermediate_size_mlp",
        "decoder_ffn_dim",
        "encoder_ffn_dim",
        "dff",
        "ffn_hidden_size",
        "expert_ffn_hidden_size",
    ),
    *("shared_intermediate_size", "feed_forward_size"),
)
_RECURRENT_HEAD_SIZES = ("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim")  # without rotary embedding
_INDEX_HEADS = ("index_n_heads",)  # several, as keys of equal scores are selected by their places
_INNER = 32  # features inside a feed-forward
_MOST = {  # sizes that change no code path: largest toy value -> names
    128: ("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "encoder_hash_byte_group_vocab"),
    _INNER: (*_FEATURES, *_MORE_FEATURES, "q_lora_rank", "kv_lora_rank", "position_bias_num_buckets"),
    4: ("decoder_layers", "encoder_layers", "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    16: ("mamba_d_state", "ssm_state_size", "state_size", "mamba_state_dim", *_RECURRENT_HEAD_SIZES, *_INDEX_HEADS),
    2: ("decoder_attention_heads", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
    1: ("n_group", "topk_group"),
}
_HEADLESS_WIDTH = 64
_HEAD_COUNTS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads")
_RECURRENT_HEADS = ("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads")
WIDTHS = ("hidden_size", "n_embd", "d_model")
_STATE_SPACE_HEADS = ("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads")
_STATE_SPACE_HEAD_SIZES = ("mamba_d_head", "mamba_headdim", "mamba_head_dim", "head_dim")
_STATE_SPACE_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")


def shrink_widths(toy: PretrainedConfig, overrides: dict[int, dict[str, Any]]) -> None:
    """Reduces the number of heads, not their size: rope tables and scalings depend on the head size alone.

    `overrides` are the values of single layers, by the layer's number.
    """
    _shrink_heads(toy, overrides)
    _shrink_state_spaces(toy)
    for fields in (toy, *overrides.values()):
        for most, names in _MOST.items():
            for name in names:
                _change(fields, name, partial(min, most))


def first_of(config: PretrainedConfig, names: tuple[str, ...]) -> str | None:
    """Returns the first of these names that is a whole number of the configuration."""
    return next((name for name in names if isinstance(getattr(config, name, None), int)), None)


def _change(fields: PretrainedConfig | dict[str, Any], name: str, smaller: Callable[[int], int]) -> None:
    """Makes a field smaller, if it is there: a whole number or a list of them."""
    value: Any = fields.get(name) if isinstance(fields, dict) else getattr(fields, name, None)
    numbers = value if isinstance(value, list) else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in numbers):
        return
    small = [smaller(each) for each in value] if isinstance(value, list) else smaller(value)
    if isinstance(fields, dict):
        fields[name] = small
    else:
        setattr(fields, name, small)


def _shrink_heads(toy: PretrainedConfig, overrides: dict[int, dict[str, Any]]) -> None:
    heads, width = first_of(toy, _HEAD_COUNTS), first_of(toy, WIDTHS)
    if width is None:
        return
    if heads is None:  # such as a recurrent model, whose widths are one size
        before = getattr(toy, width)
        for name in (width, "attention_hidden_size"):
            _change(toy, name, lambda size: _HEADLESS_WIDTH if size == before else size)
        return
    before, after = getattr(toy, heads), _MOST_HEADS.get(toy.model_type, _NUM_HEADS)
    for fields in (toy, *overrides.values()):
        for name in (heads, *_KEY_VALUE_HEADS):
            _change(fields, name, lambda number: max(1, after * number // before))
    setattr(toy, width, getattr(toy, width) // before * after)
    recurrent = [name for name in _RECURRENT_HEADS if isinstance(getattr(toy, name, None), int)]
    fewest = min((getattr(toy, name) for name in recurrent), default=1)
    for name in recurrent:
        setattr(toy, name, max(1, getattr(toy, name) * min(_NUM_HEADS, fewest) // fewest))
    if getattr(toy, "n_inner", 0) is None:  # it would be four times the width
        toy.n_inner = _INNER
    if hasattr(toy, "word_embed_proj_dim"):
        toy.word_embed_proj_dim = getattr(toy, width)


def _shrink_state_spaces(toy: PretrainedConfig) -> None:
    """Keeps as many of Mamba 2's heads, whose width is a multiple of the model's, as fit its smaller width."""
    expand, width = first_of(toy, ("mamba_expand", "expand")), first_of(toy, WIDTHS)
    heads, size = first_of(toy, _STATE_SPACE_HEADS), first_of(toy, _STATE_SPACE_HEAD_SIZES)
    if expand is None or width is None or heads is None or size is None or getattr(toy, "mamba_d_ssm", None):
        return
    num_heads = max(1, getattr(toy, expand) * getattr(toy, width) // getattr(toy, size))
    setattr(toy, heads, num_heads)
    setattr(toy, size, getattr(toy, expand) * getattr(toy, width) // num_heads)
    groups = first_of(toy, _STATE_SPACE_GROUPS)
    if groups is not None:
        setattr(toy, groups, gcd(getattr(toy, groups), num_heads))
