"""Loads the layers of a causal LM that a process has, and says how their weights are cut over ranks that share them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from slipstream.errors import SlipstreamError
from slipstream.model import (
    ModelAnatomy,
    ModelEnd,
    StagePart,
    fuse_kernels,
    meta_model,
)
from slipstream.model.adapters import Adapter, adapted_model, is_wrapper
from slipstream.model.vocabulary import HeadNames, HeadRows, SpreadHead, TiedRows
from slipstream.parallel import part_bounds
from slipstream.parallel.tensor import TensorPlan, adapted_plan, find_tensor_plan
from slipstream.pipeline.pipeline_options import PipelineOptions, torch_dtype
from slipstream.pipeline.weights import WeightSource
from slipstream.schedule import Schedule


def plan_shares(
    config: PretrainedConfig,
    anatomy: ModelAnatomy,
    tensor_ranks: int,
    tensor_plan: Mapping[str, str] | None,
    adapter: Adapter | None = None,
) -> TensorPlan:
    """Returns how the whole model is cut over tensor ranks. Raises SlipstreamError that names what can't be."""
    plan = find_tensor_plan(meta_model(config), config, tensor_ranks, anatomy, tensor_plan)
    if adapter is None:
        return plan
    return adapted_plan(plan, adapted_model(meta_model(config), adapter).get_base_model())


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
        for parameter in model.parameters():  # rope's frequencies keep theirs, as when transformers loads a model
            parameter.data = parameter.data.to(dtype)
    if options.runtime.fused:  # before it is cut into stages, which then share kernels
        fuse_kernels(model)
    return model


def spread_heads(
    model: PreTrainedModel, names: HeadNames, schedule: Schedule, here: Sequence[int]
) -> dict[int, SpreadHead]:
    """Returns what each of these stages has of the head: an equal number of rows on every rank, or nothing."""
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
    rows = TiedRows.of_both(head, model.get_submodule(tied), ids) if tied else HeadRows.of_stages(head, ids)
    return {g: SpreadHead(name, rows.get(g), tied) for g in here}
