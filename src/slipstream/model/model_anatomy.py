"""Finds which parts of a causal LM come before its layers, which are the layers, and which come after them.

A toy of the same architecture runs once, so this works for any model that runs one list of layers: what is called
before the first layer (embeddings) belongs to the first stage, what is called after the last (norm, head) to the last
stage, and parts without parameters (rotary tables) to every stage.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from slipstream.errors import SlipstreamError
from slipstream.model.hooks.crossing_tensors import (
    TRAIN_WHOLE,
    CrossingTensor,
    TensorForm,
    find_layer_tensors,
    takes_more,
)
from slipstream.model.hooks.layer_arguments import hidden_states
from slipstream.model.hooks.own_attention import check_own_attention
from slipstream.model.layer_range import LayerHalf, ModelEnd
from slipstream.model.model_config import check_is_causal_lm
from slipstream.model.storages import storage_ids
from slipstream.model.toy import shapes_model, toy_model, toy_tokens
from slipstream.model.toy_comparison import attends_itself, full_precision, recorded_attention
from slipstream.model.toy_failure import toy_failure


@dataclass(frozen=True)
class LayerPart:
    """A child of a layer that has parameters, and the half of the layer that it belongs to."""

    name: str  # within the layer, such as "mlp"
    kind: str  # its class's name, as layers of one model may have different children of one name
    half: LayerHalf
    tuple_length: int = 0  # the length of the tuple that it returns; 0: it returns a tensor
    begins_half: bool = False  # whether it runs first in its half


@dataclass(frozen=True)
class ModelAnatomy:
    """The names of a model's parts, the same for every size of one architecture, and what crosses cuts between them."""

    layers: str  # the nn.ModuleList of decoder layers, such as "model.layers"
    before: tuple[str, ...]  # such as ("model.embed_tokens",)
    after: tuple[str, ...]  # such as ("model.norm", "lm_head")
    tuple_length: int = 0  # the length of the tuple that layers return, hidden states first; 0: a tensor
    hidden: TensorForm | None = None  # of hidden states, where layers take more than (b, T, hidden)
    crossing: tuple[CrossingTensor, ...] = ()  # what they take besides; both depend on the model's size
    tied: tuple[tuple[str, str], ...] = ()  # (head's parameter, embedding's parameter): one weight on two stages
    aliases: frozenset[str] = frozenset()  # second names of parameters within one stage, such as of the head's bias
    halves: tuple[LayerPart, ...] = ()  # how a layer is cut in two; empty if that isn't needed or isn't possible
    skips_padding: bool = False  # whether positions count tokens but padding, from its id on, as RoBERTa's do
    attends_itself: bool = False  # whether layers attend by code of their own, not through AttentionInterface
    separate_ends: frozenset[ModelEnd] = frozenset()  # those that are stages of their own, without any layer

    @property
    def second_names(self) -> frozenset[str]:
        """The names of parameters that have another name, which is the canonical one."""
        return self.aliases | {name for name, _ in self.tied}

    def hidden_form(self, width: int) -> TensorForm:
        """Returns the form of the hidden states, given their width."""
        return self.hidden or TensorForm((1, 1, width), row_dim=0, token_dim=1)

    def layers_of(self, model: nn.Module) -> list[nn.Module]:
        """Returns the layers of a model of this architecture, or what an earlier cut has put in their places."""
        return list(model.get_submodule(self.layers).children())

    def first_position(self, config: PretrainedConfig) -> int:
        """Returns the position of a sequence's first token."""
        return config.pad_token_id + 1 if self.skips_padding else 0


def find_anatomy(config: PretrainedConfig) -> ModelAnatomy:
    """Returns the anatomy of `config`'s architecture, found by running a toy of it once.

    Raises SlipstreamError, naming the part, where the architecture doesn't simply run one list of layers, and the
    reason, where its toy can't be run or it was loaded with attention that can't be cut.
    """
    check_is_causal_lm(config)
    try:
        return _find_anatomy(config)
    except SlipstreamError:
        raise
    except Exception as error:  # the model's own code
        raise _refusal(config, toy_failure(config, error), advice="") from error


def anatomy_of_size(anatomy: ModelAnatomy, config: PretrainedConfig) -> ModelAnatomy:
    """Returns the anatomy for a config of the architecture with other sizes, on which what crosses cuts depends."""
    return anatomy if anatomy.hidden is None else _with_tensors(anatomy, config)


def check_shared_weights(config: PretrainedConfig, shared: Mapping[str, str], layers: str) -> None:
    """Raises SlipstreamError where one of the `layers` has a weight of another, by the names of what models share."""
    for name, other in shared.items():
        if name.startswith(f"{layers}.") or other.startswith(f"{layers}."):
            raise _refusal(
                config,
                f"its layers share weights ({name} is {other}), which several stages would hold and update differently",
            )


def _with_tensors(anatomy: ModelAnatomy, config: PretrainedConfig) -> ModelAnatomy:
    try:
        with torch.enable_grad():
            model = shapes_model(config)
            check_shared_weights(config, model.all_tied_weights_keys, anatomy.layers)  # a toy may have one such layer
            hidden, crossing = find_layer_tensors(model, anatomy.layers_of(model))
    except SlipstreamError:
        raise
    except Exception as error:  # the model's own code
        reason = f"its layers take more than hidden states from others, which can't be told ({error})"
        raise _refusal(config, reason) from error
    return replace(anatomy, hidden=hidden, crossing=crossing)


def _find_anatomy(config: PretrainedConfig) -> ModelAnatomy:
    model, tokens = toy_model(config), toy_tokens(config)
    with full_precision():
        layers = _find_layers(model, tokens)
    outside = _outside(model, layers)
    calls: dict[str, set[int]] = {name: set() for name in outside}  # after how many layers each is called
    entered: list[nn.Module] = []
    outputs: list[Any] = []
    taken: list[Tensor] = []  # by layers, besides hidden states
    tables: dict[str, list[Tensor]] = {}  # what modules of constants give
    ends: dict[str, list[Tensor]] = {}  # what modules after the layers take
    for layer in model.get_submodule(layers).children():
        layer.register_forward_pre_hook(lambda layer, _: entered.append(layer))
        layer.register_forward_pre_hook(lambda _, *given: taken.extend(_others(*given)), with_kwargs=True)
        layer.register_forward_hook(lambda *given: outputs.append(given[-1]))
    for name, module in outside.items():
        module.register_forward_pre_hook(lambda *_, name=name: calls[name].add(len(entered)))
        module.register_forward_pre_hook(
            lambda _, *given, name=name: ends.update({name: _tensors(given)}), with_kwargs=True
        )
        if has_parameters(module) and not any(parameter.requires_grad for parameter in module.parameters()):
            module.register_forward_hook(lambda *given, name=name: tables.update({name: _tensors(given[-1])}))
    with torch.no_grad(), full_precision(), recorded_attention() as attending:
        model(input_ids=tokens, use_cache=False)
    num_layers = len(model.get_submodule(layers))
    if len(entered) < num_layers:
        reason = f"only {len(entered)} of its {num_layers} layers run on text alone"
        raise _refusal(config, reason)
    if len(entered) != num_layers:
        raise _refusal(
            config,
            f"its {num_layers} layers run in cycles, {len(entered)} calls in one forward, so no stage ends after one",
        )
    for name in tables:
        if not storage_ids(tables[name]).isdisjoint(storage_ids(taken)):
            kind = type(outside[name]).__name__
            raise _refusal(config, f"its layers all take what {name} ({kind}) gives, which only the first stage has")
    before, after = [], []
    left = storage_ids(_tensors(outputs[-1]))
    for name, module in outside.items():
        if calls[name] == {num_layers}:
            if len(ends[name]) > 1 and not storage_ids(ends[name]) <= left:
                kind = type(module).__name__
                raise _refusal(config, f"{name} ({kind}), after the layers, takes more than what the last layer gives")
            after.append(name)
        elif calls[name] <= {0} and has_parameters(module):
            before.append(name)
        elif has_parameters(module):
            raise _refusal(config, f"{name} ({type(module).__name__}) has parameters and runs between the layers")
    shared = model.all_tied_weights_keys
    check_shared_weights(config, shared, layers)
    aliases = frozenset(
        a for a, b in shared.items() if any(_within(a, end) and _within(b, end) for end in (before, after))
    )
    tied = tuple((head, embedding) for head, embedding in shared.items() if head not in aliases)
    for head, embedding in tied:
        if not (_within(head, after) and _within(embedding, before)):
            raise _refusal(config, f"{head} shares its weight with {embedding}; only a head may, with the embedding")
    tuple_length = len(outputs[-1]) if isinstance(outputs[-1], (tuple, list)) else 0
    skips = _skips_padding(model)
    itself = attends_itself(model, list(model.get_submodule(layers).children()), tokens, attending)
    if itself:
        check_own_attention(config)
    anatomy = ModelAnatomy(
        layers,
        tuple(before),
        tuple(after),
        tuple_length,
        tied=tied,
        aliases=aliases,
        skips_padding=skips,
        attends_itself=itself,
    )
    with full_precision():
        return _with_tensors(anatomy, config) if takes_more(model, anatomy.layers_of(model)) else anatomy


def _others(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Returns the tensors that a layer is given besides hidden states."""
    hidden = hidden_states(args, kwargs)
    return [each for each in _tensors((args, kwargs)) if each is not hidden]


def _tensors(given: Any) -> list[Tensor]:
    return [each for each in tree_leaves(given) if isinstance(each, Tensor)]


def _find_layers(model: nn.Module, tokens: Tensor) -> str:
    """Returns the name of the model's list of decoder layers: of the lists that run on tokens, the largest.

    Models of images and text have a list for images, too.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    ran: set[str] = set()
    with ExitStack() as hooks, torch.no_grad():
        for name, layers in lists.items():
            for layer in layers:
                hooks.enter_context(layer.register_forward_pre_hook(lambda *_, name=name: ran.add(name)))
        model(input_ids=tokens, use_cache=False)
    if not ran:
        raise SlipstreamError(
            f"{type(model).__name__} has no nn.ModuleList of layers, so it can't be cut into stages. {TRAIN_WHOLE}"
        )
    return max(sorted(ran), key=lambda name: sum(p.numel() for p in lists[name].parameters()))


def _outside(model: nn.Module, layers: str) -> dict[str, nn.Module]:
    """Returns the largest modules that neither contain the layers nor lie in them, by name."""
    found: dict[str, nn.Module] = {}
    path = layers.split(".")
    for depth in range(len(path)):
        prefix = ".".join(path[:depth])
        for name, child in model.get_submodule(prefix).named_children():
            if name != path[depth]:
                found |= _called(f"{prefix}.{name}" if prefix else name, child)
    return found


def _skips_padding(model: nn.Module) -> bool:
    """Returns whether the model makes positions out of token ids, unless it is given some."""
    makers = [module for module in model.modules() if hasattr(module, "create_position_ids_from_input_ids")]
    return any("position_ids" in inspect.signature(module.forward).parameters for module in makers)


def _called(name: str, module: nn.Module) -> dict[str, nn.Module]:
    """Returns the module, or those in a list, which isn't called itself."""
    if not isinstance(module, nn.ModuleList):
        return {name: module}
    inside = (_called(f"{name}.{number}", child) for number, child in module.named_children())
    return dict(chain.from_iterable(each.items() for each in inside))


def _within(parameter: str, modules: list[str]) -> bool:
    return any(parameter.startswith(f"{module}.") for module in modules)


def has_parameters(module: nn.Module) -> bool:
    """Returns whether a module has parameters; other stages' placeholders have none."""
    return next(module.parameters(), None) is not None


def uses_randomness(model: nn.Module) -> bool:
    """Returns whether training draws random numbers: dropout of any kind, or a router's jitter."""
    return any(
        isinstance(value, float) and value > 0
        for module in model.modules()
        for name, value in vars(module).items()
        if "drop" in name or "jitter" in name or (name == "p" and isinstance(module, nn.Dropout))
    )


def _refusal(config: PretrainedConfig, reason: str, advice: str = TRAIN_WHOLE) -> SlipstreamError:
    return SlipstreamError(f"model_type {config.model_type!r} can't be cut into stages: {reason}. {advice}".rstrip())
