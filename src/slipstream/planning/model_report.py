"""Reports what can be done with a model before anything of it is loaded: `slipstream check`.

Each fact comes from the function by which training finds it, so that training refuses what the report refuses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
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
    find_anatomy,
    find_halves,
    find_label_loss,
    longest_sequence,
    meta_model,
)
from slipstream.model.toy import toy_config
from slipstream.parallel.experts import check_experts, num_experts_of
from slipstream.parallel.tensor import find_tensor_plan
from slipstream.pipeline.families.causal_lm_checks import check_context_parallel


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
        layers = tuple(index for index, each in enumerate(structures) if each == kind)
        paths = toy_paths[toy.index(kind)] if toy_paths and kind in toy else None
        kinds.append(LayerKind(f"{kind[0]} ({kind[1]})" if kind[1] else kind[0], layers, paths))
    return tuple(kinds)


def _structures(config: PretrainedConfig, anatomy: ModelAnatomy) -> list[tuple[str, str, frozenset[Any]]]:
    """Returns each layer's class, type, and modules with their switches."""
    layers = anatomy.layers_of(meta_model(config))
    types = getattr(config.get_text_config(), "layer_types", None) or [""] * len(layers)
    return [(type(layer).__name__, types[index], _modules(layer)) for index, layer in enumerate(layers)]


def _modules(layer: nn.Module) -> frozenset[Any]:
    """Returns names, without numbers, and classes of the modules: experts may be fewer in a toy."""
    return frozenset((re.sub(r"\d+", "*", name), type(module).__qualname__) for name, module in layer.named_modules())


_MOST_TENSOR_RANKS = 64


@dataclass(frozen=True)
class ModelReport:
    """What a model's layers take from earlier tokens, and how it can be cut, as far as its architecture says."""

    model_type: str
    num_parameters: int | None  # None: transformers can't make it
    label_loss: LabelLoss  # of transformers; a Pipeline computes that of the next token
    refusal: str = ""  # why it can't be cut into stages or slices; "" if it can
    kinds: tuple[LayerKind, ...] = ()  # none if it can't be cut into stages
    tied: tuple[tuple[str, str], ...] = ()  # (head's parameter, embedding's parameter)
    whole_layers: str = ""  # why no stage can end inside a layer; "" if it can
    tensor_ranks: tuple[int, ...] = (1,)  # numbers of ranks that can share every layer
    no_tensor_parallel: str = ""  # why no more than one can
    context_ranks: tuple[int, ...] = (1,)  # numbers of ranks that can share every slice by heads for tokens
    no_context_parallel: str = ""  # why no more than one can, in any way
    expert_ranks: tuple[int, ...] = (1,)  # numbers of ranks over which experts can be spread
    no_expert_parallel: str = ""  # why no more than one can have some
    dropout: tuple[str, ...] = ()  # what is dropped with which probability, such as "attention_dropout=0.1"
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
    report = replace(report, dropout=_dropout(config.get_text_config()), max_length=longest_sequence(config))
    try:
        check_causal(config)
        check_router_loss(config, "pipeline.router_loss")
        check_unquantised(config)
        anatomy = find_anatomy(config)
        whole, (ranks, alone) = _why_whole(config, anatomy), _tensor_ranks(config, anatomy)
    except SlipstreamError as error:
        return replace(report, refusal=str(error))
    report = replace(report, tied=anatomy.tied, whole_layers=whole, tensor_ranks=ranks, no_tensor_parallel=alone)
    spread, together = expert_ranks(config)
    report = replace(report, expert_ranks=spread, no_expert_parallel=together)
    try:
        found = check_sliceable(config, anatomy)
    except SlipstreamError as error:
        return replace(report, kinds=find_layer_kinds(config, anatomy, ()), refusal=str(error))
    ranks, alone = context_ranks(config)
    report = replace(report, context_ranks=ranks, no_context_parallel=alone)
    return replace(report, kinds=find_layer_kinds(config, anatomy, found.paths), self_check=found)


def _num_parameters(config: PretrainedConfig) -> int | None:
    try:
        return int(sum(parameter.numel() for parameter in meta_model(config).parameters()))
    except Exception:  # the model's own code; the report says why
        return None


def _dropout(config: PretrainedConfig) -> tuple[str, ...]:
    fields = vars(config).items()
    return tuple(f"{name}={p}" for name, p in fields if "drop" in name and isinstance(p, float) and p > 0)


def _degrees(config: PretrainedConfig) -> list[int]:
    """Returns the numbers of ranks to try: those that divide the attention heads; 2 where layers differ."""
    text = config.get_text_config()
    heads = 2 if getattr(text, "is_heterogeneous", False) else getattr(text, "num_attention_heads", 2)
    return [ranks for ranks in range(2, min(heads, _MOST_TENSOR_RANKS) + 1) if heads % ranks == 0]


def _why_whole(config: PretrainedConfig, anatomy: ModelAnatomy) -> str:
    try:
        find_halves(config, anatomy)
    except SlipstreamError as error:
        return str(error)
    return ""


def context_ranks(config: PretrainedConfig) -> tuple[tuple[int, ...], str]:
    """Returns the numbers of ranks that can share every slice by heads, and why none can in any way."""
    degrees = _degrees(config)
    try:
        check_context_parallel(config, 2)
    except SlipstreamError as error:
        return (1,), str(error)
    return (1, *degrees), ""


def expert_ranks(config: PretrainedConfig) -> tuple[tuple[int, ...], str]:
    """Returns the numbers of ranks over which experts can be spread, and why there is only 1."""
    model = meta_model(config)
    numbers = range(2, 1 + max(num_experts_of(model).values(), default=2))
    return _allowed(numbers, lambda ranks: check_experts(model, config.model_type, ranks, f"--ep={ranks}"))


def _tensor_ranks(config: PretrainedConfig, anatomy: ModelAnatomy) -> tuple[tuple[int, ...], str]:
    """Returns the numbers of ranks that can share every layer, and why there is only 1."""
    model = meta_model(config)
    return _allowed(_degrees(config), lambda ranks: find_tensor_plan(model, config, ranks, anatomy))


def _allowed(numbers: Iterable[int], check: Callable[[int], object]) -> tuple[tuple[int, ...], str]:
    """Returns 1 and the numbers that the check lets pass, and why there is only 1."""
    found, reason = [1], ""
    for number in numbers:
        try:
            check(number)
            found.append(number)
        except SlipstreamError as error:
            reason = reason or str(error)
    return tuple(found), "" if len(found) > 1 else reason
