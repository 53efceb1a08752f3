"""Which layers each stage owns: as the user says, or balanced by the weights that layers multiply with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model import (
    ALLOWED_LAYER_COUNTS,
    LayerHalf,
    LayerPart,
    LayerRange,
    ModelAnatomy,
    ModelEnd,
    are_allowed_layer_counts,
    find_halves,
    meta_model,
    parts_of,
    uses_randomness,
)
from slipstream.planner.partition import partition_layers

WORTH_CUTTING = 0.97  # layers are cut in half where the slowest rank's cost falls to this share or below


def assign_layers(
    config: PretrainedConfig,
    anatomy: ModelAnatomy,
    partition: str | Sequence[float],
    placement: Sequence[int],
    seq_len: int | None = None,
) -> tuple[tuple[LayerRange, ...], ModelAnatomy]:
    """The layers of every stage, and the anatomy, with `halves` if they are needed.

    "auto" counts multiplications with weights, and with `seq_len` those of attention in sequences of so many tokens.

    They are where a stage ends inside a layer, and where dropout draws random numbers: its random state is keyed by
    the half (rule 10), so that it doesn't matter who is cut.
    """
    model = meta_model(config)
    if isinstance(partition, str):
        if partition != "auto":
            raise SlipstreamError(f"partition={partition!r}: give 'auto' or the number of layers of every stage.")
        counts, halves = _balanced(config, anatomy, placement, model, seq_len)
    else:
        counts, halves = _checked(partition, len(placement), len(_layers(model, anatomy))), ()
    layers = tuple(LayerRange(a, b) for a, b in pairwise(accumulate(counts, initial=0)))
    if any(stage.has_halves for stage in layers):
        halves = halves or find_halves(config, anatomy)
    elif uses_randomness(model):
        halves = halves or _halves_or_none(config, anatomy)
    separate_ends = frozenset(edge for stage in layers for edge in stage if isinstance(edge, ModelEnd))
    return layers, replace(anatomy, halves=halves, separate_ends=separate_ends)


def _checked(partition: Sequence[float], num_stages: int, num_layers: int) -> list[float]:
    fits = len(partition) == num_stages and sum(partition) == num_layers
    if not fits or not are_allowed_layer_counts(partition):
        raise SlipstreamError(
            f"partition={list(partition)} has {len(partition)} stages and {sum(partition)} layers; needed are "
            f"{num_stages} stages of {ALLOWED_LAYER_COUNTS}, {num_layers} layers in all."
        )
    return [int(count) if count == int(count) else count for count in partition]


def _balanced(
    config: PretrainedConfig,
    anatomy: ModelAnatomy,
    placement: Sequence[int],
    model: PreTrainedModel,
    seq_len: int | None,
) -> tuple[list[float], tuple[LayerPart, ...]]:
    """Whole layers, unless half ones make the slowest rank clearly faster and the architecture allows them."""
    costs = layer_costs(config, anatomy, model, seq_len)
    whole = partition_layers(costs, len(placement), placement=placement)
    slowest = _slowest_rank(costs, whole, placement)
    if sum(costs) / len(set(placement)) > WORTH_CUTTING * slowest:
        return [*whole], ()  # even the most even cut would not be
    halves = _halves_or_none(config, anatomy)
    if halves:
        half_costs = half_layer_costs(config, replace(anatomy, halves=halves), model, seq_len)
        counts = partition_layers(half_costs, len(placement), placement=placement)
        if _slowest_rank(half_costs, counts, placement) <= WORTH_CUTTING * slowest:
            return [count / 2 if count % 2 else count // 2 for count in counts], halves
    return [*whole], halves


def _halves_or_none(config: PretrainedConfig, anatomy: ModelAnatomy) -> tuple[LayerPart, ...]:
    try:
        return find_halves(config, anatomy)
    except SlipstreamError:
        return ()  # nobody asked for half layers


def _slowest_rank(costs: Sequence[float], counts: Sequence[int], placement: Sequence[int]) -> float:
    bounds = pairwise(accumulate(counts, initial=0))
    stages = [sum(costs[a:b]) for a, b in bounds]
    return max(
        sum(cost for cost, owner in zip(stages, placement, strict=True) if owner == rank) for rank in set(placement)
    )


def layer_costs(
    config: PretrainedConfig, anatomy: ModelAnatomy, model: PreTrainedModel, seq_len: int | None
) -> list[float]:
    """Returns the multiplications of each layer per token; the last layer's include the head's."""
    layers = enumerate(_layers(model, anatomy))
    costs = [_multiplications(layer, config) + _attended(config, index, seq_len) for index, layer in layers]
    costs[-1] += _head_cost(config, anatomy, model)
    return costs


def half_layer_costs(
    config: PretrainedConfig, anatomy: ModelAnatomy, model: PreTrainedModel, seq_len: int | None
) -> list[float]:
    """Returns these costs for the attention and the feed-forward half of every layer; the last includes the head's."""
    costs = []
    for index, layer in enumerate(_layers(model, anatomy)):
        for half in LayerHalf:
            own = [child for child, part in parts_of(layer, anatomy.halves) if part.half is half]
            attended = _attended(config, index, seq_len) if half is LayerHalf.ATTENTION else 0.0
            costs.append(sum(_multiplications(child, config) for child in own) + attended)
    costs[-1] += _head_cost(config, anatomy, model)
    return costs


def _layers(model: PreTrainedModel, anatomy: ModelAnatomy) -> list[nn.Module]:
    return anatomy.layers_of(model)


def _head_cost(config: PretrainedConfig, anatomy: ModelAnatomy, model: PreTrainedModel) -> float:
    return sum(_multiplications(model.get_submodule(name), config) for name in anatomy.after)


def _attended(config: PretrainedConfig, layer: int, seq_len: int | None) -> float:
    """Multiplications of a token's scores and of their values, over the keys that it sees on average."""
    if seq_len is None:
        return 0.0
    text = config.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kinds, window = getattr(text, "layer_types", None), getattr(text, "sliding_window", None)
    keys = seq_len / 2
    if window is not None and window < seq_len and (kinds is None or "sliding" in kinds[layer]):
        keys = window - window**2 / (2 * seq_len)
    return float(2 * text.num_attention_heads * width * keys)


def _multiplications(module: nn.Module, config: PretrainedConfig) -> float:
    """Matrices multiply once with every token; of experts, held as one 3-D tensor, only those a token is sent to."""
    text = config.get_text_config()
    experts = next(
        (n for k in ("num_experts", "num_local_experts", "n_routed_experts") if (n := getattr(text, k, None))),
        1,
    )
    used = min(1.0, (getattr(text, "num_experts_per_tok", None) or 1) / experts)
    return sum(p.numel() * (used if p.dim() == 3 else 1.0) for p in module.parameters() if p.dim() > 1)
