"""Finds how a model in memory differs from the one that its configuration describes, before it is cut into stages.

Everything else here follows from the configuration: the toys that are tried, the names of parts, the plan. A user's
changes to the instance, a hook, a forward, another module, a weight that two modules share, are in none of them. So the
instance is held against the configuration's model on the meta device, name by name. Nothing runs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model.adapters import Adapter
from slipstream.model.config import check_is_causal_lm, with_settings
from slipstream.model.dispatched_functions import DispatchedFunctions, dispatched_by, dispatched_by_config
from slipstream.model.loading import meta_model
from slipstream.model.own_code import HOOKS
from slipstream.model.tensors import tied_names
from slipstream.model.toy import quiet_transformers
from slipstream.model.trained_weights import TrainedWeights

HOOK_NAMES = dict(zip(HOOKS, ("forward pre-hook", "forward hook", "backward pre-hook", "backward hook"), strict=True))
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_GROWS = "num_hidden_layers"
_NUMBER = "layer_idx"
_GENERAL = ("torch.", "transformers.modeling_utils", "transformers.generation", "transformers.utils")
_NOTES = ("name_or_path", "loss_type", "gradient_checkpointing", "is_gradient_checkpointing", "vocab_size")


@dataclass(frozen=True)
class Change:
    """A user's change to one module: its name, "" for the model itself, and the difference, as a clause."""

    module: str
    what: str
    replaces: bool = False  # a different module, not the same one with something attached

    def __str__(self) -> str:
        return f"{self.module or 'the model'} {self.what}"


@dataclass(frozen=True)
class GivenModel:
    """The differences of a model from its configuration's.

    Args:
        config: describes the model as it is: with its number of layers, and head and embedding tied or not.
        changes: of modules whose code differs; none where everything runs as the configuration's model does.
        shared: the names of each parameter that several layers share, in the model's order; the first is canonical.
        renumbered: the names of modules whose `layer_idx` isn't their layer's place, as where a layer was deleted.
        gradient_hooks: the names of parameters with hooks on their gradients.
        dispatched: functions of the user's that it calls by names.
    """

    config: PretrainedConfig
    changes: tuple[Change, ...] = ()
    shared: tuple[tuple[str, ...], ...] = ()
    renumbered: tuple[str, ...] = ()
    gradient_hooks: tuple[str, ...] = ()
    dispatched: DispatchedFunctions = field(default_factory=DispatchedFunctions)

    @classmethod
    def of_config(cls, config: PretrainedConfig) -> GivenModel | None:
        """Returns how a model made of a configuration differs from transformers'; None where it doesn't."""
        dispatched = dispatched_by_config(config)
        return cls(config, dispatched=dispatched) if dispatched else None

    def changes_within(self, *names: str) -> list[Change]:
        """Returns the changes of modules of these names and of their parts."""
        return [change for change in self.changes if any(_is_within(change.module, name) for name in names)]

    def changes_around(self, name: str) -> list[Change]:
        """Returns the changes of the modules that contain the one of this name, and of itself."""
        return [change for change in self.changes if _is_within(name, change.module)]


def compare_with_config(model: PreTrainedModel, adapter: Adapter | None = None) -> GivenModel:
    """Returns how a model in memory differs from its configuration's, which has `adapter` added if there is one.

    Raises SlipstreamError where no configuration of a causal LM could describe the model.
    """
    check_is_causal_lm(model.config)
    reference = meta_model(model.config)
    config = _described(model, reference)
    reference = TrainedWeights(adapter=adapter).apply(reference if config is model.config else meta_model(config))
    changes = list(_changes(model, reference))
    groups, expected = _same_parameters(model), _same_parameters(reference)
    parted = [names for names in expected.values() if len({groups.get(name, (name,)) for name in names}) > 1]
    if parted:
        raise SlipstreamError(
            f"{' and '.join(parted[0])} are one weight by the configuration of model_type {config.model_type!r}, but "
            "two in this model. Tie them by model.tie_weights(), or give a configuration that doesn't."
        )
    shared = {names for name, names in groups.items() if names != expected.get(name)}
    hooked = [
        name
        for name, parameter in model.named_parameters()
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    ]
    expected_modules = dict(reference.named_modules())
    renumbered = [
        name
        for name, module in model.named_modules()
        if getattr(module, _NUMBER, None) != getattr(expected_modules.get(name), _NUMBER, None)
    ]
    return GivenModel(
        config, tuple(changes), tuple(sorted(shared)), tuple(renumbered), tuple(hooked), dispatched_by(model)
    )


def _described(model: PreTrainedModel, reference: PreTrainedModel) -> PretrainedConfig:
    """Returns a configuration that describes the model's number of layers, and whether its head is tied: its own where
    that does, of which the reference is."""
    config = model.config
    text = model.config.get_text_config()
    count: int | None = getattr(text, _GROWS, None)
    changed: dict[str, Any] = {}
    for name, layers in _lists(reference).items():
        existing = _lists(model).get(name)
        if existing is None or len(layers) != count or len(existing) == count:
            continue
        if len(existing) > count:
            raise SlipstreamError(
                f"the model has {len(existing)} layers in {name}, but its configuration says {_GROWS}={count}, and its "
                f"forward runs no more. Remove the others, or set model.config.{_GROWS} = {len(existing)}."
            )
        changed[_GROWS] = len(existing)
        if getattr(text, "layer_types", None):
            changed["layer_types"] = text.layer_types[: len(existing)]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = getattr(embedding, "weight", None) is not None and embedding.weight is getattr(head, "weight", None)
    was_tied = reference.get_input_embeddings().weight is getattr(reference.get_output_embeddings(), "weight", None)
    if is_tied != was_tied:
        changed["tie_word_embeddings"] = is_tied
    return with_settings(config, changed) if changed else config


def _lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}


def _same_parameters(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Returns, for the name of each parameter that has several, all of them."""
    return {name: tuple(shared) for shared in tied_names(model) if len(shared) > 1 for name in shared}


def find_changes(model: PreTrainedModel) -> list[Change]:
    """Returns the differences between the modules of a model in memory and those of its class and configuration."""
    with torch.device("meta"), quiet_transformers():
        return list(_changes(model, type(model)(copy.deepcopy(model.config))))


def _changes(model: nn.Module, reference: nn.Module) -> Iterator[Change]:
    """Yields the changes of each module; of one that is another, not those of its parts."""
    expected = dict(reference.named_modules(remove_duplicate=False))
    others: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if any(_is_within(name, other) for other in others):
            continue
        like = expected.get(name)
        if like is None:
            what = f"is a {type(module).__name__} that its architecture doesn't have"
        elif not _same_code(type(module), type(like)):
            what = f"is a {type(module).__name__}, not a {type(like).__name__}"
        else:
            yield from (Change(name, what) for what in _differences(module, like))
            continue
        others.append(name)
        yield Change(name, what, replaces=True)
        hooks = [Change(part, hook) for part, inner in module.named_modules(prefix=name) for hook in _hooks(inner)]
        yield from hooks
    for name in expected.keys() - dict(model.named_modules(remove_duplicate=False)).keys():
        parent, _, child = name.rpartition(".")
        if parent in expected and not any(_is_within(parent, other) for other in others):
            yield Change(parent, f"lacks its {child}")


def _same_code(kind: type, expected: type) -> bool:
    """Returns whether a class is the expected one, or adds nothing but a constructor to it."""
    if kind is expected:
        return True
    added = {name for base in kind.__mro__ if base not in expected.__mro__ for name in vars(base)}
    passive = {"__init__", "__module__", "__doc__", "__qualname__", "__firstlineno__", "__static_attributes__"}
    return issubclass(kind, expected) and added <= passive


def _differences(module: nn.Module, like: nn.Module) -> Iterator[str]:
    """Yields the differences between two modules of one class."""
    own, expected = vars(module), vars(like)
    if "forward" in own and not _same_function(own["forward"], expected.get("forward")):
        yield "has a forward of its own"
    yield from _hooks(module, like)
    for kind in ("_parameters", "_buffers"):
        mine, theirs = ({name for name, hook in at[kind].items() if hook is not None} for at in (own, expected))
        for name in sorted(mine ^ theirs):
            yield f"{'has' if name in mine else 'lacks'} {name!r}" + (", which its class doesn't have" * (name in mine))
    # A model keeps transformers' notes on how it was loaded, which its class doesn't make.
    is_noted = isinstance(module, PreTrainedModel)
    for name in own.keys() | expected.keys():
        if name in own and name not in expected and name != "forward" and _is_in_place_of_a_method(module, name):
            yield f"has a {name} of its own"
        if name.startswith("_") or name in ("training", "forward", _NUMBER) or isinstance(own.get(name), nn.Module):
            continue
        if is_noted and (name not in own or name not in expected or name in _NOTES):
            continue
        if not _same_value(own.get(name), expected.get(name)):
            yield f"has {name}={own.get(name)!r}, not {expected.get(name)!r}"


def _is_in_place_of_a_method(module: nn.Module, name: str) -> bool:
    """Returns whether an attribute replaces a method that the module's forward may call: of a model's own file, and not
    of those by which it generates."""
    if (
        not callable(vars(module)[name])
        or isinstance(vars(module)[name], nn.Module)
        or name.startswith("prepare_inputs")
    ):
        return False
    kinds = (kind for kind in type(module).__mro__ if not kind.__module__.startswith(_GENERAL))
    return any(callable(vars(kind).get(name)) for kind in kinds)


def _hooks(module: nn.Module, like: nn.Module | None = None) -> Iterator[str]:
    for kind, name in HOOK_NAMES.items():
        if len(getattr(module, kind)) != (0 if like is None else len(getattr(like, kind))):
            yield f"has a {name}"


def _same_value(value: Any, expected: Any) -> bool:
    """Returns whether plain values and functions are the same; others, such as tensors, aren't compared."""
    if isinstance(value, _PLAIN) and isinstance(expected, _PLAIN):
        return bool(value == expected)
    if callable(value) and not isinstance(value, type) and callable(expected):
        return _same_function(value, expected)
    return True


def _same_function(function: Any, expected: Any) -> bool:
    functions = [f.__func__ if isinstance(f, MethodType) else f for f in (function, expected)]
    codes = [getattr(f, "__code__", None) for f in functions]
    if None in codes:
        return type(functions[0]) is type(functions[1]) and (codes == [None, None])
    return bool(codes[0] is codes[1])


def _is_within(name: str, other: str) -> bool:
    return not other or name == other or name.startswith(f"{other}.")
