"""The layout of a causal LM from a Pipeline's options: preflight and every rank check it by `plan_layout`."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PretrainedConfig

from slipstream.errors import SlipstreamError
from slipstream.model import ModelAnatomy
from slipstream.model.saving import RecomputePolicy
from slipstream.pipeline.families.causal_lm_partition import assign_layers
from slipstream.pipeline.families.stage_layout import StageLayout, check_lengths
from slipstream.pipeline.pipeline_options import PipelineOptions
from slipstream.schedule import Schedule


def plan_layout(
    config: PretrainedConfig,
    anatomy: ModelAnatomy,
    schedule: Schedule,
    slices: int | Sequence[int],
    options: PipelineOptions,
    tensor_ranks: int = 1,
    reduces: bool = False,
) -> tuple[StageLayout, ModelAnatomy]:
    """Returns the layout, and the anatomy with `halves` if they are needed.

    Raises SlipstreamError, with what was given, allowed, and to type, where the options don't fit together.
    """
    check_lengths(schedule, slices)
    seq_len = options.seq_len
    if seq_len is None and not isinstance(slices, int):
        seq_len = sum(slices)
    layers, anatomy = assign_layers(config, anatomy, options.partition, schedule.placement, seq_len)
    recompute = RecomputePolicy.parse(options.memory.recompute, max(len(stage.layers) for stage in layers))
    layout = StageLayout.of(schedule, layers, recompute, options.memory.offload, reduces)
    _check_sharding(anatomy, tensor_ranks, options)
    return layout, anatomy


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
