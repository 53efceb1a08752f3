"""`slipstream.plan`: from any model and a cluster, or a profile, to the best configurations."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias

import torch
import yaml
from transformers import PretrainedConfig

from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.model import check_length, config_from_settings, load_config
from slipstream.planner import Plan
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
from slipstream.planner.search import PlanOptions, search_plans
from slipstream.profiler import count_model, identify_model
from slipstream.schedule import GENERATORS

_FILES = (".yaml", ".yml", ".json")
DTYPE = "bfloat16"
_LEAST_MEMORY = 1e6  # bytes; less were meant as gigabytes
_NAMES = {"schedule": tuple(GENERATORS), "recompute": ("none", "selective", "full")}
_COUNTS = {"tensor_parallel", "pipeline_parallel", "data_parallel", "stages_per_rank", "microbatch_size", "num_slices"}

Model: TypeAlias = str | Path | PretrainedConfig | ModelCount


def plan(
    model: Model,
    cluster: str | Path | Cluster,
    *,
    seq_len: int,
    global_batch: int,
    dtype: str | None = None,
    num_nodes: int | None = None,
    num_ranks: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> Plan:
    """The best configurations to train a model on a cluster, best first, each judged by the simulator.

    Args:
        model: a transformers configuration; a folder or hub name; a .json or .yaml file with a transformers
            configuration, or a training configuration with a `model` section; or a counted model.
        cluster: a shipped cluster's name, a file that describes one, a Cluster, or a file that `slipstream profile`
            wrote: then its measurements count instead.
        seq_len: tokens of a sequence.
        global_batch: sequences of a step, on all devices together.
        dtype: what the model computes in. Default: bfloat16, and with a profile what was profiled.
        num_nodes: nodes of the cluster, if not those it is described with.
        num_ranks: with a profile, the ranks of the pipeline. Default: as many processes as were profiled.
        progress: called with what is being done, how many are done, and of how many (0: not known).
        **options: which values a choice may take, as `tensor_parallel=[1, 2]` or `schedule="1f1b"`; `memory_limit`,
            bytes of a device; `num_simulated`, `num_best`: see `slipstream.planner.search.plan_space.PlanOptions`.

    Raises:
        SlipstreamError: for input that can't be used, where nothing divides the batch, and where nothing fits: by how
            much, on which rank, and the cheapest change with which it would.
    """
    allowed = make_options(**options)
    for name, value in (("seq_len", seq_len), ("global_batch", global_batch)):
        if value < 1:
            raise SlipstreamError(f"{name}={value}: give a whole number of 1 or more.")
    source = _source(model, cluster, seq_len, dtype, num_nodes, num_ranks)
    return search_plans(source, seq_len, global_batch, options=allowed, progress=progress)


# --- the model -------------------------------------------------------------------------------------------------------


def model_section(model: Model) -> dict[str, Any]:
    """What a training configuration's `model` section says of it: a path or a config.

    Raises SlipstreamError for a file that can't be read or says nothing of a model, and for a ModelCount.
    """
    if isinstance(model, ModelCount):
        raise SlipstreamError("a counted model can't be trained; give its transformers configuration, folder or name.")
    if isinstance(model, PretrainedConfig):
        return {"config": {"model_type": model.model_type, **model.to_diff_dict()}}
    path = Path(model)
    if path.suffix not in _FILES:
        return {"path": str(model)}
    values = _read(path)
    if "model_type" in values:
        return {"config": values}
    section = values.get("model")
    if not isinstance(section, dict) or not {"path", "config"} & section.keys():
        raise SlipstreamError(
            f"{path} describes no model: give a transformers configuration with a model_type (a config.json), or a "
            "training configuration whose model section has a path or a config."
        )
    return section


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise SlipstreamError(f"can't read the model's configuration {path}: {error.strerror}.") from error
    except (ValueError, yaml.YAMLError) as error:
        raise SlipstreamError(f"{path} isn't valid {path.suffix[1:].upper()}: {error}.") from error
    return values if isinstance(values, dict) else {}


def _config(model: str | Path | PretrainedConfig) -> PretrainedConfig:
    if isinstance(model, PretrainedConfig):
        return model
    section = model_section(model)
    if section.get("path") is not None:
        return load_config(str(section["path"]))
    return config_from_settings(section["config"], str(model))


def _name(model: str | Path | PretrainedConfig, config: PretrainedConfig) -> str:
    """What the model is called: its file or folder, or its architecture and size."""
    text = config.get_text_config()
    shape = f"{config.model_type}, {text.num_hidden_layers} layers of {text.hidden_size}"
    return shape if isinstance(model, PretrainedConfig) else f"{model} ({shape})"


# --- where costs come from -------------------------------------------------------------------------------------------


def _source(
    model: Model,
    cluster: str | Path | Cluster,
    seq_len: int,
    dtype: str | None,
    num_nodes: int | None,
    num_ranks: int | None,
) -> CostSource:
    profile = None if isinstance(cluster, Cluster) else find_profile(cluster)
    if profile is not None:
        return _profiled(model, profile, seq_len, dtype, num_nodes, num_ranks)
    if num_ranks is not None:
        raise SlipstreamError(f"num_ranks={num_ranks} is for a profile; a cluster has nodes: give num_nodes.")
    described = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    if num_nodes is not None and num_nodes < 1:
        raise SlipstreamError(f"num_nodes={num_nodes}: give a whole number of 1 or more.")
    described = described if num_nodes is None else described.with_nodes(num_nodes)
    if isinstance(model, ModelCount):
        if dtype not in (None, model.dtype):
            raise SlipstreamError(f"dtype={dtype!r}, but the model was counted in {model.dtype}: count it again.")
        return AnalyticSource(model, described, "counted model")
    dtype = dtype or DTYPE
    described.device.matmul_flops(dtype, 1)  # before the model is counted: says so where the dtype has no peak
    config = _config(model)
    check_length(config, seq_len, "seq_len")
    return AnalyticSource(count_model(config, seq_len, _torch_dtype(dtype)), described, _name(model, config))


def _profiled(
    model: Model, profile: Profile, seq_len: int, dtype: str | None, num_nodes: int | None, num_ranks: int | None
) -> CostSource:
    if num_nodes is not None:
        raise SlipstreamError(f"num_nodes={num_nodes} is for a cluster; with a profile give num_ranks.")
    if isinstance(model, ModelCount):
        raise SlipstreamError("a profile needs the model it was measured for: give its configuration, folder or name.")
    config = _config(model)
    check_length(config, seq_len, "seq_len")
    profile.check(model=identify_model(config), dtype=dtype)
    return ProfileSource(profile, profile.hardware.processes if num_ranks is None else num_ranks, None)


def find_profile(cluster: str | Path) -> Profile | None:
    """The profile in a file; None where it is a cluster's name or description."""
    path = Path(cluster)
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return None  # reading it as a cluster says what is wrong
    return None if isinstance(values, dict) and "device" in values else load_profile(path)


def _torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise SlipstreamError(
            f"dtype={name!r} isn't one that models are counted in; choose float32, bfloat16, float16."
        )
    return found


# --- options ---------------------------------------------------------------------------------------------------------


def make_options(**values: Any) -> PlanOptions:
    """What may be chosen; one value or several for each choice. SlipstreamError suggests what was meant."""
    names = [field.name for field in fields(PlanOptions)]
    for name in values:
        if name not in names:
            known = ", ".join(names)
            raise SlipstreamError(f"there is no option {name!r}{did_you_mean(name, names)} The options are {known}.")
    given = {name: value for name, value in values.items() if value is not None}
    return PlanOptions(**{name: _checked(name, value) for name, value in given.items()})


def _checked(name: str, value: Any) -> Any:
    if name == "memory_limit":
        return _memory(value)
    if name in ("num_simulated", "num_best"):
        return _count(name, value)
    several = isinstance(value, Sequence) and not isinstance(value, str)
    return tuple(_checked_one(name, each) for each in (value if several else (value,)))


def _checked_one(name: str, value: Any) -> Any:
    if name in _COUNTS:
        return _count(name, value)
    if name in _NAMES and value not in _NAMES[name]:
        known = ", ".join(_NAMES[name])
        raise SlipstreamError(
            f"{name}={value!r} isn't known{did_you_mean(str(value), _NAMES[name])} Choose one of {known}."
        )
    if name == "offload" and not (isinstance(value, (int, float)) and 0 <= value <= 1):
        raise SlipstreamError(f"offload={value!r}: give the share of slices that is offloaded, 0 to 1.")
    if name == "shard_optimizer" and not isinstance(value, bool):
        raise SlipstreamError(f"shard_optimizer={value!r}: give True or False.")
    return value


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SlipstreamError(f"{name}={value!r}: give a whole number of 1 or more.")
    return value


def _memory(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= _LEAST_MEMORY:
        meant = f": type {value:g}e9 if gigabytes were meant" if isinstance(value, (int, float)) and value > 0 else ""
        raise SlipstreamError(f"memory_limit={value!r} is implausible, it is in bytes{meant}.")
    return float(value)
