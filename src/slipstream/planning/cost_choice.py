"""The costs that a plan or a timeline rests on: of described hardware, from a profile, or measured here and kept."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import PretrainedConfig

from slipstream.errors import SlipstreamError
from slipstream.model import meta_model
from slipstream.model.adapters import (
    ALL_WEIGHTS,
    Adapter,
    TrainedWeights,
    check_method,
    find_frozen,
    find_targets,
)
from slipstream.planner.costs import (
    AnalyticSource,
    Cluster,
    CostSource,
    ModelCount,
    Profile,
    ProfileSource,
    load_cluster,
    load_profile,
)
from slipstream.planner.search import check_count
from slipstream.planning.model_source import frozen_patterns, model_config, model_name
from slipstream.profiler import count_model, identify_model, newest_costs

_DTYPE = "bfloat16"

Model: TypeAlias = str | Path | PretrainedConfig | ModelCount


def choose_costs(
    model: Model,
    cluster: str | Path | Cluster | None,
    *,
    seq_len: int,
    dtype: str | None = None,
    num_nodes: int | None = None,
    num_ranks: int | None = None,
    tensor_parallel: Collection[int] | None = None,
    freeze: Sequence[str] = (),
    lora: Any = None,
) -> CostSource:
    """Returns what a model's parts cost; the arguments are those of `slipstream.plan`.

    Raises:
        SlipstreamError: for input that can't be used, and where nothing is kept of this model.
    """
    freeze = freeze or frozen_patterns(model)
    if (freeze or lora is not None) and not _is_counted_on(cluster):
        given = "lora" if lora is not None else f"freeze={[*freeze]}"
        raise SlipstreamError(
            f"{given} with measured costs, which are those of training all weights. Name a cluster such as h100-dgx, "
            "or leave schedule, slices and partition out of a configuration: `slipstream train` then plans by itself."
        )
    if cluster is None:
        if isinstance(model, ModelCount):
            raise SlipstreamError("a counted model needs a cluster, such as h100-dgx.")
        kept = newest_costs(model_config(model, seq_len), seq_len, dtype, num_ranks, tensor_parallel)
        return _profile_source(model, kept, seq_len, dtype, num_nodes, num_ranks)
    path = _profile_path(cluster)
    if path is not None:
        return _profile_source(model, load_profile(path), seq_len, dtype, num_nodes, num_ranks)
    if num_ranks is not None:
        raise SlipstreamError(f"num_ranks={num_ranks} is for a profile; a cluster has nodes: give num_nodes.")
    assert cluster is not None
    return _analytic_source(model, cluster, seq_len, dtype, num_nodes, freeze, lora)


def _is_counted_on(cluster: str | Path | Cluster | None) -> bool:
    """Returns whether costs are computed for a described cluster."""
    return cluster is not None and _profile_path(cluster) is None


def _profile_path(cluster: str | Path | Cluster) -> Path | None:
    """Returns the file of a profile; None where this is a cluster, or a cluster's name or description."""
    if isinstance(cluster, Cluster) or Path(cluster).suffix != ".json":
        return None
    try:
        values = json.loads(Path(cluster).read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return None  # the error is raised where it is read as a cluster
    return None if isinstance(values, dict) and "device" in values else Path(cluster)


def _profile_source(
    model: Model, profile: Profile, seq_len: int, dtype: str | None, num_nodes: int | None, num_ranks: int | None
) -> ProfileSource:
    if num_nodes is not None:
        raise SlipstreamError(f"num_nodes={num_nodes} is for a cluster; with a profile give num_ranks.")
    if isinstance(model, ModelCount):
        raise SlipstreamError("a profile needs the model it was measured for: give its configuration, folder or name.")
    profile.check(identify_model(model_config(model, seq_len)), dtype)
    measured = profile.hardware.processes // profile.tensor_parallel
    return ProfileSource(profile, measured if num_ranks is None else num_ranks)


def _analytic_source(
    model: Model,
    cluster: str | Path | Cluster,
    seq_len: int,
    dtype: str | None,
    num_nodes: int | None,
    freeze: Sequence[str],
    lora: Any,
) -> AnalyticSource:
    described = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    if num_nodes is not None:
        described = described.with_nodes(check_count("num_nodes", num_nodes))
    if isinstance(model, ModelCount):
        if freeze or lora is not None:
            raise SlipstreamError("a counted model says itself what is trained; leave freeze and lora out.")
        if dtype not in (None, model.dtype):
            raise SlipstreamError(f"dtype={dtype!r}, but the model was counted in {model.dtype}: count it again.")
        return AnalyticSource(model, described, "counted model")
    dtype = dtype or _DTYPE
    described.device.matmul_flops(dtype, 1)  # raises where the dtype has no peak, before the model is counted
    config = model_config(model, seq_len)
    count = count_model(config, seq_len, _torch_dtype(dtype), _trained_weights(config, freeze, lora))
    return AnalyticSource(count, described, model_name(model, config))


def _trained_weights(config: PretrainedConfig, freeze: Sequence[str], lora: Any) -> TrainedWeights:
    """Returns what is trained. Raises SlipstreamError for patterns or an adapter that don't fit the model."""
    if lora is None:
        return TrainedWeights(find_frozen(meta_model(config), freeze)) if freeze else ALL_WEIGHTS
    if freeze:
        raise SlipstreamError(
            f"freeze={[*freeze]} with lora, which freezes all weights: leave freeze out, and choose layers by "
            "layers_to_transform."
        )
    check_method(lora)
    find_targets(meta_model(config), lora)
    return TrainedWeights(adapter=Adapter("default", lora))


def _torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise SlipstreamError(f"models can't be counted in dtype={name!r}; choose float32, bfloat16 or float16.")
    return found
