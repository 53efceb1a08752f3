"""Finds which parts of a causal LM come before its layers, which are the layers, and which come after them.

A toy of the same architecture runs once, so this works for any model that runs one list of layers: modules called
before the first layer (embeddings) belong to the first stage, those called after the last (norm, head) to the last
stage, and parts without parameters (rotary tables) to every stage.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model.config import check_is_causal_lm
from slipstream.model.hooks.attention import check_own_attention
from slipstream.model.hooks.crossing_tensors import (
    TRAIN_WHOLE,
    CrossingTensor,
    TensorForm,
    find_layer_tensors,
    takes_more,
)
from slipstream.model.layer_range import LayerHalf, LayerRange, ModelEnd
from slipstream.model.tensors import has_parameters
from slipstream.model.toy import (
    WatchedToy,
    full_precision,
    shapes_model,
    toy_failure,
    toy_model,
    toy_tokens,
)


@dataclass(frozen=True)
class LayerPart:
    """A child of a layer that has parameters, and the half of the layer that it belongs to."""

    name: str  # within the layer, such as "mlp"
    kind: str  # the class's name, as children of one name may differ between layers
    half: LayerHalf
    tuple_length: int = 0  # length of the returned tuple; 0: a tensor
    begins_half: bool = False  # True for the module that runs first in its half


@dataclass(frozen=True)
class ModelAnatomy:
    """The names of a model's parts, the same for every size of an architecture, and the tensors that cross cuts."""

    layers: str  # the nn.ModuleList of decoder layers, such as "model.layers"
    before: tuple[str, ...]  # such as ("model.embed_tokens",)
    after: tuple[str, ...]  # such as ("model.norm", "lm_head")
    tuple_length: int = 0  # length of the tuple that layers return, hidden states first; 0: a tensor
    hidden: TensorForm | None = None  # form of the hidden states; None: (b, T, hidden)
    crossing: tuple[CrossingTensor, ...] = ()  # further tensors that layers take, for this model's size
    tied: tuple[tuple[str, str], ...] = ()  # (head's parameter, embedding's parameter): one weight on two stages
    shared: tuple[tuple[str, ...], ...] = ()  # names of each parameter that several layers of this model share
    aliases: frozenset[str] = frozenset()  # second names of parameters within one stage, such as of the head's bias
    halves: tuple[LayerPart, ...] = ()  # the two halves of a layer; empty if not needed or not possible
    # True for RoBERTa's kind of positions, which count on from the padding's id and leave padding out.
    skips_padding: bool = False
    attends_itself: bool = False  # True for layers with attention in their own code, not through AttentionInterface
    kept_whole: tuple[tuple[str, str], ...] = ()  # uncuttable layers, head or embedding of this model, with the reason
    separate_ends: frozenset[ModelEnd] = frozenset()  # ends that are stages of their own, without any layer
    # The key by which this process remembers what the toy has shown, so that none is made for what is known.
    toy: Hashable = field(default=None, repr=False, compare=False)

    @property
    def second_names(self) -> frozenset[str]:
        """The names of parameters that have another name, which is the canonical one."""
        return self.aliases | {name for name, _ in self.tied}

    def obstacle(self, names: Iterable[str]) -> str:
        """Returns why one of these modules can't be cut, "" where each can, by changes to this model beside its
        architecture."""
        reasons = dict(self.kept_whole)
        return next((reasons[name] for name in names if name in reasons), "")

    def hidden_form(self, width: int) -> TensorForm:
        """Returns the form of the hidden states, given their width."""
        return self.hidden or TensorForm((1, 1, width), row_dim=0, token_dim=1)

    def layers_of(self, model: nn.Module) -> list[nn.Module]:
        """Returns the layers of a model of this architecture, or an earlier cut's placeholders."""
        return list(model.get_submodule(self.layers).children())

    def stages_of(self, parameter: str, stages: Sequence[LayerRange]) -> set[int]:
        """Returns which of the stages, given by the layers they own, may compute with the parameter of this name: of a
        layer that is cut in two both."""
        if parameter.startswith(f"{self.layers}."):
            layer = int(parameter.removeprefix(f"{self.layers}.").partition(".")[0])
            return {stage_index for stage_index, owned in enumerate(stages) if layer in owned.layers}
        return {0 if _within(parameter, self.before) else len(stages) - 1}

    def first_position(self, config: PretrainedConfig) -> int:
        """Returns the position of a sequence's first token."""
        return config.pad_token_id + 1 if self.skips_padding else 0


_found: dict[Hashable, tuple[ModelAnatomy, bool]] = {}


def find_anatomy(config: PretrainedConfig) -> ModelAnatomy:
    """Returns the anatomy of `config`'s architecture, found by a toy of it, which runs once in this process.

    Raises SlipstreamError, naming the part, where the architecture doesn't simply run one list of layers, and the
    reason, where its toy can't be run or it was loaded with attention that can't be cut.
    """
    check_is_causal_lm(config)
    try:
        model = toy_model(config)
        check_runs_every_layer(model)
        # But for where the configuration was read; somebody may replace the forward of a class.
        forwards = frozenset((type(module), type(module).forward) for module in model.modules())
        key = str(model.config.to_dict() | {"_name_or_path": ""}), forwards
        with full_precision():
            if key not in _found:
                toy = WatchedToy(model, toy_tokens(config))
                _found[key] = replace(_anatomy_of(config, toy), toy=key), takes_more(model, toy.every_layer)
            anatomy, takes_tensors = _found[key]
            if anatomy.attends_itself:
                check_own_attention(config)
            return _with_tensors(anatomy, config) if takes_tensors else anatomy
    except SlipstreamError:
        raise
    except Exception as error:  # the model's own code
        raise _refusal(config, toy_failure(config, error), advice="") from error


def anatomy_of_size(anatomy: ModelAnatomy, config: PretrainedConfig) -> ModelAnatomy:
    """Returns the anatomy for a config of the architecture with other sizes, and so with other crossing tensors."""
    return anatomy if anatomy.hidden is None else _with_tensors(anatomy, config)


def check_shared_weights(config: PretrainedConfig, shared: Mapping[str, str], layers: str) -> None:
    """Raises SlipstreamError where one of the `layers` has a weight of another, by the names of shared weights."""
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
            # The toy may have only one of the layers that share a weight.
            check_shared_weights(config, model.all_tied_weights_keys, anatomy.layers)
            hidden, crossing = find_layer_tensors(model, anatomy.layers_of(model))
    except SlipstreamError:
        raise
    except Exception as error:  # the model's own code
        reason = f"its layers take more than hidden states from others, which can't be determined ({error})"
        raise _refusal(config, reason) from error
    return replace(anatomy, hidden=hidden, crossing=crossing)


def _anatomy_of(config: PretrainedConfig, toy: WatchedToy) -> ModelAnatomy:
    _check_layers(config, toy)
    before, after = _ends(config, toy)
    aliases, tied = _shared_weights(config, toy, before, after)
    return ModelAnatomy(
        toy.layers,
        before,
        after,
        tuple_length=len(output) if isinstance(output := toy.layer_calls[-1].output, (tuple, list)) else 0,
        tied=tied,
        aliases=aliases,
        skips_padding=_skips_padding(toy.model),
        attends_itself=toy.attends_itself(),
    )


def check_runs_every_layer(model: PreTrainedModel) -> None:
    """Raises SlipstreamError for a model that leaves out layers at random in training (LayerDrop, Fan et al. 2020)."""
    for name, module in model.named_modules():
        rate = getattr(module, "layerdrop", 0.0)
        if isinstance(rate, float) and rate > 0:
            fields = ("decoder_layerdrop", "layerdrop")
            field = next((field for field in fields if getattr(model.config, field, None) == rate), None)
            setting = f"{field}=0.0 in its configuration" if field else f"model.{name}.layerdrop = 0.0"
            raise SlipstreamError(
                f"{name} of model_type {model.config.model_type!r} leaves out each layer of a training step with a "
                f"probability of {rate:g} (LayerDrop), which it draws once for all stages. Set {setting}."
            )


def _check_layers(config: PretrainedConfig, toy: WatchedToy) -> None:
    """Raises SlipstreamError unless every layer ran once, on the output of layers before it."""
    num_layers, entered = len(toy.every_layer), len(toy.layer_calls)
    if entered < num_layers:
        raise _refusal(config, f"only {entered} of its {num_layers} layers run on text alone")
    if entered != num_layers:
        raise _refusal(
            config, f"its {num_layers} layers run in cycles, {entered} calls in one forward, so no stage ends after one"
        )
    for name, module in toy.outside.items():
        if toy.gives_layers_constants(name):
            kind = type(module).__name__
            raise _refusal(config, f"its layers all take what {name} ({kind}) gives, which only the first stage has")


def _ends(config: PretrainedConfig, toy: WatchedToy) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names of the parts that run before the layers and have parameters, and of those that run after."""
    for name, module in toy.outside.items():
        described = f"{name} ({type(module).__name__})"
        if toy.runs_after(name):
            if toy.takes_other_tensors(name):
                raise _refusal(config, f"{described}, after the layers, takes more than what the last layer gives")
        elif has_parameters(module) and not toy.runs_before(name):
            raise _refusal(config, f"{described} has parameters and runs between the layers")
    after = tuple(name for name in toy.outside if toy.runs_after(name))
    before = (name for name, module in toy.outside.items() if toy.runs_before(name) and has_parameters(module))
    return tuple(before), after


def _shared_weights(
    config: PretrainedConfig, toy: WatchedToy, before: Sequence[str], after: Sequence[str]
) -> tuple[frozenset[str], tuple[tuple[str, str], ...]]:
    """Returns the second names of parameters within one end, and the weights that both ends share."""
    shared = toy.model.all_tied_weights_keys
    check_shared_weights(config, shared, toy.layers)
    aliases = {a for a, b in shared.items() if any(_within(a, end) and _within(b, end) for end in (before, after))}
    tied = tuple((head, embedding) for head, embedding in shared.items() if head not in aliases)
    for head, embedding in tied:
        if not (_within(head, after) and _within(embedding, before)):
            raise _refusal(config, f"{head} shares its weight with {embedding}; only a head may, with the embedding")
    return frozenset(aliases), tied


def _skips_padding(model: nn.Module) -> bool:
    """Returns whether the model makes positions out of token ids, unless it is given some."""
    makers = [module for module in model.modules() if hasattr(module, "create_position_ids_from_input_ids")]
    return any("position_ids" in inspect.signature(module.forward).parameters for module in makers)


def _within(parameter: str, modules: Sequence[str]) -> bool:
    return any(parameter.startswith(f"{module}.") for module in modules)


def expert_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the modules that hold the weights of all experts of a layer together, with their names: those that
    transformers' decorator has made, of which `num_experts` says how many are here."""
    for name, module in model.named_modules():
        num_experts = getattr(module, "num_experts", None)
        if hasattr(module, "_apply_gate") and isinstance(num_experts, int):
            yield name, module


def uses_randomness(model: nn.Module) -> bool:
    """Returns whether training draws random numbers: dropout of any kind, or a router's jitter."""
    return any(getattr(module, name) > 0 for module, name in random_rates(model))


def random_rates(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yields the modules that draw by a number, with its name: the rate of a dropout, or a router's jitter."""
    for module in model.modules():
        for name, value in vars(module).items():
            is_rate = "drop" in name or "jitter" in name or (name == "p" and "Dropout" in type(module).__name__)
            if is_rate and isinstance(value, float):
                yield module, name


def dropout_rates(config: Any) -> dict[str, float]:
    """Returns the rates above 0 of dropout in a configuration of transformers, or of an adapter by PEFT, by name."""
    fields = vars(config).items()
    return {name: rate for name, rate in fields if "drop" in name and isinstance(rate, float) and rate > 0}


def switch_off_dropout(model: nn.Module) -> None:
    """Sets the rates of every dropout of a model and its adapter to 0. A router's jitter stays.

    A module whose code reads the rate from its configuration gets a copy of that, as the configuration itself is
    exported as it was.
    """
    for module, name in [*random_rates(model)]:
        if "jitter" not in name:
            setattr(module, name, 0.0)
    copies = dict[int, PretrainedConfig]()  # copies, by id of the shared configuration
    for module in model.modules():
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, dict):  # the rates of adapters, by name
                value.update({adapter: 0.0 for adapter, rate in value.items() if isinstance(rate, float)})
        config = vars(module).get("config")
        if isinstance(config, PretrainedConfig) and dropout_rates(config):
            if id(config) not in copies:
                copies[id(config)] = copy.copy(config)
                vars(copies[id(config)]).update(dict.fromkeys(dropout_rates(config), 0.0))
            module.config = copies[id(config)]


def _refusal(config: PretrainedConfig, reason: str, advice: str = TRAIN_WHOLE) -> SlipstreamError:
    return SlipstreamError(f"model_type {config.model_type!r} can't be cut into stages: {reason}. {advice}".rstrip())
