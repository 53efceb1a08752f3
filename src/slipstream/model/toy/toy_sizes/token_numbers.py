"""Finds the numbers of a configuration that count tokens, and makes them small enough to matter in a toy.

A window, a block, a top-k over keys or a scale of positions changes nothing in a sequence that is shorter, so a toy
that keeps it says nothing about longer sequences. Configurations don't say which numbers count tokens, so names decide:
those that contain a word of tokens do, those that contain a word of sizes don't, and what is neither is tried.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from transformers import PretrainedConfig

_SIZES = re.compile(  # words of numbers that have nothing to do with how long a sequence is
    r"vocab|hidden|intermediate|inner|ffn|ff$|dim|width|rank|head|layer|expert|group|ids?$|theta|factor|emb|d_model"
    r"|kernel|conv|state|channel|eps$|ratio|mult|cap$|softcap|limit|bins|codebook|seed|iter|coef|clip|moe"
    r"|num_heads|ssm|scalar|crop|sampling|filters|input_size|proj_size|buckets|forward_size|ngram|feature|base$|parts|beta|encoder|image|audio|vision|mask_|rescale|inference"
)
_LENGTHS = re.compile(r"max_.*(position|length|len$)|n_positions|n_ctx|context_length")  # the longest sequence allowed
_TOKENS = {  # the largest value in a toy <- words of numbers that count tokens
    20: re.compile(r"max_distance"),  # of T5 and its relatives: above half of their 32 buckets
    3: re.compile(r"top_?k"),
    4: re.compile(r"block(?!s$)|compress"),
    7: re.compile(r"window|local_att|distance|extent|len(gth)?$|span|stride"),
    16: re.compile(r"chunk|floor|scale"),
}
_UNKNOWN = 16  # the value in a toy of a number that is neither


class TokenNumber(NamedTuple):
    """A number of a configuration that counts tokens, or may."""

    path: tuple[str, ...]  # the field's name, after those of the dictionaries and configurations that it is in
    value: float  # the smallest one, of a list
    most: int  # its largest value in a toy
    is_known: bool  # whether its name says so


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
    small = [min(each, number.most) for each in value] if isinstance(value, list) else min(value, number.most)
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
        if _SIZES.search(name) or not all(_is_number(each) for each in numbers):
            continue
        most = next((most for most, words in _TOKENS.items() if words.search(name)), None)
        if (most is not None and max(numbers) > most) or max(numbers) >= length:
            yield TokenNumber((*parents, name), min(numbers), most or _UNKNOWN, most is not None)


def _is_number(value: Any) -> bool:
    """Returns whether this is a whole number above 1, which every number of tokens is."""
    is_finite = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return is_finite and value == int(value) and value > 1
