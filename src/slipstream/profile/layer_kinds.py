"""Finds which layers of a model are equal, so that one of each kind is measured, and whether halves of them are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from slipstream.model import (
    LayerHalf,
    ModelAnatomy,
    copy_with_shared_weights,
    find_anatomy,
    halves_or_none,
    meta_model,
    parts_of,
    units_of,
)


def anatomy_with_halves(config: PretrainedConfig) -> ModelAnatomy:
    """Returns the model's anatomy, with the halves of its layers where they can be cut."""
    anatomy = find_anatomy(config)
    return replace(anatomy, halves=halves_or_none(config, anatomy))


def find_layer_kinds(
    config: PretrainedConfig, anatomy: ModelAnatomy, whole: nn.Module | None = None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns the kind of every layer, numbered in the order of their first layers, and the kinds' names.

    Layers are of one kind where their modules, shapes, switches and attention types are equal, and the same of them is
    trained in the model `whole`, by default everything.
    """
    layers = anatomy.layers_of(meta_model(config) if whole is None else whole)
    types = getattr(config.get_text_config(), "layer_types", None) or [None] * len(layers)
    structures = [(_structure(layer, index), types[index]) for index, layer in enumerate(layers)]
    distinct = list(dict.fromkeys(structures))
    kinds = tuple(distinct.index(structure) for structure in structures)
    return kinds, _names(kinds, [kind for _, kind in distinct])


def trained_parts(whole: nn.Module, anatomy: ModelAnatomy) -> list[bool]:
    """Returns whether each part of a model has a trained parameter: embedding, layers or their halves, head."""

    def is_trained(*modules: nn.Module) -> bool:
        return any(parameter.requires_grad for module in modules for parameter in module.parameters())

    units = [unit for layer in anatomy.layers_of(whole) for unit in units_of(layer, anatomy.halves)]
    ends = ([whole.get_submodule(name) for name in names] for names in (anatomy.before, anatomy.after))
    before, after = (is_trained(*modules) for modules in ends)
    return [before, *(is_trained(*modules) for modules in units), after]


def find_unit_kinds(config: PretrainedConfig, anatomy: ModelAnatomy, kinds: Sequence[int]) -> tuple[int, ...]:
    """Returns the kinds of the halves of each kind of layer, equal where nothing about them differs; () without halves.

    A dense layer and one with experts have an attention half in common, for example.
    """
    if not anatomy.halves:
        return ()
    layers = anatomy.layers_of(meta_model(config))
    types = getattr(config.get_text_config(), "layer_types", None) or [None] * len(layers)
    firsts = [kinds.index(kind) for kind in range(max(kinds) + 1)]
    units = [(half, types[i], _half_structure(layers[i], i, anatomy, half)) for i in firsts for half in LayerHalf]
    distinct = list(dict.fromkeys(units))
    return tuple(distinct.index(unit) for unit in units)


def _half_structure(layer: nn.Module, index: int, anatomy: ModelAnatomy, half: LayerHalf) -> tuple[Any, ...]:
    """Returns the structure of a layer without the children of its other half."""
    here = copy_with_shared_weights(layer)
    for _, part in parts_of(layer, anatomy.halves):
        if part.half is not half:
            delattr(here, part.name)
    return _structure(here, index)


def _structure(layer: nn.Module, index: int) -> tuple[Any, ...]:
    """Returns everything about a layer that decides its operations, except the values of its weights."""
    parts = []
    for name, module in layer.named_modules():
        switches = {
            key: value
            for key, value in vars(module).items()
            if not key.startswith("_") and isinstance(value, (str, bool, int)) and not _is_index(key, value, index)
        }
        parts.append((name, type(module).__qualname__, tuple(sorted(switches.items()))))
    shapes = tuple((name, tuple(p.shape), p.requires_grad) for name, p in layer.named_parameters())
    return (*parts, shapes)


def _is_index(key: str, value: Any, index: int) -> bool:
    return "idx" in key or "index" in key or (key.startswith("layer") and value == index)


def _names(kinds: Sequence[int], types: Sequence[str | None]) -> tuple[str, ...]:
    """Returns `layer` if all are equal; else names by attention type where that distinguishes them, or by the first
    layer."""
    if len(types) == 1:
        return ("layer",)
    if None not in types and len(set(types)) == len(types):
        return tuple(f"{kind} layer" for kind in types)
    firsts = [kinds.index(kind) for kind in range(len(types))]
    return tuple(f"layer like {first}" for first in firsts)
