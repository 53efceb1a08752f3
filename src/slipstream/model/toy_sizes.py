"""Makes the numbers of a configuration small: widths, layers, and numbers of tokens.

A window, a block, a top-k over keys or a scale of positions changes nothing in a sequence that is shorter, so a toy
that keeps it says nothing about longer sequences. Configurations don't say which numbers count tokens, so names decide:
those that contain a word of tokens do, those that contain a word of sizes don't, and the others are tried.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from math import gcd
from typing import Any, NamedTuple

from transformers import PretrainedConfig

_NUM_HEADS = 2
# CodeGen's code divides the heads into four groups.
_MOST_HEADS = {"codegen": 4}
_FEATURES = (  # features of feed-forwards, low ranks, per-layer embeddings and convolutions over sounds
    *("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("intermediate_size_mlp", "decoder_ffn_dim", "encoder_ffn_dim", "dff", "ffn_hidden_size"),
    *("expert_ffn_hidden_size", "shared_intermediate_size", "feed_forward_size"),
    *("q_lora_rank", "kv_lora_rank", "o_lora_rank", "laurel_rank", "hidden_size_per_layer_input"),
    *("nemo_conv_channels", "ext_pw_out_channel", "depthwise_separable_out_channel"),
)
# Sizes of heads without rotary embedding.
_RECURRENT_HEAD_SIZES = ("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim")
# Several heads, as keys of equal scores are selected by their places.
_INDEX_HEADS = ("index_n_heads",)
_VOCABULARIES = ("vocab_size", "decoder_vocab_size", "shape_vocab_size", "pronunciation_vocab_size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num")
_INNER = 32  # features inside a feed-forward
_MOST = {  # largest toy value -> names of sizes that change no code path
    128: (*_VOCABULARIES, "vocab_size_per_layer_input", "encoder_hash_byte_group_vocab"),
    _INNER: (*_FEATURES, "position_bias_num_buckets"),
    4: ("decoder_layers", "encoder_layers", *_EXPERTS),
    16: ("mamba_d_state", "ssm_state_size", "state_size", "mamba_state_dim", *_RECURRENT_HEAD_SIZES, *_INDEX_HEADS),
    2: ("decoder_attention_heads", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
    1: ("n_group", "topk_group"),
}
_HEADLESS_WIDTH = 64
# A toy with two heads of more features than this would take seconds.
_WIDE_HEAD = 128
_POSITIONS = re.compile(r"position|rope|rotary|alibi|seq_len|ctx")  # words in names of fields that count tokens
_HEAD_COUNTS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads")
_WINDOW_HEADS = ("swa_num_attention_heads", "swa_num_key_value_heads")  # heads of layers with a window
_RECURRENT_HEADS = ("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads")
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers", "decoder_layers")
WIDTHS = ("hidden_size", "n_embd", "d_model")
# Sizes equal to the model's width or a multiple of it.
_LINKED = ("attention_hidden_size", "embedding_dim", "lru_width")
# Width of embeddings, projected if other than the model's.
_EMBEDDING_WIDTHS = ("embedding_size", "word_embed_proj_dim")
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
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in numbers):
        return
    small = [smaller(item) for item in value] if isinstance(value, list) else smaller(value)
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
    before = getattr(toy, heads)
    after = _MOST_HEADS.get(toy.model_type, _NUM_HEADS)
    keys = first_of(toy, _KEY_VALUE_HEADS)
    as_many = [name for name in _INDEX_HEADS if keys and getattr(toy, name, None) == getattr(toy, keys)]
    # MiniMax M3's indexer has as many heads as there are key-value heads.
    names = (heads, *_KEY_VALUE_HEADS, *_WINDOW_HEADS, *as_many)
    for fields in (toy, *overrides.values(), *layer_parts(toy)):
        for name in names:
            _change(fields, name, lambda size: max(1, after * size // before))
    _set_width(toy, width, _head_width(toy, getattr(toy, width) // before) * after)
    recurrent = [name for name in _RECURRENT_HEADS if isinstance(getattr(toy, name, None), int)]
    fewest = min((getattr(toy, name) for name in recurrent), default=1)
    for name in recurrent:
        setattr(toy, name, max(1, getattr(toy, name) * min(_NUM_HEADS, fewest) // fewest))
    # Without n_inner, feed-forwards would be four times the width.
    if getattr(toy, "n_inner", 0) is None:
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
    """Sets the model's width, and its multiples with it, in parts of layers, too."""
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
    expand = first_of(toy, ("mamba_expand", "expand"))
    width = first_of(toy, WIDTHS)
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


_NUM_LAYERS = 4
_MOST_LAYERS = 12
_COUNTED_AGAIN = ("num_blocks",)  # further names of the number of layers
_PER_LAYER_LISTS = ("layer_types", "no_rope_layers", "mlp_layer_types")
_FIRST_OF_KIND = re.compile(r"first_k_dense_replace|num_dense_layers|layer_offset|start_index")
# The last layers reuse keys and values of the last earlier layer of their kind.
_REUSING = "num_kv_shared_layers"


def take_layer_overrides(config: PretrainedConfig) -> dict[int, dict[str, Any]]:
    """Takes the values of single layers out of a configuration; returns them by the layer's number."""
    if not getattr(config, "is_heterogeneous", False):
        return {}
    overrides = {int(index): dict(values) for index, values in config.to_dict()["per_layer_config"].items()}
    config.per_layer_config = None
    return overrides


def shrink_layers(toy: PretrainedConfig, overrides: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Keeps as many layers as show every kind twice, so that kinds meet across slices and stages.

    Returns the `overrides`, values of single layers by the layer's number, of those that are kept.
    """
    # Some other attributes are computed, and can't be set.
    fields = vars(toy).keys() | toy.attribute_map.keys()
    name = first_of(toy, tuple(name for name in LAYER_COUNTS if name in fields))
    if name is None:
        return overrides
    num_layers = getattr(toy, name)
    lists = {key: value for key, value in vars(toy).items() if isinstance(value, list)}
    indices = {key for key, values in lists.items() if key not in _PER_LAYER_LISTS and _are_indices(values, num_layers)}
    per_layer = [
        k for k, values in lists.items() if k in _PER_LAYER_LISTS or (len(values) == num_layers and k not in indices)
    ]
    rows = _rows([lists[key] for key in per_layer], num_layers)
    firsts = {key: value for key, value in vars(toy).items() if _FIRST_OF_KIND.search(key) and isinstance(value, int)}
    listed = [lists[key] for key in indices]
    kinds = [
        repr((row, overrides.get(i), [i in values for values in listed], [i < first for first in firsts.values()]))
        for i, row in enumerate(rows)
    ]
    kept_layers = _kept(toy, kinds)
    for key, first in firsts.items():
        setattr(toy, key, sum(index < first for index in kept_layers))
    for key in per_layer:
        setattr(toy, key, [lists[key][index] for index in kept_layers if index < len(lists[key])])
    for key in indices:
        setattr(toy, key, [kept_layers.index(index) for index in lists[key] if index in kept_layers])
    for count_name in (name, *(again for again in _COUNTED_AGAIN if getattr(toy, again, None) == num_layers)):
        setattr(toy, count_name, len(kept_layers))
    return {kept_layers.index(index): values for index, values in overrides.items() if index in kept_layers}


def _rows(columns: list[list[Any]], num_layers: int) -> list[tuple[Any, ...]]:
    return [tuple(column[index] for column in columns if index < len(column)) for index in range(num_layers)]


def _kept(toy: PretrainedConfig, kinds: list[str]) -> list[int]:
    """Returns the numbers of the layers to keep: the first ones, and as many kinds of those that reuse others' keys."""
    num_reusing = getattr(toy, _REUSING, None) or 0
    first_reusing = len(kinds) - num_reusing
    indices = _showing_all(kinds[:first_reusing])
    if num_reusing:
        reusing = kinds[first_reusing:]
        num_kept = 1 + max(map(reusing.index, reusing))
        indices += range(first_reusing, first_reusing + num_kept)
        setattr(toy, _REUSING, num_kept)
    return indices


def _showing_all(kinds: list[str]) -> list[int]:
    """Returns the first layers, up to the first one of the last new kind, or one of each kind where those are many."""
    last_new = max(map(kinds.index, kinds), default=0)
    if last_new < _MOST_LAYERS:
        return list(range(min(len(kinds), max(_NUM_LAYERS, 1 + last_new))))
    return sorted(map(kinds.index, set(kinds)))


def _are_indices(values: list[Any], num_layers: int) -> bool:
    """Returns whether these are numbers of layers, perhaps of all."""
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return False
    return all(0 <= value < num_layers for value in values) and all(a < b for a, b in pairwise(values))


_SIZES = re.compile(  # words in names of numbers unrelated to the length of a sequence
    r"vocab|hidden|intermediate|inner|ffn|ff$|dim|width|rank|head|layer|expert|group|ids?$|theta|factor|emb|d_model"
    r"|kernel|conv|state|channel|eps$|ratio|mult|cap$|softcap|limit|bins|codebook|seed|iter|coef|clip|moe"
    r"|num_heads|ssm|scalar|crop|sampling|filters|input_size|proj_size|buckets|forward_size|ngram|feature|base$|parts|beta|encoder|image|audio|vision|mask_|rescale|inference"
)
_LENGTHS = re.compile(r"max_.*(position|length|len$)|n_positions|n_ctx|context_length")  # the longest sequence allowed
_TOKENS = {  # largest value in a toy -> words in names of numbers that count tokens
    # T5's relatives have 32 buckets of distances, and the value has to be above half of that.
    20: re.compile(r"max_distance"),
    3: re.compile(r"top_?k"),
    4: re.compile(r"block(?!s$)|compress"),
    7: re.compile(r"window|local_att|distance|extent|len(gth)?$|span|stride"),
    16: re.compile(r"chunk|floor|scale"),
}
_UNKNOWN = 16  # value in a toy for a number with none of these words


class TokenNumber(NamedTuple):
    """A number of a configuration that counts tokens, or may."""

    path: tuple[str, ...]  # names of the dictionaries and configurations around the field, then its own
    value: float  # the number, or the smallest one of a list
    most: int  # largest value in a toy
    is_known: bool  # a name that says so


def token_numbers(config: PretrainedConfig | dict[str, Any], length: int) -> list[TokenNumber]:
    """Returns the numbers of a text configuration, or of one layer's fields, that count tokens, or may.

    The latter are those of at least `length` whose names say nothing. Those of rotary embeddings are left out: they
    depend on each other.
    """
    return list(_find(config, length, ()))


def shrink_number(config: PretrainedConfig | dict[str, Any], number: TokenNumber) -> None:
    """Sets the number, or each of a list's, to at most its value in a toy."""
    *parents, name = number.path
    inside: Any = config
    for parent in parents:
        inside = _fields(inside)[parent]
    value = _fields(inside)[name]
    small = [min(item, number.most) for item in value] if isinstance(value, list) else min(value, number.most)
    if isinstance(inside, dict):
        inside[name] = small
    else:
        setattr(inside, name, small)


def _fields(config: Any) -> dict[str, Any]:
    return config if isinstance(config, dict) else vars(config)


def _find(config: Any, length: int, parents: tuple[str, ...]) -> Iterator[TokenNumber]:
    for name, value in _fields(config).items():
        if not isinstance(name, str) or name.startswith(("_", "rope_")) or _LENGTHS.search(name):
            continue
        if isinstance(value, (dict, PretrainedConfig)):
            yield from _find(value, length, (*parents, name))
        numbers = value if isinstance(value, list) and value else [value]
        if _SIZES.search(name) or not all(_is_number(value) for value in numbers):
            continue
        most = next((most for most, words in _TOKENS.items() if words.search(name)), None)
        if (most is not None and max(numbers) > most) or max(numbers) >= length:
            yield TokenNumber((*parents, name), min(numbers), most or _UNKNOWN, most is not None)


def _is_number(value: Any) -> bool:
    """Returns whether this is a whole number above 1, which every number of tokens is."""
    is_finite = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return is_finite and value == int(value) and value > 1


_LINKED_SIZES = re.compile(r"hidden_size|_dim$|width|output_size|out_size")  # sizes that may be another part's width


def width_of(config: PretrainedConfig) -> int | None:
    """Returns the width of the hidden states; None where the configuration has none by a known name."""
    name = first_of(config, WIDTHS)
    return None if name is None else getattr(config, name)


def shrink_other_parts(whole: PretrainedConfig, text: PretrainedConfig, text_width: int | None) -> None:
    """Makes every other configuration in `whole` small, and all that must be as wide as a part that was made so.

    `text_width` is that of `text` before it was made small.
    """
    done = [text, *layer_parts(text)]
    parts = [part for part in _parts(whole) if not any(part is finished for finished in done)]
    small = {text_width: width_of(text)}
    by_part: dict[int, dict[int | None, int | None]] = {}  # id of the part -> its old width -> the new one
    for part in parts:
        overrides = take_layer_overrides(part)
        before = width_of(part)
        shrink_widths(part, overrides)
        if overrides := shrink_layers(part, overrides):
            part.per_layer_config = overrides
        by_part[id(part)] = {before: width_of(part)}
        small = by_part[id(part)] | small
    for part in [whole, *parts] if parts else []:
        widths = small | by_part.get(id(part), {})
        for name, value in vars(part).items():
            if isinstance(value, int) and value in widths and _LINKED_SIZES.search(name) and "head" not in name:
                setattr(part, name, widths[value])


def _parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            yield value
            yield from _parts(value)
