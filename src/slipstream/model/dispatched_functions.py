"""Finds the functions of a user's that transformers calls by a name: attention, masks, experts and the loss.

A configuration has their names, and registries of the whole process have the functions. Slipstream puts its own
attention in the place of transformers', which computes the same; in the place of a user's it would compute something
else. Whether a function is transformers' is told by the module whose globals it reads, as `functools.wraps` copies
every other sign.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from slipstream.errors import SlipstreamError
from slipstream.model.loading import meta_model

_KNOWN = ("transformers", "slipstream")
_REGISTRIES: Mapping[str, Mapping[str, Any]] = {
    AttentionInterface.__name__: ALL_ATTENTION_FUNCTIONS,
    AttentionMaskInterface.__name__: ALL_MASK_ATTENTION_FUNCTIONS,
    ExpertsInterface.__name__: ALL_EXPERTS_FUNCTIONS,
}


@dataclass(frozen=True)
class DispatchedFunction:
    """A user's function in one of transformers' registries, under a name that a model asks for."""

    setting: str  # configuration setting, such as "attn_implementation"
    name: str
    registry: str

    def __str__(self) -> str:
        return f"{self.setting}={self.name!r} is a function of your own in {self.registry}"


@dataclass(frozen=True)
class DispatchedFunctions:
    """The user's functions that a model calls by names; None, or "", where it calls transformers' alone.

    Args:
        attention: a function or a mask by which its layers attend.
        experts: a function that computes its experts.
        loss: the loss that it has in the place of a causal LM's, as a clause.
    """

    attention: DispatchedFunction | None = None
    experts: DispatchedFunction | None = None
    loss: str = ""

    def __iter__(self) -> Iterator[DispatchedFunction]:
        """Yields the functions that layers call."""
        return (function for function in (self.attention, self.experts) if function is not None)

    def __bool__(self) -> bool:
        return bool(self.attention or self.experts or self.loss)


def dispatched_by_config(config: PretrainedConfig) -> DispatchedFunctions:
    """Returns the user's functions that a model made of a configuration calls by names."""
    registries = (*_REGISTRIES.values(), LOSS_MAPPING)
    any_own = any(_is_users(function) for registry in registries for function in registry.values())
    # else every name is one of transformers', and no model has to be made
    if not any_own and getattr(config, "loss_type", None) is None:
        return DispatchedFunctions()
    return dispatched_by(meta_model(config))


def dispatched_by(model: PreTrainedModel) -> DispatchedFunctions:
    """Returns the user's functions that a model calls by names.

    Raises SlipstreamError for a function under the name "eager", by which models are compared with their own attention.
    """
    if _is_users(ALL_ATTENTION_FUNCTIONS.get("eager")):
        raise SlipstreamError(
            "AttentionInterface has a function of your own under 'eager', the name of each model's own attention, with "
            "which slices are compared. Register it under another name, and give the model that as attn_implementation."
        )
    files = {sys.modules.get(type(module).__module__) for module in model.modules()}
    # A file of a model's own may have a registry of its own.
    own = [getattr(file, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS) for file in files]
    attention = next(
        (
            DispatchedFunction("attn_implementation", name, kind)
            for name in _names(model, "_attn_implementation")
            for kind, registries in (
                (AttentionInterface.__name__, own),
                (AttentionMaskInterface.__name__, [ALL_MASK_ATTENTION_FUNCTIONS]),
            )
            if any(_is_users(registry.get(name)) for registry in registries)
        ),
        None,
    )
    experts = next(
        (
            DispatchedFunction("experts_implementation", name, ExpertsInterface.__name__)
            for name in _names(model, "_experts_implementation")
            if _is_users(ALL_EXPERTS_FUNCTIONS.get(name, None))
        ),
        None,
    )
    return DispatchedFunctions(attention, experts, _loss_of(model))


def _names(model: PreTrainedModel, setting: str) -> Iterable[str]:
    """Returns the names that a setting has in the configurations of a model and its modules, each once."""
    return dict.fromkeys(str(name) for config in _configs(model) if (name := getattr(config, setting, None)))


def _configs(model: PreTrainedModel) -> Iterator[PretrainedConfig]:
    """Yields the configurations of a model and its modules, which dispatch by them."""
    yield model.config.get_text_config()
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, PretrainedConfig):
            yield config


def _loss_of(model: PreTrainedModel) -> str:
    """Returns the loss that a model has in the place of a causal LM's, as a clause; "" where it has that."""
    if "_loss_function" in vars(model):
        setting = "loss_function"
        function = model._loss_function
    else:
        # Some versions of transformers read the configuration's, others ignore it.
        asked = (getattr(model.config, "loss_type", None), model.loss_type, "ForCausalLM")
        kind = next(kind for kind in asked if kind in LOSS_MAPPING)
        setting = f"loss_type={kind!r}"
        function = LOSS_MAPPING[kind]
    name = getattr(function, "__name__", type(function).__name__)
    return "" if function is ForCausalLMLoss else f"{setting} is {name}"


def _is_users(function: Any) -> bool:
    """Returns whether a registered function is neither transformers' nor Slipstream's."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    # torch.compile returns a function of torch around the one that was given.
    while _home(function).startswith("torch.") and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function is not None and _home(function).partition(".")[0] not in _KNOWN


def _home(function: Any) -> str:
    """Returns the name of the module in which a function was written."""
    names = getattr(function, "__globals__", None)
    return str(type(function).__module__ if names is None else names.get("__name__"))
