"""The layout of a causal LM from a Pipeline's options: preflight and every rank check it by `plan_layout`.

The user says which layers each stage owns, or they are balanced by the weights that layers multiply with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, takewhile

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
from slipstream.model.saving import RecomputePolicy
from slipstream.pipeline.families.stage_layout import StageLayout, check_lengths, given_counts
from slipstream.pipeline.pipeline_options import PipelineOptions
from slipstream.planner.costs import AttentionWindow
from slipstream.planner.partition import partition_layers
from slipstream.schedule import AUTOMATIC, Schedule

_WITHOUT_SCORES = ("linear_attention", "conv", "mlp", "moe")  # kinds of layers by transformers' names

WORTH_CUTTING = 0.97  # layers are cut in half where the slowest rank's cost falls to this share or below


def plan_layout(
    config: PretrainedConfig,
    anatomy: ModelAnatomy,
    schedule: Schedule,
    slices: int | Sequence[int],
    options: PipelineOptions,
    tensor_ranks: int = 1,
    reduces: bool = False,
    draws: bool = False,
    whole: PreTrainedModel | None = None,
) -> tuple[StageLayout, ModelAnatomy]:
    """Returns the layout, and the anatomy with `halves` if they are needed.

    With `draws` an adapter has dropout; `whole` is the model on the meta device, with its adapter and its frozen
    parameters, where not all of it is trained.

    Raises SlipstreamError, with what was given, allowed, and to type, where the options don't fit together.
    """
    check_lengths(schedule, slices)
    seq_len = options.seq_len
    if seq_len is None and not isinstance(slices, int):
        seq_len = sum(slices)
    spreads = options.vocabulary == "spread" or schedule.spreads_vocabulary
    if spreads:
        if options.vocabulary == "whole":
            raise SlipstreamError(
                f"vocabulary='whole', but the schedule {schedule.name!r} has V's, which spread the head. Leave "
                "vocabulary out, or give a schedule without V, L and VW."
            )
        check_spread(config, tensor_ranks, schedule.num_ranks, options)
        _check_spread_embedding(anatomy, schedule)
    model = WeighedModel(config, anatomy, seq_len, has_head=not spreads, whole=whole)
    model.uses_randomness |= draws
    layers, anatomy = assign_layers(model, options.partition, schedule.placement)
    recompute = RecomputePolicy.parse(options.memory.recompute, max(len(stage.layers) for stage in layers))
    embeds = spreads and bool(anatomy.tied)  # an untied embedding is faster whole: what it gives has not to travel
    layout = StageLayout(schedule, layers, recompute, options.memory.offload, reduces, spreads, embeds)
    _check_sharding(anatomy, tensor_ranks, options)
    return layout, anatomy


def check_spread(config: PretrainedConfig, tensor_ranks: int, num_ranks: int, options: PipelineOptions) -> None:
    """Raises SlipstreamError, the same on every rank, for what a spread head can't do."""
    problems = {
        "loss_fn=...": (options.loss_fn is not None, "no rank has all logits"),
        f"tp={tensor_ranks} in the mesh": (tensor_ranks > 1, "tensor ranks share the vocabulary already"),
        "parallel.shard_parameters=True": (options.parallel.shard_parameters, "rows of rows aren't gathered"),
        f"schedule={options.schedule!r}": (options.schedule in AUTOMATIC, "the parts are no part of what it measures"),
        "slices='auto'": (options.slices == "auto", "the parts are no part of what it measures"),
    }
    for setting, (is_given, reason) in problems.items():
        if is_given:
            raise SlipstreamError(f"vocabulary='spread' with {setting}: {reason}. Leave one of the two out.")
    if (size := config.get_text_config().vocab_size) < num_ranks:
        raise SlipstreamError(f"vocabulary='spread': {size} words are too few for {num_ranks} ranks. Leave it out.")


def _check_spread_embedding(anatomy: ModelAnatomy, schedule: Schedule) -> None:
    """Raises SlipstreamError for a given schedule that spreads a whole embedding, or leaves a tied one whole."""
    if not schedule.spreads_vocabulary or schedule.spreads_embedding == bool(anatomy.tied):
        return
    if anatomy.tied:
        head, embedding = anatomy.tied[0]
        raise SlipstreamError(
            f"the schedule {schedule.name!r} has V's but no E's, which spread {embedding}, to which {head} is tied. "
            "Make it by slipstream.schedule.spread_vocabulary(..., embedding=True)."
        )
    raise SlipstreamError(
        f"the schedule {schedule.name!r} has E's, which spread the embedding, but it isn't tied to the head and stays "
        "whole. Give a schedule without E and EW."
    )


def _check_sharding(anatomy: ModelAnatomy, tensor_ranks: int, options: PipelineOptions) -> None:
    """Raises SlipstreamError, the same on every rank, for what can't be exact where replicas shard parameters."""
    if not options.parallel.shard_parameters:
        return
    if options.parallel.shard_optimizer:
        raise SlipstreamError(
            "parallel.shard_parameters=True with parallel.shard_optimizer=True: leave one of the two out."
        )
    if options.precision.master_dtype is not None:
        raise SlipstreamError(
            f"parallel.shard_parameters=True with precision.master_dtype={options.precision.master_dtype}, in YAML "
            "with training.precision=bf16-weights: leave one of the two out."
        )
    if tensor_ranks > 1:
        raise SlipstreamError(
            f"parallel.shard_parameters=True on a mesh with tp={tensor_ranks}: gradients that are partial on tensor "
            "ranks would not be added up. Use tp=1, or parallel.shard_optimizer=True."
        )
    if anatomy.tied:
        raise SlipstreamError(
            f"parallel.shard_parameters=True with {anatomy.tied[0][0]} tied to {anatomy.tied[0][1]}: the two shards "
            "would be updated separately. Use parallel.shard_optimizer=True, or a model with tie_word_embeddings=False."
        )


def assign_layers(
    model: WeighedModel, partition: str | Sequence[float], placement: Sequence[int]
) -> tuple[tuple[LayerRange, ...], ModelAnatomy]:
    """Returns the layers of every stage, and the anatomy, with `halves` if they are needed.

    They are where a stage ends inside a layer, and where dropout draws random numbers: its random state is keyed by
    the half (rule 10), so that it doesn't matter who is cut.
    """
    halves: tuple[LayerPart, ...] = ()
    num_layers = len(model.layers)
    counts = given_counts(partition, len(placement), num_layers, are_allowed_layer_counts, ALLOWED_LAYER_COUNTS)
    if counts is None:
        counts, halves = _balanced(model, placement)
    layers = tuple(LayerRange(a, b) for a, b in pairwise(accumulate(counts, initial=0)))
    if any(stage.has_halves for stage in layers):
        halves = halves or find_halves(model.config, model.anatomy)
    elif model.uses_randomness:
        halves = halves or model.halves_or_none()
    separate_ends = frozenset(edge for stage in layers for edge in stage if isinstance(edge, ModelEnd))
    return layers, replace(model.anatomy, halves=halves, separate_ends=separate_ends)


def _balanced(model: WeighedModel, placement: Sequence[int]) -> tuple[list[float], tuple[LayerPart, ...]]:
    """Returns whole numbers of layers, unless halves make the slowest rank clearly faster and the model allows them."""
    costs = model.costs()
    whole = partition_layers(costs, len(placement), placement=placement)
    slowest = _slowest_rank(costs, whole, placement)
    if sum(costs) / len(set(placement)) > WORTH_CUTTING * slowest:
        return [*whole], ()  # even the most even cut would not be
    halves = model.halves_or_none()
    if halves:
        costs = model.costs(halves)
        counts = partition_layers(costs, len(placement), placement=placement)
        if _slowest_rank(costs, counts, placement) <= WORTH_CUTTING * slowest:
            return [count / 2 if count % 2 else count // 2 for count in counts], halves
    return [*whole], halves


def _slowest_rank(costs: Sequence[float], counts: Sequence[int], placement: Sequence[int]) -> float:
    bounds = pairwise(accumulate(counts, initial=0))
    stages = [sum(costs[a:b]) for a, b in bounds]
    return max(
        sum(cost for cost, owner in zip(stages, placement, strict=True) if owner == rank) for rank in set(placement)
    )


class WeighedModel:
    """A model that isn't in memory, its layers weighed by the multiplications that a token needs.

    These are the products with weights and, where `seq_len` is known, those of attention in sequences of that length.
    Where all weights are trained, backwards have twice as many and count nothing; else a third of all is the weight:
    below the lowest trained parameter of the forward alone, above it of the gradients that are computed, too.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        anatomy: ModelAnatomy,
        seq_len: int | None,
        has_head: bool = True,
        whole: PreTrainedModel | None = None,
    ) -> None:
        self.config, self.anatomy, self.trains_all = config, anatomy, whole is None
        self._module = meta_model(config) if whole is None else whole
        self.layers = anatomy.layers_of(self._module)
        self.uses_randomness = uses_randomness(self._module)
        self._seq_len, self._text = seq_len, config.get_text_config()
        self._has_head = has_head  # of whichever stage is last

    def halves_or_none(self) -> tuple[LayerPart, ...]:
        """Returns the parts of half layers, none where the architecture has none: nobody asked for them."""
        try:
            return find_halves(self.config, self.anatomy)
        except SlipstreamError:
            return ()

    def costs(self, halves: Sequence[LayerPart] = ()) -> list[float]:
        """Returns the multiplications of each layer, or of both halves of each where `halves` are given.

        The last one's include those of the head, unless that is spread over all ranks.
        """
        costs = []
        for index, layer in enumerate(self.layers):
            for half in LayerHalf if halves else (None,):
                parts = [layer]
                if half is not None:
                    parts = [child for child, part in parts_of(layer, halves) if part.half is half]
                attended = 0.0 if half is LayerHalf.FEED_FORWARD else self._attended(index)
                costs.append(self._step_share(parts, attended))
        if self._has_head:
            costs[-1] += self._step_share([self._module.get_submodule(name) for name in self.anatomy.after], 0.0)
        return costs

    def _step_share(self, parts: Sequence[nn.Module], attended: float) -> float:
        """Returns a third of a step's multiplications of a token with these modules and with what it attends to."""
        forward = sum(map(self._multiplications, parts))
        if self.trains_all:
            return forward + attended
        trained = sum(self._multiplications(part, trained=True) for part in parts)
        sends_back = self.has_gradient(parts)
        return (forward * (2 if sends_back else 1) + trained + attended * (3 if sends_back or trained else 1)) / 3

    def has_gradient(self, parts: Sequence[nn.Module]) -> bool:
        """Returns whether anything before a layer, or these parts of it, is trained."""
        own = {id(parameter) for part in parts for parameter in part.parameters()}
        ends = [self._module.get_submodule(name) for name in self.anatomy.before]
        if any(parameter.requires_grad for end in ends for parameter in end.parameters()):
            return True
        inside = (parameter for layer in self.layers for parameter in layer.parameters())
        before = takewhile(lambda parameter: id(parameter) not in own, inside)
        return any(parameter.requires_grad for parameter in before)

    @property
    def head_products(self) -> float:
        """The multiplications of a token with what follows the layers."""
        return sum(self._multiplications(self._module.get_submodule(name)) for name in self.anatomy.after)

    def score_products(self, layer: int) -> float:
        """The multiplications of a token with a key and a value that it sees, in a layer; 0 where it has none."""
        text = self._of_layer(layer)
        kinds = getattr(text, "layer_types", None)
        if not hasattr(text, "num_attention_heads") or (kinds is not None and kinds[layer] in _WITHOUT_SCORES):
            return 0.0
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return float(2 * text.num_attention_heads * width)

    def window(self, layer: int) -> AttentionWindow:
        """Returns the keys that a layer's attention sees."""
        text = self._of_layer(layer)
        kinds, width = getattr(text, "layer_types", None), getattr(text, "sliding_window", None)
        slides = width is not None and (kinds is None or "sliding" in kinds[layer])
        return AttentionWindow("sliding", width) if slides else AttentionWindow()

    def _of_layer(self, layer: int) -> PretrainedConfig:
        """Returns the layer's own configuration where sizes vary from layer to layer."""
        is_varied = getattr(self._text, "is_heterogeneous", False)
        return self._text.per_layer_config[layer] if is_varied else self._text

    def _attended(self, layer: int) -> float:
        """Returns the multiplications of a token with the keys and the values that it sees on average."""
        length, window = self._seq_len, self.window(layer).width
        if length is None:
            return 0.0
        keys = length / 2
        if window is not None and window < length:
            keys = window - window**2 / (2 * length)
        return self.score_products(layer) * keys

    def _multiplications(self, module: nn.Module, trained: bool = False) -> float:
        """Returns a token's multiplications: one per element of a matrix; of experts (3-D), those it is sent to.

        With `trained`, those that lead to weight gradients. What a trained copy has replaced doesn't count.
        """
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        experts = next(filter(None, (getattr(self._text, name, None) for name in names)), 1)
        used = min(1.0, (getattr(self._text, "num_experts_per_tok", None) or 1) / experts)
        matrices = [
            parameter
            for name, parameter in module.named_parameters()
            if parameter.dim() > 1 and not (trained and not parameter.requires_grad) and "original_module." not in name
        ]
        return sum(p.numel() * (used if p.dim() == 3 else 1.0) for p in matrices)
