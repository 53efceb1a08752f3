"""Makes a configuration's heads, widths, vocabularies and experts few and small."""

from __future__ import annotations

import re
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
_OTHER_FEATURES = (  # of low ranks, of embeddings for each layer, and of convolutions over sounds
    *("q_lora_rank", "kv_lora_rank", "o_lora_rank", "laurel_rank", "hidden_size_per_layer_input"),
    *("nemo_conv_channels", "ext_pw_out_channel", "depthwise_separable_out_channel"),
)
_RECURRENT_HEAD_SIZES = ("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim")  # without rotary embedding
_INDEX_HEADS = ("index_n_heads",)  # several, as keys of equal scores are selected by their places
_VOCABULARIES = ("vocab_size", "decoder_vocab_size", "shape_vocab_size", "pronunciation_vocab_size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num")
_INNER = 32  # features inside a feed-forward
_MOST = {  # sizes that change no code path: largest toy value -> names
    128: (*_VOCABULARIES, "vocab_size_per_layer_input", "encoder_hash_byte_group_vocab"),
    _INNER: (*_FEATURES, *_MORE_FEATURES, *_OTHER_FEATURES, "position_bias_num_buckets"),
    4: ("decoder_layers", "encoder_layers", *_EXPERTS),
    16: ("mamba_d_state", "ssm_state_size", "state_size", "mamba_state_dim", *_RECURRENT_HEAD_SIZES, *_INDEX_HEADS),
    2: ("decoder_attention_heads", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
    1: ("n_group", "topk_group"),
}
_HEADLESS_WIDTH = 64
_WIDE_HEAD = 128  # features of the width; a toy of two such heads would take seconds
_POSITIONS = re.compile(r"position|rope|rotary|alibi|seq_len|ctx")  # words of fields of models that count tokens
_HEAD_COUNTS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads")
_WINDOW_HEADS = ("swa_num_attention_heads", "swa_num_key_value_heads")  # of layers with a window
_RECURRENT_HEADS = ("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads")
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers", "decoder_layers")
WIDTHS = ("hidden_size", "n_embd", "d_model")
_LINKED = ("attention_hidden_size", "embedding_dim", "lru_width")  # that are the model's width or a multiple of it
_EMBEDDING_WIDTHS = ("embedding_size", "word_embed_proj_dim")  # of tokens, projected where it isn't the model's width
_WIDTH_PARTS = "axial_pos_embds_dim"  # sizes that add up to the width
_STATE_SPACE_HEADS = {  # their number -> their size
    "mamba_n_heads": "mamba_d_head",
    "n_mamba_heads": "mamba_headdim",
    "mamba_num_heads": "mamba_head_dim",
    "num_heads": "head_dim",
}
_STATE_SPACE_WIDTH = "mamba_d_ssm"
_STATE_SPACE_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")


def shrink_widths(toy: PretrainedConfig, overrides: dict[int, dict[str, Any]]) -> None:
    """Reduces the number of heads, not their size: rope tables and scalings depend on the head size alone.

    `overrides` are the values of single layers, by the layer's number.
    """
    _shrink_heads(toy, overrides)
    _shrink_state_spaces(toy)
    for fields in (toy, *overrides.values(), *layer_parts(toy)):
        for most, names in _MOST.items():
            for name in names:
                _change(fields, name, partial(min, most))


def layer_parts(config: PretrainedConfig) -> list[PretrainedConfig]:
    """Returns the configurations inside this one of its layers' parts: they have neither layers nor heads of their
    own."""
    inside = [value for value in vars(config).values() if isinstance(value, PretrainedConfig)]
    return [part for part in inside if first_of(part, (*LAYER_COUNTS, *_HEAD_COUNTS)) is None]


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
    if heads is None:  # such as a recurrent model
        _set_width(toy, width, _HEADLESS_WIDTH)
        return
    before, after = getattr(toy, heads), _MOST_HEADS.get(toy.model_type, _NUM_HEADS)
    keys = first_of(toy, _KEY_VALUE_HEADS)
    as_many = [name for name in _INDEX_HEADS if keys and getattr(toy, name, None) == getattr(toy, keys)]
    names = (heads, *_KEY_VALUE_HEADS, *_WINDOW_HEADS, *as_many)  # MiniMax M3's indexer has a head for each of keys
    for fields in (toy, *overrides.values(), *layer_parts(toy)):
        for name in names:
            _change(fields, name, lambda number: max(1, after * number // before))
    _set_width(toy, width, _head_width(toy, getattr(toy, width) // before) * after)
    recurrent = [name for name in _RECURRENT_HEADS if isinstance(getattr(toy, name, None), int)]
    fewest = min((getattr(toy, name) for name in recurrent), default=1)
    for name in recurrent:
        setattr(toy, name, max(1, getattr(toy, name) * min(_NUM_HEADS, fewest) // fewest))
    if getattr(toy, "n_inner", 0) is None:  # it would be four times the width
        toy.n_inner = _INNER


def _head_width(toy: PretrainedConfig, size: int) -> int:
    """Returns a head's part of the width: smaller only where no position could depend on it, as in a recurrence.

    A matrix memory has the square of it for every token. Where so many of a head's features are rotated as the
    configuration says, there may be fewer of the others. Wide heads keep their size if it is a field of its own.
    """
    if isinstance(vars(toy).get("head_dim"), int) and size > _WIDE_HEAD:
        return _HEADLESS_WIDTH
    rotated = getattr(toy, "rotary_dim", None)
    if isinstance(rotated, int):
        return min(size, 2 * rotated)
    return size if any(_POSITIONS.search(name) for name in vars(toy)) else min(size, _HEADLESS_WIDTH)


def _set_width(toy: PretrainedConfig, width: str, after: int) -> None:
    """Sets the model's width, and as many times as before what is as many times as wide, in parts of layers, too."""
    before = getattr(toy, width)
    for fields in (toy, *layer_parts(toy)):
        for name in {fields.attribute_map.get(name, name) for name in (*WIDTHS, *_LINKED)}:
            _change(fields, name, lambda size: size if size % before else size // before * after)
    for name in _EMBEDDING_WIDTHS:
        _change(toy, name, lambda size: after if size == before else after // 2 if size < before else 2 * after)
    parts = getattr(toy, _WIDTH_PARTS, None)
    if parts and sum(parts) == before:
        smaller = [size * after // before for size in parts[:-1]]
        setattr(toy, _WIDTH_PARTS, [*smaller, after - sum(smaller)])


def _shrink_state_spaces(toy: PretrainedConfig) -> None:
    """Keeps as many of Mamba 2's heads, whose width is a multiple of the model's, as fit its smaller width.

    Where the heads have a width of their own, it becomes the model's.
    """
    expand, width = first_of(toy, ("mamba_expand", "expand")), first_of(toy, WIDTHS)
    heads = first_of(toy, tuple(_STATE_SPACE_HEADS))
    size = None if heads is None else first_of(toy, (_STATE_SPACE_HEADS[heads],))
    if expand is None or width is None or heads is None or size is None:
        return
    together = getattr(toy, expand) * getattr(toy, width)
    if getattr(toy, _STATE_SPACE_WIDTH, None):
        together = min(getattr(toy, _STATE_SPACE_WIDTH), getattr(toy, width))
        setattr(toy, _STATE_SPACE_WIDTH, together)
    num_heads = max(1, together // getattr(toy, size))
    setattr(toy, heads, num_heads)
    setattr(toy, size, together // num_heads)
    groups = first_of(toy, _STATE_SPACE_GROUPS)
    if groups is not None:
        setattr(toy, groups, gcd(getattr(toy, groups), num_heads))
