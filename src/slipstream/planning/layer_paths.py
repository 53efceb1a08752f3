"""Finds the kinds of a model's layers, and what each of them takes from earlier tokens by what a toy of it took."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from slipstream.model import ModelAnatomy, meta_model
from slipstream.model.toy.toy_model import toy_config


@dataclass(frozen=True)
class LayerKind:
    """Layers of one class with the same modules and switches, whatever their sizes."""

    name: str  # the class's, with the configuration's name for the kind where there are several
    layers: tuple[int, ...]
    paths: frozenset[str] | None  # "attention" and kinds of carried states; None: the toy has no such layer


def find_layer_kinds(
    config: PretrainedConfig, anatomy: ModelAnatomy, toy_paths: Sequence[frozenset[str]]
) -> tuple[LayerKind, ...]:
    """Returns the kinds in the order of their first layers. `toy_paths` are those of the toy's layers."""
    toy = _structures(toy_config(config), anatomy)
    structures = _structures(config, anatomy)
    kinds = []
    for kind in dict.fromkeys(structures):
        layers = tuple(index for index, each in enumerate(structures) if each == kind)
        paths = toy_paths[toy.index(kind)] if toy_paths and kind in toy else None
        kinds.append(LayerKind(f"{kind[0]} ({kind[1]})" if kind[1] else kind[0], layers, paths))
    return tuple(kinds)


def _structures(config: PretrainedConfig, anatomy: ModelAnatomy) -> list[tuple[str, str, frozenset[Any]]]:
    """Returns each layer's class, type, and modules with their switches."""
    layers = anatomy.layers_of(meta_model(config))
    types = getattr(config.get_text_config(), "layer_types", None) or [""] * len(layers)
    return [(type(layer).__name__, types[index], _modules(layer)) for index, layer in enumerate(layers)]


def _modules(layer: nn.Module) -> frozenset[Any]:
    """Returns names, without numbers, and classes of the modules: experts may be fewer in a toy."""
    return frozenset((re.sub(r"\d+", "*", name), type(module).__qualname__) for name, module in layer.named_modules())
