"""Cut one model into stages without touching its code: what a stage doesn't own becomes a pass-through placeholder."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model.layer_range import HalfLayer, LayerHalf, ModelEnd, StagePart
from slipstream.model.model_anatomy import LayerPart, ModelAnatomy

_Model = TypeVar("_Model", bound=nn.Module)


class PassThrough(nn.Module):
    """Stands where another stage's layer, norm or head was: gives back the first tensor it is given.

    Plain attributes of the original stay readable, as some models choose a layer's mask by `layer.attention_type`.
    """

    def __init__(self, original: nn.Module, tuple_length: int = 0) -> None:
        super().__init__()
        self.tuple_length = tuple_length
        for name, value in vars(original).items():
            if not name.startswith("_") and isinstance(value, (str, int, float, bool, type(None))):
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = self._instead_of(next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)))
        return (found, *[None] * (self.tuple_length - 1)) if self.tuple_length else found

    def _instead_of(self, tensor: Tensor) -> Tensor:
        return tensor


class ZeroBranch(PassThrough):
    """Stands where another stage's half of a layer was, so that its residual connection adds nothing.

    What it gives back is -0.0, since x + -0.0 is x to the bit for every x, and x + 0.0 is not for x = -0.0.
    """

    def _instead_of(self, tensor: Tensor) -> Tensor:
        return tensor.new_full((), -0.0).expand(tensor.shape)  # takes no memory


class EmptyEmbedding(nn.Module):
    """Stands where the first stage's embedding was: the right shape, no memory; the first owned layer ignores it."""

    def __init__(self, original: nn.Module, width: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.embedding_dim = width
        self.padding_idx = getattr(original, "padding_idx", None)
        # models ask their embedding's weight for its device and dtype
        self.register_buffer("weight", torch.zeros((), dtype=dtype, device=device), persistent=False)
        self.weight: Tensor

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.weight.expand(*ids.shape, self.embedding_dim)  # (b, T, hidden)


def keep_layers(
    model: PreTrainedModel, anatomy: ModelAnatomy, owned: Collection[StagePart], device: torch.device | None = None
) -> None:
    """Replace, in place, every part of `model` that the stages with the layers `owned` do not compute.

    Tied embeddings stay on the last stage too: their weight is its head's weight.
    """
    layers: Any = model.get_submodule(anatomy.layers)
    num_layers = len(list(layers.children()))
    for index, layer in enumerate(list(layers.children())):
        halves = _owned_halves(index, owned)
        if isinstance(layer, PassThrough):
            continue  # an earlier cut
        if not halves:
            layers[index] = PassThrough(layer, anatomy.tuple_length)
        elif len(halves) == 1:
            keep_half(layer, anatomy.halves, halves[0])
    is_first, is_last = (has_edge(edge, anatomy, owned, num_layers) for edge in ModelEnd)
    if not is_last:
        for name in anatomy.after:
            _replace(model, name, PassThrough(model.get_submodule(name)))
        model.all_tied_weights_keys = {}  # no head here that could share a weight
    if not is_first:
        shared = {embedding.rpartition(".")[0] for _, embedding in anatomy.tied if is_last}
        for name in anatomy.before:
            if name not in shared:
                _replace(model, name, _empty(model.get_submodule(name), device))


def has_edge(edge: ModelEnd, anatomy: ModelAnatomy, owned: Collection[StagePart], num_layers: int) -> bool:
    """Whether what runs before or after all layers belongs to `owned`: it goes with its half layer, if not apart."""
    if edge in anatomy.separate_ends:
        return edge in owned
    if edge is ModelEnd.EMBEDDING:
        return LayerHalf.ATTENTION in _owned_halves(0, owned)
    return LayerHalf.FEED_FORWARD in _owned_halves(num_layers - 1, owned)


def keep_half(layer: nn.Module, parts: Sequence[LayerPart], half: LayerHalf) -> None:
    """Replace, in place, what belongs to the layer's other half: norms hand on, what multiplies adds nothing.

    Children without parameters stay: dropout of nothing is nothing.
    """
    for name, child in list(layer.named_children()):
        part = _part_of(name, child, parts)
        if part is not None and part.half is not half:
            multiplies = any(parameter.dim() > 1 for parameter in child.parameters())
            setattr(layer, name, (ZeroBranch if multiplies else PassThrough)(child, part.tuple_length))


def second_half(layer: nn.Module, parts: Sequence[LayerPart]) -> nn.Module | None:
    """The child that begins the layer's feed-forward half; None if that isn't here, or not known."""
    for name, child in layer.named_children() if parts else ():
        part = _part_of(name, child, parts)
        if part is not None and part.begins_half and part.half is LayerHalf.FEED_FORWARD:
            return child
    return None


def layer_half_of(name: str, child: nn.Module, parts: Sequence[LayerPart]) -> LayerHalf | None:
    """The half of a layer that its child belongs to; None without parameters."""
    part = _part_of(name, child, parts)
    return None if part is None else part.half


def _part_of(name: str, child: nn.Module, parts: Sequence[LayerPart]) -> LayerPart | None:
    """What is known of a layer's child; None without parameters, as another stage's placeholder."""
    if next(child.parameters(), None) is None:
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


def copy_with_shared_weights(model: _Model) -> _Model:
    """A second skeleton over the same parameters and buffers, to be cut differently: no memory but the modules'."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, memo={id(tensor): tensor for tensor in tensors})


def _empty(original: nn.Module, device: torch.device | None) -> nn.Module:
    weight = next(original.parameters(), None)
    width = getattr(original, "embedding_dim", None) or getattr(original, "out_features", None)
    if width is None or weight is None:
        return PassThrough(original)
    return EmptyEmbedding(original, width, weight.dtype, device or weight.device)


def _replace(model: PreTrainedModel, name: str, placeholder: nn.Module) -> None:
    """Put a placeholder at `name`, unless an earlier cut has put one there."""
    parent, _, child = name.rpartition(".")
    if not isinstance(model.get_submodule(name), (PassThrough, EmptyEmbedding)):
        setattr(model.get_submodule(parent), child, placeholder)
