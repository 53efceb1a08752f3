"""Makes a rank's part of a causal LM: its stages, cut over the ranks that share them, and their loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model import (
    CausalLMStage,
    ModelAnatomy,
    check_sliceable,
    copy_with_shared_weights,
    fuse_kernels,
    meta_model,
)
from slipstream.options import Parallelism
from slipstream.parallel.tensor import TensorParallel, TensorPlan, find_tensor_plan, vocabulary_cross_entropy
from slipstream.pipeline.batch import IGNORED
from slipstream.pipeline.families.loss import causal_cross_entropy
from slipstream.pipeline.families.stage_layout import StageLayout
from slipstream.pipeline.families.tensor_parallel_check import check_tensor_parallel
from slipstream.pipeline.families.weight_source import WeightSource, cast
from slipstream.pipeline.pipeline_options import LossFunction, PipelineOptions
from slipstream.pipeline.ranks import Ranks


def check_architecture(config: PretrainedConfig, ranks: Ranks, parallel: Parallelism) -> None:
    """Collective: a toy of the architecture, sliced and whole, and cut over the ranks that share layers and whole."""
    error = None
    if ranks.leads:
        try:
            check_sliceable(config)
        except SlipstreamError as found:
            error = found
    ranks.agree(error)
    if ranks.tensor.size > 1:
        check_tensor_parallel(config, parallel.tensor_plan, ranks.tensor, parallel.sequence_parallel)


def load_shares(
    source: WeightSource,
    anatomy: ModelAnatomy,
    layout: StageLayout,
    ranks: Ranks,
    options: PipelineOptions,
) -> tuple[PreTrainedModel, TensorParallel | None]:
    """The layers of this process's stages; of every weight this rank's share, where several ranks share them."""
    here = layout.stages_of(ranks.here(layout.num_ranks))
    model = source.load(anatomy, [layer for stage in here for layer in layout.layers[stage]])
    if options.dtype is not None:
        cast(model, options.dtype)
    if options.runtime.fused:  # before it is cut into stages, which then share kernels
        fuse_kernels(model)
    if ranks.tensor.size == 1:
        return model, None
    parallel = options.parallel
    plan = plan_shares(source.config, anatomy, ranks.tensor.size, parallel.tensor_plan)
    tensor = TensorParallel(plan, ranks.tensor, parallel.sequence_parallel)
    tensor.shard(model)
    return model, tensor


def plan_shares(
    config: PretrainedConfig, anatomy: ModelAnatomy, tensor_ranks: int, tensor_plan: Mapping[str, str] | None
) -> TensorPlan:
    """Returns how the whole model is cut over tensor ranks. Raises SlipstreamError that names what can't be."""
    return find_tensor_plan(meta_model(config), config, tensor_ranks, anatomy.before, anatomy.after, tensor_plan)


def make_stages(
    model: PreTrainedModel,
    anatomy: ModelAnatomy,
    layout: StageLayout,
    ranks: Ranks,
    device: torch.device,
    tensor: TensorParallel | None,
) -> dict[int, CausalLMStage]:
    """Returns the stages of this process, each with some layers of `model`."""
    here = layout.stages_of(ranks.here(layout.num_ranks))
    return {
        stage: CausalLMStage(copy_with_shared_weights(model), anatomy, layout.layers[stage], device, tensor)
        for stage in here
    }


def choose_loss(given: LossFunction | None, ranks: Ranks, tensor: TensorParallel | None) -> LossFunction:
    """The one given, else cross-entropy: over the whole vocabulary, of which a rank may have a part."""
    if tensor is None:
        return given or causal_cross_entropy
    if given is not None:
        raise SlipstreamError(
            "loss_fn with tensor parallelism: no rank has all logits, only those of its part of the vocabulary. "
            "Leave it out for cross-entropy, or use a mesh with tp=1."
        )
    return vocabulary_cross_entropy(ranks.tensor, tensor.first_id, IGNORED)
