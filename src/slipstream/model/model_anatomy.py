"""Which parts of a causal LM come before its layers, which are the layers, and which come after them.

Found by watching a toy of the same architecture run, so it holds for any model that walks one list of layers: what is
called before the first layer (embeddings) belongs to the first stage, what is called after the last (norm, head) to the
last stage, and parts without parameters (rotary tables) to every stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from slipstream.errors import SlipstreamError
from slipstream.model.layer_range import LayerHalf, ModelEnd
from slipstream.model.toy import toy_model, toy_tokens


@dataclass(frozen=True)
class LayerPart:
    """A child of a layer that has parameters, and the half of the layer that it is part of."""

    name: str  # within the layer, e.g. "mlp"
    kind: str  # its class's name: layers of one model may have different children of one name
    half: LayerHalf
    tuple_length: int = 0  # it returns a tuple of this length; 0: a tensor
    begins_half: bool = False  # nothing of its half runs before it


@dataclass(frozen=True)
class ModelAnatomy:
    """Module names, valid for every size of one architecture."""

    layers: str  # the nn.ModuleList of decoder layers, e.g. "model.layers"
    before: tuple[str, ...]  # e.g. ("model.embed_tokens",)
    after: tuple[str, ...]  # e.g. ("model.norm", "lm_head")
    tuple_length: int = 0  # layers return a tuple of this length, its first item the hidden states; 0: a tensor
    tied: tuple[tuple[str, str], ...] = ()  # (head's parameter, embedding's parameter): one weight on two stages
    halves: tuple[LayerPart, ...] = ()  # how a layer is cut in two; empty where nobody asked, or it can't be
    separate_ends: frozenset[ModelEnd] = frozenset()  # those that are stages of their own, without any layer


def find_anatomy(config: PretrainedConfig) -> ModelAnatomy:
    """Run a toy of `config`'s architecture once and note who is called when.

    Raises SlipstreamError, naming the part, where the architecture is not a plain walk over one list of layers.
    """
    model = toy_model(config)
    layers = find_layers(model)
    outside = _outside(model, layers)
    calls: dict[str, set[int]] = {name: set() for name in outside}
    progress = _Progress()
    hooks = [layer.register_forward_pre_hook(progress.enter) for layer in model.get_submodule(layers).children()]
    hooks += [layer.register_forward_hook(progress.leave) for layer in model.get_submodule(layers).children()]
    hooks += [
        module.register_forward_pre_hook(lambda *_, name=name: calls[name].add(progress.num_layers_entered))
        for name, module in outside.items()
    ]
    with torch.no_grad():
        model(input_ids=toy_tokens(config), use_cache=False)
    for hook in hooks:
        hook.remove()
    num_layers = len(list(model.get_submodule(layers).children()))
    _check_walk(config, progress.num_layers_entered, num_layers)
    before, after = [], []
    for name, module in outside.items():
        if calls[name] == {num_layers}:
            after.append(name)
        elif calls[name] <= {0} and _has_state(module):
            before.append(name)
        elif _has_state(module):
            raise _refusal(config, f"{name} ({type(module).__name__}) has parameters and runs between the layers")
    tied = tuple(model.all_tied_weights_keys.items())
    for head, embedding in tied:
        if not (_within(head, after) and _within(embedding, before)):
            raise _refusal(config, f"{head} shares its weight with {embedding}; only a head may, with the embedding")
    return ModelAnatomy(layers, tuple(before), tuple(after), progress.tuple_length, tied)


def find_layers(model: nn.Module) -> str:
    """The name of the model's list of decoder layers: the one that holds most parameters."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise SlipstreamError(f"{type(model).__name__} has no nn.ModuleList of layers, so it can't be cut into stages.")
    name, _ = max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))
    return str(name)


class _Progress:
    def __init__(self) -> None:
        self.num_layers_entered = 0
        self.tuple_length = 0

    def enter(self, *_: Any) -> None:
        self.num_layers_entered += 1

    def leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self.tuple_length = len(output) if isinstance(output, tuple) else 0


def _outside(model: nn.Module, layers: str) -> dict[str, nn.Module]:
    """The largest modules that neither hold the layers nor are held by them: the siblings along the way to the list."""
    found: dict[str, nn.Module] = {}
    path = layers.split(".")
    for depth in range(len(path)):
        prefix = ".".join(path[:depth])
        for name, child in model.get_submodule(prefix).named_children():
            if name != path[depth]:
                found[f"{prefix}.{name}" if prefix else name] = child
    return found


def _within(parameter: str, modules: list[str]) -> bool:
    return any(parameter.startswith(f"{module}.") for module in modules)


def _has_state(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _check_walk(config: PretrainedConfig, entered: int, num_layers: int) -> None:
    if entered != num_layers:
        raise _refusal(config, f"its {num_layers} layers are called {entered} times in one forward")


def _refusal(config: PretrainedConfig, reason: str) -> SlipstreamError:
    return SlipstreamError(f"model_type {config.model_type!r} can't be cut into stages: {reason}.")
