"""The layout of a causal LM from a Pipeline's options: preflight and every rank check it by `plan_layout`.

The user says which layers each stage owns, or they are balanced by the weights that layers multiply with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model import (
    HalfLayer,
    HeadNames,
    HeadRows,
    LayerPart,
    LayerRange,
    ModelAnatomy,
    ModelEnd,
    RecomputePolicy,
    SpreadHead,
    StagePart,
    check_router_loss,
    check_tiled_head,
    find_anatomy,
    find_halves,
    find_spreadable_head,
    fuse_kernels,
    halves_or_none,
    is_wrapper,
    meta_model,
    torch_dtype,
)
from slipstream.model.hooks import RouterLoss
from slipstream.options import ALLOWED_LAYER_COUNTS, are_allowed_layer_counts, host_share
from slipstream.parallel import part_bounds
from slipstream.pipeline.families.flop_estimate import FlopEstimate
from slipstream.pipeline.families.stage_layout import StageLayout, check_lengths, given_counts
from slipstream.pipeline.pipeline_options import PipelineOptions
from slipstream.pipeline.planning import StepSettings
from slipstream.pipeline.weight_source import WeightSource
from slipstream.planner import OPEN
from slipstream.planner.partition import partition_layers
from slipstream.schedule import AUTOMATIC, Schedule

# Layers are cut in half only if that lowers the slowest rank's cost to this share of the uncut one, or below.
WORTH_CUTTING = 0.97


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

    Raises SlipstreamError, with the given and the allowed values, and the ones to type, where the options don't fit
    together.
    """
    check_lengths(schedule, slices)
    seq_len = options.row_length
    if seq_len is None and not isinstance(slices, int):
        seq_len = sum(slices)
    spreads = options.vocabulary == "spread" or schedule.spreads_vocabulary
    if spreads:
        if options.vocabulary == "whole":
            raise SlipstreamError(
                f"vocabulary='whole', but the schedule {schedule.name!r} has V's, which spread the head. Leave "
                "vocabulary out, or give a schedule without V, L and VW."
            )
        if options.memory.loss_tokens is not None:
            raise SlipstreamError(
                f"memory.loss_tokens={options.memory.loss_tokens} with a head whose rows are spread over ranks, which "
                "have the logits of their own. Give vocabulary='whole', or leave memory.loss_tokens out."
            )
        check_spread(config, tensor_ranks, schedule.num_ranks, options)
        _check_spread_embedding(anatomy, schedule)
    model = FlopEstimate(config, anatomy, seq_len, has_head=not spreads, whole=whole)
    model.uses_randomness |= draws
    layers, anatomy = assign_layers(model, options.partition, schedule.placement)
    memory = options.memory
    most = max(len(stage.layers) for stage in layers)
    recompute = RecomputePolicy.parse(memory.recompute, most, is_checked=memory.check_recompute)
    # An untied embedding stays whole, which is faster: its output needn't travel.
    embeds = spreads and bool(anatomy.tied)
    layout = StageLayout(
        schedule,
        layers,
        recompute,
        offload=memory.offload,
        reduces=reduces,
        spreads_vocabulary=spreads,
        spreads_embedding=embeds,
        context_on_host=host_share(memory.context),
        has_wide_sums=memory.context_gradients == "wide",
    )
    _check_sharding(anatomy, tensor_ranks, options)
    check_context(anatomy, options, f"model_type {config.model_type!r}")
    if memory.loss_tokens is not None:
        if options.parallel.sequence_parallel and tensor_ranks > 1:
            raise SlipstreamError(
                f"memory.loss_tokens={memory.loss_tokens} with parallel.sequence_parallel=true, where ranks share the "
                "tokens before the head. Leave one of the two out."
            )
        check_tiled_head(config)
    return layout, anatomy


def check_context(anatomy: ModelAnatomy, options: PipelineOptions, what: str) -> None:
    """Raises SlipstreamError where layers read all earlier keys and values by code of their own, and these are to lie
    on the host; `what` has that code."""
    context = options.memory.context
    if host_share(context) and (refusal := host_context_refusal(anatomy, what)):
        raise SlipstreamError(f"memory.context={context!r}: {refusal}. Use memory.context='device'.")


def host_context_refusal(anatomy: ModelAnatomy, what: str) -> str:
    """Returns why keys and values can't lie on the host; "" where they can."""
    if not anatomy.attends_itself:
        return ""
    return f"{what} attends by code of its own, which reads the keys and values of all earlier tokens at once"


def check_spread(config: PretrainedConfig, tensor_ranks: int, num_ranks: int, options: PipelineOptions) -> None:
    """Raises SlipstreamError, the same on every rank, for options that a spread head doesn't allow."""
    problems = {
        "loss_fn=...": (options.loss_fn is not None, "no rank has all logits"),
        f"tp={tensor_ranks} in the mesh": (tensor_ranks > 1, "tensor ranks share the vocabulary already"),
        "parallel.shard='parameters'": (options.parallel.shard == "parameters", "rows of rows aren't gathered"),
        # Either makes the other "auto" where that is open.
        "schedule='auto' or slices='auto'": (
            options.schedule in AUTOMATIC or options.slices == "auto",
            "the parts of the head aren't measured",
        ),
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
    """Raises SlipstreamError, the same on every rank, for options that sharded parameters would make inexact."""
    if options.parallel.shard != "parameters":
        return
    if tensor_ranks > 1:
        raise SlipstreamError(
            f"parallel.shard='parameters' on a mesh with tp={tensor_ranks}: gradients that are partial on tensor "
            "ranks would not be added up. Use tp=1, or parallel.shard='optimizer'."
        )
    if anatomy.tied:
        raise SlipstreamError(
            f"parallel.shard='parameters' with {anatomy.tied[0][0]} tied to {anatomy.tied[0][1]}: the two shards "
            "would be updated separately. Use parallel.shard='optimizer', or a model with tie_word_embeddings=False."
        )


def assign_layers(
    model: FlopEstimate, partition: str | Sequence[float], placement: Sequence[int]
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
    if cut := [edge.layer for stage in layers for edge in stage if isinstance(edge, HalfLayer)]:
        if reason := model.anatomy.obstacle(f"{model.anatomy.layers}.{layer}" for layer in cut):
            raise SlipstreamError(f"partition={list(counts)} cuts a layer in half: {reason}. Give whole layers there.")
        halves = halves or find_halves(model.config, model.anatomy)
    elif model.uses_randomness:
        halves = halves or halves_or_none(model.config, model.anatomy)
    separate_ends = frozenset(edge for stage in layers for edge in stage if isinstance(edge, ModelEnd))
    return layers, replace(model.anatomy, halves=halves, separate_ends=separate_ends)


def _balanced(model: FlopEstimate, placement: Sequence[int]) -> tuple[list[float], tuple[LayerPart, ...]]:
    """Returns whole numbers of layers, unless halves make the slowest rank clearly faster and the model allows them."""
    costs = model.costs()
    whole = partition_layers(costs, len(placement), placement=placement)
    slowest = _slowest_rank(costs, whole, placement)
    if sum(costs) / len(set(placement)) > WORTH_CUTTING * slowest:
        # Even perfectly balanced ranks wouldn't gain enough.
        return [*whole], ()
    halves = halves_or_none(model.config, model.anatomy)
    if halves and not model.anatomy.kept_whole:
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


def load_layers(
    source: WeightSource, anatomy: ModelAnatomy, layers: list[StagePart], options: PipelineOptions, with_head: bool
) -> PreTrainedModel:
    """Returns the layers; `with_head`, with the whole head too and an embedding that is tied to it, of which this
    process then keeps some rows."""
    if with_head:
        layers = [*layers, ModelEnd.HEAD]
        anatomy = replace(anatomy, separate_ends=anatomy.separate_ends | {ModelEnd.HEAD})
    dtype = torch_dtype(options.precision.dtype)
    model = source.load(anatomy, layers, dtype)
    if dtype is not None:
        # Buffers such as rope's frequencies keep their dtype, as when transformers loads a model.
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    # Kernels are fused before the model is cut, so that its stages share them.
    if options.runtime.fused:
        fuse_kernels(model)
    return model


def spread_heads(
    model: PreTrainedModel, names: HeadNames, schedule: Schedule, here: Sequence[int]
) -> dict[int, SpreadHead]:
    """Returns the part of the head of each of these stages: an equal number of rows on every rank, or nothing."""
    name, tied = names
    head = model.get_submodule(name)
    if is_wrapper(head):
        raise SlipstreamError(
            f"{name} has an adapter or a trained copy, so its rows can't be spread over the ranks. "
            "Give vocabulary='whole'."
        )
    assert isinstance(head, nn.Linear)
    parts = enumerate(schedule.vocabulary_stages)
    ids = {g: range(*part_bounds(head.out_features, schedule.num_ranks, rank)) for rank, g in parts if g in here}
    rows = HeadRows.of_stages(head, ids, model.get_submodule(tied) if tied else None)
    return {g: SpreadHead(name, rows.get(g), tied) for g in here}


def check_options(
    config: PretrainedConfig,
    options: PipelineOptions,
    num_ranks: int,
    tensor_ranks: int,
    is_planned: bool,
    section: str = "",
) -> None:
    """Checks options before there are ranks, by the functions with which every rank lays itself out.

    Args:
        config: the model's.
        options: of the Pipeline that is to be made.
        num_ranks: of the pipeline.
        tensor_ranks: that share each layer.
        is_planned: whether a plan decides all that one can.
        section: before the options' names in messages, such as "pipeline.".

    Raises:
        SlipstreamError: where they don't fit together.
    """
    usual = StepSettings(options, num_ranks).usual
    anatomy = find_anatomy(config)
    laid_out = options
    if options.vocabulary == "spread" and is_planned:
        planned_vocabulary(config, anatomy, num_ranks, tensor_ranks, options)
        laid_out = replace(options, vocabulary="whole")
    plan_layout(config, anatomy, usual.schedule, usual.slices, laid_out, tensor_ranks)
    find_router_loss(config, options.router_loss, tensor_ranks, f"{section}router_loss")


def planned_vocabulary(
    config: PretrainedConfig, anatomy: ModelAnatomy, num_ranks: int, tensor_ranks: int, options: PipelineOptions
) -> str:
    """Returns where a plan has the head's rows by the options, OPEN where it may choose.

    Raises SlipstreamError where they ask for "spread" and it can't be.
    """
    if options.vocabulary == "whole":
        return "whole"
    try:
        # The plan decides the order and the slices, so the check is of the vocabulary alone.
        planned = replace(options, schedule="1f1b", slices=1)
        check_spread(config, tensor_ranks, num_ranks, planned)
        find_spreadable_head(config, anatomy)
    except SlipstreamError:
        if options.vocabulary == "spread":
            raise
        return "whole"
    return "spread" if options.vocabulary == "spread" else OPEN


def find_router_loss(
    config: PretrainedConfig, asked: str, tensor_ranks: int, setting: str = "router_loss"
) -> RouterLoss | None:
    """Returns the routers' part of the loss, None where it isn't asked for; users ask for it by `setting`.

    Raises SlipstreamError where the configuration asks for the loss of all layers together, where the architecture has
    none, and with ranks that share layers.
    """
    if asked == "none":
        check_router_loss(config, setting)
        return None
    if tensor_ranks > 1:
        raise SlipstreamError(
            f"{setting}='per_layer' isn't computed where {tensor_ranks} ranks share each layer (tensor parallelism). "
            "Use tp=1, or leave it out."
        )
    return RouterLoss.of(meta_model(config), setting)
