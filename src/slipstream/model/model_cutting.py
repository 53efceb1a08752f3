"""Cuts a model into stages without changing its code: what a stage doesn't own becomes a placeholder."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model.layer_range import HalfLayer, LayerHalf, ModelEnd, StagePart
from slipstream.model.model_anatomy import LayerPart, ModelAnatomy, has_parameters
from slipstream.model.placeholders import EmptyEmbedding, PassThrough, ZeroBranch

_Model = TypeVar("_Model", bound=nn.Module)


def keep_layers(
    model: PreTrainedModel, anatomy: ModelAnatomy, owned: Collection[StagePart], device: torch.device | None = None
) -> None:
    """Replaces, in place, every part of `model` that stages with the parts `owned` don't compute.

    Tied embeddings stay on the last stage too, since their weight is the head's. `device` is where the placeholder of
    an embedding claims to be; by default it is the embedding's own device.
    """
    layers: Any = model.get_submodule(anatomy.layers)
    num_layers = len(layers)
    for index, layer in enumerate(list(layers)):
        halves = _owned_halves(index, owned)
        if isinstance(layer, PassThrough):
            continue  # replaced by an earlier cut
        if not halves:
            layers[index] = PassThrough(layer, anatomy.tuple_length)
        elif len(halves) == 1:
            keep_half(layer, anatomy.halves, halves[0])
    is_first, is_last = (has_end(end, anatomy, owned, num_layers) for end in ModelEnd)
    if not is_last:
        for name in anatomy.after:
            _replace(model, name, PassThrough(model.get_submodule(name)))
        model.all_tied_weights_keys = {}  # no head here that could share a weight
    if not is_first:
        shared = {embedding.rpartition(".")[0] for _, embedding in anatomy.tied if is_last}
        for name in anatomy.before:
            if name not in shared:
                _replace(model, name, _empty(model.get_submodule(name), device))


def has_end(end: ModelEnd, anatomy: ModelAnatomy, owned: Collection[StagePart], num_layers: int) -> bool:
    """Returns whether `owned` includes this end of the model: explicitly, or with the half layer next to it."""
    if end in anatomy.separate_ends:
        return end in owned
    if end is ModelEnd.EMBEDDING:
        return LayerHalf.ATTENTION in _owned_halves(0, owned)
    return LayerHalf.FEED_FORWARD in _owned_halves(num_layers - 1, owned)


def keep_half(layer: nn.Module, parts: Sequence[LayerPart], half: LayerHalf) -> None:
    """Replaces, in place, the layer's other half: norms pass their input through, matrices add nothing.

    Children without parameters stay: dropout of zeros is zero.
    """
    for name, child in list(layer.named_children()):
        part = _part_of(name, child, parts)
        if part is not None and part.half is not half:
            multiplies = any(parameter.dim() > 1 for parameter in child.parameters())
            setattr(layer, name, (ZeroBranch if multiplies else PassThrough)(child, part.tuple_length))


def second_half(layer: nn.Module, parts: Sequence[LayerPart]) -> nn.Module | None:
    """Returns the child with which the layer's feed-forward half begins; None if it isn't here or isn't known."""
    for name, child in layer.named_children() if parts else ():
        part = _part_of(name, child, parts)
        if part is not None and part.begins_half and part.half is LayerHalf.FEED_FORWARD:
            return child
    return None


def layer_half_of(name: str, child: nn.Module, parts: Sequence[LayerPart]) -> LayerHalf | None:
    """Returns the half of a layer that its child belongs to; None for a child without parameters."""
    part = _part_of(name, child, parts)
    return None if part is None else part.half


def copy_with_shared_weights(model: _Model) -> _Model:
    """Returns a copy of the modules over the same parameters and buffers, which can be cut differently."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, memo={id(tensor): tensor for tensor in tensors})


def _part_of(name: str, child: nn.Module, parts: Sequence[LayerPart]) -> LayerPart | None:
    """Returns what is known about a layer's child; None where it has no parameters, as a placeholder."""
    if not has_parameters(child):
        return None
    found = next((part for part in parts if (part.name, part.kind) == (name, type(child).__name__)), None)
    if found is None:
        raise SlipstreamError(
            f"a layer's {name!r} is a {type(child).__name__}, which its architecture doesn't have there, so layers "
            "can't be cut in half. Give whole numbers of layers."
        )
    return found


def _owned_halves(layer: int, owned: Collection[StagePart]) -> list[LayerHalf]:
    return [half for half in LayerHalf if layer in owned or HalfLayer(layer, half) in owned]


def _empty(original: nn.Module, device: torch.device | None) -> nn.Module:
    weight = next(original.parameters(), None)
    width = getattr(original, "embedding_dim", None) or getattr(original, "out_features", None)
    if width is None or weight is None:
        return PassThrough(original)
    return EmptyEmbedding(original, width, weight.dtype, device or weight.device)


def _replace(model: PreTrainedModel, name: str, placeholder: nn.Module) -> None:
    """Puts a placeholder at `name`, unless an earlier cut has put one there."""
    parent, _, child = name.rpartition(".")
    if not isinstance(model.get_submodule(name), (PassThrough, EmptyEmbedding)):
        setattr(model.get_submodule(parent), child, placeholder)
