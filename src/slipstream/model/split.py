"""Cut one model into stages without touching its code: what a stage doesn't own becomes a pass-through placeholder."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.model.anatomy import Anatomy


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
        found = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        return (found, *[None] * (self.tuple_length - 1)) if self.tuple_length else found


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
    model: PreTrainedModel, anatomy: Anatomy, owned: Collection[int], device: torch.device | None = None
) -> None:
    """Replace, in place, every part of `model` that the stages with the layers `owned` do not compute.

    Tied embeddings stay on the last stage too: their weight is its head's weight.
    """
    layers: Any = model.get_submodule(anatomy.layers)
    num_layers = len(list(layers.children()))
    for index, layer in enumerate(list(layers.children())):
        if index not in owned and not isinstance(layer, PassThrough):
            layers[index] = PassThrough(layer, anatomy.tuple_length)
    if num_layers - 1 not in owned:
        for name in anatomy.after:
            _replace(model, name, PassThrough(model.get_submodule(name)))
        model.all_tied_weights_keys = {}  # no head here that could share a weight
    if 0 not in owned:
        shared = {embedding.rpartition(".")[0] for _, embedding in anatomy.tied if num_layers - 1 in owned}
        for name in anatomy.before:
            if name not in shared:
                _replace(model, name, _empty(model.get_submodule(name), device))


def share(model: PreTrainedModel) -> PreTrainedModel:
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
