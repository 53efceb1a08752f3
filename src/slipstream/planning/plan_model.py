"""`slipstream.plan`: from any model and a cluster, or a profile, to the best configurations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import PretrainedConfig

from slipstream.errors import SlipstreamError
from slipstream.planner import Plan
from slipstream.planner.costs import (
    AnalyticSource,
    Cluster,
    ModelCount,
    Profile,
    ProfileSource,
    load_cluster,
    load_profile,
)
from slipstream.planner.search import check_count, make_options, search_plans
from slipstream.planning.model_source import model_config, model_name
from slipstream.profiler import count_model, identify_model, newest_costs

_DTYPE = "bfloat16"

Model: TypeAlias = str | Path | PretrainedConfig | ModelCount


def plan(
    model: Model,
    cluster: str | Path | Cluster | None = None,
    *,
    seq_len: int,
    global_batch: int,
    dtype: str | None = None,
    num_nodes: int | None = None,
    num_ranks: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> Plan:
    """Returns the best configurations to train a model on a cluster, best first, as the simulator ranks them.

    Args:
        model: a transformers configuration; a folder or hub name; a .json or .yaml file with a transformers
            configuration, or a training configuration with a `model` section; or a counted model.
        cluster: the name of a shipped cluster, a file that describes one, a Cluster, or a file that `slipstream
            profile` wrote, whose measurements are then used instead. None: the newest measurements that a run on this
            machine has kept.
        seq_len: tokens of a sequence.
        global_batch: sequences of a step, on all devices together.
        dtype: the dtype in which the model computes. Default: bfloat16, or with a profile the dtype that was profiled.
        num_nodes: nodes of the cluster. Default: as many as its description says.
        num_ranks: with a profile, the ranks of the pipeline. Default: as many processes as were profiled.
        progress: called with what is being done, how many are done, and out of how many (0 where that is unknown).
        **options: the values that a choice may take, such as `tensor_parallel=[1, 2]` or `schedule="1f1b"`;
            `memory_limit`, in bytes of a device; `num_simulated`, `num_best`: the fields of `slipstream.PlanOptions`.

    Raises:
        SlipstreamError: for input that can't be used, where nothing divides the batch, and where nothing fits the
            memory: by how much, on which rank, and the cheapest change with which something would fit.
    """
    allowed = make_options(**options)
    for name, value in {"seq_len": seq_len, "global_batch": global_batch}.items():
        check_count(name, value)
    profile = _profile_of(model, cluster, seq_len, dtype, num_ranks)
    if profile is None:
        assert cluster is not None
        if num_ranks is not None:
            raise SlipstreamError(f"num_ranks={num_ranks} is for a profile; a cluster has nodes: give num_nodes.")
        source: AnalyticSource | ProfileSource = _analytic_source(model, cluster, seq_len, dtype, num_nodes)
    elif num_nodes is not None:
        raise SlipstreamError(f"num_nodes={num_nodes} is for a cluster; with a profile give num_ranks.")
    else:
        source = _profile_source(model, profile, seq_len, dtype, num_ranks)
    return search_plans(source, seq_len, global_batch, options=allowed, progress=progress)


def _profile_of(
    model: Model, cluster: str | Path | Cluster | None, seq_len: int, dtype: str | None, num_ranks: int | None
) -> Profile | None:
    """Returns the profile that is given, or kept where nothing is given; None for a cluster."""
    if cluster is not None:
        path = _profile_path(cluster)
        return None if path is None else load_profile(path)
    if isinstance(model, ModelCount):
        raise SlipstreamError("a counted model needs a cluster, such as h100-dgx.")
    return newest_costs(model_config(model, seq_len), seq_len, dtype, num_ranks)


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
    model: Model, profile: Profile, seq_len: int, dtype: str | None, num_ranks: int | None
) -> ProfileSource:
    if isinstance(model, ModelCount):
        raise SlipstreamError("a profile needs the model it was measured for: give its configuration, folder or name.")
    profile.check(identify_model(model_config(model, seq_len)), dtype)
    return ProfileSource(profile, profile.hardware.processes if num_ranks is None else num_ranks)


def _analytic_source(
    model: Model, cluster: str | Path | Cluster, seq_len: int, dtype: str | None, num_nodes: int | None
) -> AnalyticSource:
    described = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    if num_nodes is not None:
        described = described.with_nodes(check_count("num_nodes", num_nodes))
    if isinstance(model, ModelCount):
        if dtype not in (None, model.dtype):
            raise SlipstreamError(f"dtype={dtype!r}, but the model was counted in {model.dtype}: count it again.")
        return AnalyticSource(model, described, "counted model")
    dtype = dtype or _DTYPE
    described.device.matmul_flops(dtype, 1)  # raises where the dtype has no peak, before the model is counted
    config = model_config(model, seq_len)
    return AnalyticSource(count_model(config, seq_len, _torch_dtype(dtype)), described, model_name(model, config))


def _torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise SlipstreamError(f"models can't be counted in dtype={name!r}; choose float32, bfloat16 or float16.")
    return found
