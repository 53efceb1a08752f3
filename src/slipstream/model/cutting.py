"""Cuts a model into stages without changing its code: modules of other stages become placeholders."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model.adapted_modules import is_wrapper, own_module
from slipstream.model.anatomy import LayerPart, ModelAnatomy, check_shared_weights
from slipstream.model.layer_range import HalfLayer, LayerHalf, ModelEnd, StagePart
from slipstream.model.tensors import has_parameters


def keep_layers(
    model: PreTrainedModel, anatomy: ModelAnatomy, owned: Collection[StagePart], device: torch.device | None = None
) -> None:
    """Replaces, in place, every part of `model` that stages with the parts `owned` don't compute.

    Tied embeddings stay on the last stage too, since their weight is the head's. `device` is where the placeholder of
    an embedding claims to be; by default it is the embedding's own device.
    """
    check_shared_weights(model.config, model.all_tied_weights_keys, anatomy.layers)
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
        # Without a head here, no weight is tied.
        model.all_tied_weights_keys = {}
    if not is_first:
        kept_embeddings = {embedding.rpartition(".")[0] for _, embedding in anatomy.tied if is_last}
        for name in _without_parts(model, anatomy.before):
            if name not in kept_embeddings:
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
    for child, part in parts_of(layer, parts):
        if part.half is not half:
            multiplies = any(parameter.dim() > 1 for parameter in child.parameters())
            setattr(layer, part.name, (ZeroBranch if multiplies else PassThrough)(child, part.tuple_length))


def second_half(layer: nn.Module, parts: Sequence[LayerPart]) -> nn.Module | None:
    """Returns the child with which the layer's feed-forward half begins; None if it isn't here or isn't known."""
    for child, part in parts_of(layer, parts) if parts else ():
        if part.begins_half and part.half is LayerHalf.FEED_FORWARD:
            return child
    return None


def parts_of(layer: nn.Module, parts: Sequence[LayerPart]) -> Iterator[tuple[nn.Module, LayerPart]]:
    """Yields a layer's children that have parameters, as placeholders don't, and which of `parts` each one is."""
    known = {(part.name, part.kind): part for part in parts}
    for name, child in list(layer.named_children()):
        kind = type(own_module(child)).__name__
        if has_parameters(child) and (name, kind) not in known:
            raise SlipstreamError(
                f"a layer's {name!r} is a {kind}, which its architecture doesn't have there, so layers can't be cut in "
                "half. Give whole numbers of layers."
            )
        if has_parameters(child):
            yield child, known[name, kind]


def units_of(layer: nn.Module, parts: Sequence[LayerPart]) -> list[list[nn.Module]]:
    """Returns the modules that make a layer, or each of its halves where `parts` assigns them."""
    if not parts:
        return [[layer]]
    children = [*parts_of(layer, parts)]
    return [[child for child, part in children if part.half is half] for half in LayerHalf]


def _owned_halves(layer: int, owned: Collection[StagePart]) -> list[LayerHalf]:
    return [half for half in LayerHalf if layer in owned or HalfLayer(layer, half) in owned]


def _without_parts(model: nn.Module, names: Iterable[str]) -> Iterator[str]:
    """Yields the names of the modules that have parameters, and instead of those that have them in parts, the parts'.

    So the code of BERT's embeddings, which adds some, runs on placeholders of the right shapes.
    """
    for name in names:
        module = model.get_submodule(name)
        parts = [f"{name}.{child}" for child, part in module.named_children() if has_parameters(part)]
        if parts and not is_wrapper(module) and next(module.parameters(recurse=False), None) is None:
            yield from _without_parts(model, parts)
        else:
            yield name


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


class Placeholder(nn.Module):
    """A module without weights that keeps the plain attributes of the one it replaces, and of its class.

    Models read some of them: `layer.attention_type`, for example, selects a layer's mask. They read those of its parts,
    too, and the names of parts, so it has such placeholders of these, which are no submodules: nothing finds them that
    looks for a stage's modules.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        classes = type(original).__mro__[: type(original).__mro__.index(nn.Module)]
        of_classes = {name: value for kind in reversed(classes) for name, value in vars(kind).items()}
        for name, value in (of_classes | vars(original)).items():
            if not name.startswith("_") and isinstance(value, (str, int, float, bool, type(None))):
                setattr(self, name, value)
        vars(self).update((name, _outline(part)) for name, part in original.named_children())


def _outline(part: nn.Module) -> nn.Module:
    """Returns a part's plain attributes, and those of its own parts."""
    if isinstance(part, nn.ModuleDict):
        return nn.ModuleDict({name: _outline(child) for name, child in part.items()})
    if isinstance(part, (nn.ModuleList, nn.Sequential)):
        return nn.ModuleList(_outline(child) for child in part)
    return Placeholder(part)


class PassThrough(Placeholder):
    """Replaces another stage's layer, norm or head, and returns the first tensor it is given."""

    def __init__(self, original: nn.Module, tuple_length: int = 0) -> None:
        super().__init__(original)
        self.tuple_length = tuple_length
        if isinstance(getattr(original, "weight", None), Tensor):
            self.weight = torch.empty(0)  # a dtype for Mamba's models to read

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self._instead_of(next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)))
        return (output, *[None] * (self.tuple_length - 1)) if self.tuple_length else output

    def _instead_of(self, tensor: Tensor) -> Tensor:
        return tensor


class ZeroBranch(PassThrough):
    """Replaces another stage's half of a layer, so that its residual connection adds nothing.

    It returns -0.0, since x + -0.0 is x to the bit for every x, and x + 0.0 is not for x = -0.0.
    """

    def _instead_of(self, tensor: Tensor) -> Tensor:
        # An expanded scalar takes no memory.
        return tensor.new_full((), -0.0).expand(tensor.shape)


class EmptyEmbedding(nn.Module):
    """Replaces the first stage's embedding or a projection of its output: the output is never used.

    It has the right shape and, in the place of an embedding, takes no memory, unless the model's code changes it in
    place: the first output, when a stage runs a token to learn its masks, is a real one and tells.
    """

    def __init__(self, original: nn.Module, width: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.embedding_dim = width
        self.padding_idx = getattr(original, "padding_idx", None)
        # models read the device and dtype of their embedding's weight
        self.register_buffer("weight", torch.zeros((), dtype=dtype, device=device), persistent=False)
        self.weight: Tensor
        self._first: Tensor | None = None  # the first output; dropped once it has told whether the model changes it
        self._is_changed: bool | None = None  # True if the model changes its input; None: not known yet

    def forward(self, ids: Tensor | Sequence[int], *args: Any, **kwargs: Any) -> Tensor:
        # BART's relatives pass the shape (b, T) to their embedding of positions.
        shape = ids.shape if isinstance(ids, Tensor) else ids
        # Floating-point values come from a projection, and the model may change its output in place.
        if isinstance(ids, Tensor) and ids.is_floating_point():
            return ids.new_zeros(*shape[:-1], self.embedding_dim)
        if self._first is not None:
            self._is_changed = self._first._version > 0
            self._first = None
        empty = self.weight.expand(*shape, self.embedding_dim)  # (b, T, hidden)
        if self._is_changed is False:
            return empty
        real = empty.clone(memory_format=torch.contiguous_format)
        self._first = real if self._is_changed is None else None
        return real
