"""Reports how a model can be split before anything of it is loaded: `slipstream check`.

Each fact comes from the function by which training finds it, so that training refuses what the report refuses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from slipstream.errors import SlipstreamError
from slipstream.model import (
    LabelLoss,
    ModelAnatomy,
    SelfCheck,
    check_causal,
    check_is_causal_lm,
    check_router_loss,
    check_sliceable,
    check_unquantised,
    dropout_rates,
    find_anatomy,
    find_label_loss,
    longest_sequence,
    meta_model,
    toy_config,
    why_layers_stay_whole,
)
from slipstream.parallel import PossibleRanks, possible_sharing


@dataclass(frozen=True)
class LayerKind:
    """Layers of one class with the same modules and switches, whatever their sizes."""

    name: str  # the class's, with the configuration's name for the kind where there are several
    layers: tuple[int, ...]
    paths: frozenset[str] | None  # "attention" and kinds of carried states; None: the toy has no such layer


def find_layer_kinds(
    config: PretrainedConfig, anatomy: ModelAnatomy, toy_paths: Sequence[frozenset[str]]
) -> tuple[LayerKind, ...]:
    """Returns the kinds in the order of their first layers. `toy_paths` are those of the toy's layers."""
    toy = _structures(toy_config(config), anatomy)
    structures = _structures(config, anatomy)
    kinds = []
    for kind in dict.fromkeys(structures):
        layers = tuple(index for index, structure in enumerate(structures) if structure == kind)
        paths = toy_paths[toy.index(kind)] if toy_paths and kind in toy else None
        kinds.append(LayerKind(f"{kind[0]} ({kind[1]})" if kind[1] else kind[0], layers, paths))
    return tuple(kinds)


def _structures(config: PretrainedConfig, anatomy: ModelAnatomy) -> list[tuple[str, str, frozenset[Any]]]:
    """Returns each layer's class, type, and modules with their switches."""
    layers = anatomy.layers_of(meta_model(config))
    types = getattr(config.get_text_config(), "layer_types", None) or [""] * len(layers)
    return [(type(layer).__name__, types[index], _modules(layer)) for index, layer in enumerate(layers)]


def _modules(layer: nn.Module) -> frozenset[Any]:
    # Names without numbers, as a toy may have fewer experts.
    return frozenset((re.sub(r"\d+", "*", name), type(module).__qualname__) for name, module in layer.named_modules())


@dataclass(frozen=True)
class ModelReport:
    """How a model's layers read earlier tokens, and how it can be cut, as far as its architecture says."""

    model_type: str
    num_parameters: int | None  # None: transformers can't make it
    label_loss: LabelLoss  # of transformers; a Pipeline computes that of the next token
    refusal: str = ""  # why it can't be cut into stages or slices; "" if it can
    kinds: tuple[LayerKind, ...] = ()  # none if it can't be cut into stages
    tied: tuple[tuple[str, str], ...] = ()  # (head's parameter, embedding's parameter)
    whole_layers: str = ""  # why no stage can end inside a layer; "" if it can
    sharing: Mapping[str, PossibleRanks] = field(default_factory=dict)  # by how many ranks, by the names of Degrees
    dropout: tuple[str, ...] = ()  # probabilities of dropout, such as "attention_dropout=0.1"
    max_length: int | None = None  # the most tokens of a sequence; None: as many as you like
    self_check: SelfCheck | None = None

    @property
    def num_layers(self) -> int:
        return sum(len(kind.layers) for kind in self.kinds)


def report_on(config: PretrainedConfig) -> ModelReport:
    """Returns the report on a model of transformers, in a few seconds and without its weights. Not collective."""
    try:
        check_is_causal_lm(config)
    except SlipstreamError as error:
        return ModelReport(config.model_type, None, LabelLoss.NONE, refusal=str(error))
    report = ModelReport(config.model_type, _num_parameters(config), find_label_loss(config))
    rates = dropout_rates(config.get_text_config())
    dropout = tuple(f"{name}={rate}" for name, rate in rates.items())
    report = replace(report, dropout=dropout, max_length=longest_sequence(config))
    try:
        check_causal(config)
        check_router_loss(config, "pipeline.router_loss")
        check_unquantised(config)
        anatomy = find_anatomy(config)
        whole, shared = why_layers_stay_whole(config, anatomy), possible_sharing(config, anatomy)
    except SlipstreamError as error:
        return replace(report, refusal=str(error))
    report = replace(report, tied=anatomy.tied, whole_layers=whole, sharing=shared)
    try:
        check = check_sliceable(config, anatomy)
    except SlipstreamError as error:
        return replace(report, kinds=find_layer_kinds(config, anatomy, ()), refusal=str(error))
    return replace(report, kinds=find_layer_kinds(config, anatomy, check.paths), self_check=check)


def _num_parameters(config: PretrainedConfig) -> int | None:
    try:
        return int(sum(parameter.numel() for parameter in meta_model(config).parameters()))
    except Exception:  # the model's own code; the report says why
        return None
