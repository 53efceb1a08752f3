"""Keeps as many layers of a configuration as show every kind of layer."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from transformers import PretrainedConfig

from slipstream.model.toy.toy_sizes.widths import LAYER_COUNTS, first_of

_NUM_LAYERS = 4
_MOST_LAYERS = 12
_COUNTED_AGAIN = ("num_blocks",)  # a second name of the number of layers, where it is the same number
_PER_LAYER_LISTS = ("layer_types", "no_rope_layers", "mlp_layer_types")
_FIRST_OF_KIND = re.compile(r"first_k_dense_replace|num_dense_layers|layer_offset|start_index")
_REUSING = "num_kv_shared_layers"  # at the end, which use the keys and values of the last ones of their kind before


def take_layer_overrides(config: PretrainedConfig) -> dict[int, dict[str, Any]]:
    """Takes the values of single layers out of a configuration; returns them by the layer's number."""
    if not getattr(config, "is_heterogeneous", False):
        return {}
    overrides = {int(index): dict(each) for index, each in config.to_dict()["per_layer_config"].items()}
    config.per_layer_config = None
    return overrides


def shrink_layers(toy: PretrainedConfig, overrides: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Keeps as many layers as show every kind twice, so that kinds meet across slices and stages.

    Returns the `overrides`, values of single layers by the layer's number, of those that are kept.
    """
    fields = vars(toy).keys() | toy.attribute_map.keys()  # some others are computed
    name = first_of(toy, tuple(name for name in LAYER_COUNTS if name in fields))
    if name is None:
        return overrides
    num_layers = getattr(toy, name)
    lists = {key: value for key, value in vars(toy).items() if isinstance(value, list)}
    indices = {key for key, each in lists.items() if key not in _PER_LAYER_LISTS and _are_indices(each, num_layers)}
    per_layer = [
        k for k, each in lists.items() if k in _PER_LAYER_LISTS or (len(each) == num_layers and k not in indices)
    ]
    rows = _rows([lists[key] for key in per_layer], num_layers)
    firsts = {key: each for key, each in vars(toy).items() if _FIRST_OF_KIND.search(key) and isinstance(each, int)}
    listed = [lists[key] for key in indices]
    kinds = [
        repr((row, overrides.get(i), [i in each for each in listed], [i < first for first in firsts.values()]))
        for i, row in enumerate(rows)
    ]
    kept = _kept(toy, kinds)
    for key, first in firsts.items():
        setattr(toy, key, sum(index < first for index in kept))
    for key in per_layer:
        setattr(toy, key, [lists[key][index] for index in kept if index < len(lists[key])])
    for key in indices:
        setattr(toy, key, [kept.index(index) for index in lists[key] if index in kept])
    for each in (name, *(again for again in _COUNTED_AGAIN if getattr(toy, again, None) == num_layers)):
        setattr(toy, each, len(kept))
    return {kept.index(index): values for index, values in overrides.items() if index in kept}


def _rows(columns: list[list[Any]], num_layers: int) -> list[tuple[Any, ...]]:
    """Returns the values of each layer; of shorter lists, those that there are."""
    return [tuple(column[index] for column in columns if index < len(column)) for index in range(num_layers)]


def _kept(toy: PretrainedConfig, kinds: list[str]) -> list[int]:
    """Returns the numbers of the layers to keep: the first ones, and as many kinds of those that reuse others' keys."""
    num_reusing = getattr(toy, _REUSING, None) or 0
    first_reusing = len(kinds) - num_reusing
    kept = _showing_all(kinds[:first_reusing])
    if num_reusing:
        reusing = kinds[first_reusing:]
        num_kept = 1 + max(map(reusing.index, reusing))
        kept += range(first_reusing, first_reusing + num_kept)
        setattr(toy, _REUSING, num_kept)
    return kept


def _showing_all(kinds: list[str]) -> list[int]:
    """Returns the first layers, up to the first one of the last new kind, or one of each kind where those are many."""
    last_new = max(map(kinds.index, kinds), default=0)
    if last_new < _MOST_LAYERS:
        return list(range(min(len(kinds), max(_NUM_LAYERS, 1 + last_new))))
    return sorted(map(kinds.index, set(kinds)))


def _are_indices(values: list[Any], num_layers: int) -> bool:
    """Returns whether these are numbers of layers, perhaps of all."""
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in values):
        return False
    return all(0 <= each < num_layers for each in values) and all(a < b for a, b in pairwise(values))
