"""`slipstream.plan`: from a model and a cluster, or a profile, to the best configurations, and their costs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from transformers import PretrainedConfig

from slipstream.cluster_plans.described_model import DescribedModel
from slipstream.cluster_plans.gpus_here import gpu_names, gpus_here
from slipstream.cost import (
    SHIPPED,
    Cluster,
    CostSource,
    CountedSource,
    ModelCount,
    Profile,
    ProfileSource,
    load_cluster,
    load_profile,
)
from slipstream.errors import SlipstreamError
from slipstream.foreign_text import parse_json, read_text
from slipstream.model import (
    ALL_WEIGHTS,
    Adapter,
    TrainedWeights,
    check_base_precision,
    check_length,
    check_method,
    check_parallel,
    check_quantisable,
    find_anatomy,
    find_frozen,
    find_spreadable_head,
    find_targets,
    meta_model,
    torch_dtype,
)
from slipstream.number_format import BFLOAT16, FLOAT16, BasePrecision, find_format
from slipstream.options import SHARED_WORK
from slipstream.parallel import possible_sharing
from slipstream.planner import Plan, PlanReport
from slipstream.planner.find_plan import find_plan
from slipstream.planner.progress import ProgressReport, untold
from slipstream.planner.search import ClusterProblem, PlanOptions, PlanSpace, check_count
from slipstream.profile import count_model, identify_model, newest_costs


def plan(
    model: Model,
    cluster: str | Path | Cluster | None = None,
    *,
    seq_len: int,
    global_batch: int,
    dtype: str | None = None,
    num_nodes: int | None = None,
    devices: int | None = None,
    num_ranks: int | None = None,
    freeze: Sequence[str] = (),
    lora: Any = None,
    lora_base_precision: BasePrecision = "full",
    fused: bool = False,
    progress: ProgressReport | None = None,
    **options: Any,
) -> PlanReport:
    """Returns the best configurations to train a model on a cluster, as the simulator ranks them: the simplest of those
    that take about as long as the shortest, then the others, the shorter the earlier.

    Args:
        model: a transformers configuration; a folder or hub name; a .json or .yaml file with a transformers
            configuration, or a training configuration with a `model` section; a described or a counted model.
        cluster: the name of a shipped cluster, a file that describes one, a Cluster, or a file that `slipstream
            profile` wrote, whose measurements are then used instead. None: the newest measurements that a run on this
            machine has kept; without any, or where they can't serve, this machine's GPUs as a shipped cluster
            describes them.
        seq_len: tokens of a sequence.
        global_batch: sequences of a step, on all devices together.
        dtype: the dtype in which the model computes. Default: bfloat16, float16 where the cluster's devices have no
            bfloat16, or with a profile the dtype that was profiled.
        num_nodes: nodes of the cluster. Default: one of a named cluster, or where `devices` are given; else as many as
            the file or the Cluster says.
        devices: devices in all, an equal number of each node's. Default: all of the nodes.
        num_ranks: with a profile, the ranks of the pipeline. Default: as many processes as were profiled.
        freeze: patterns of names of parameters that aren't trained. Default: `model.freeze` of a training
            configuration.
        lora: a `peft.LoraConfig`: an adapter is trained, and all of the model's weights are frozen.
        lora_base_precision: "nf4" where those are kept in 4 bits, as by `Pipeline.from_pretrained`.
        fused: whether norms, activations and rotary embeddings are fused kernels (`runtime.fused`), on a described
            cluster. Tensor-parallel ranks share repeated work by tokens there, where the model allows it.
        progress: called with the current task, how many are done, and out of how many (0 where that is unknown).
        **options: the values that a choice may take, such as `tensor_parallel=[1, 2]` or `schedule="1f1b"`;
            `memory_limit`, in bytes of a device, and `host_memory_limit`, of its host; `num_simulated`, `num_best`: the
            fields of `slipstream.PlanOptions`.

    Raises:
        SlipstreamError: for input that can't be used, where nothing divides the batch, and where nothing fits the
            memory: by how much, on which rank, and the cheapest change with which something would fit.
    """
    allowed = PlanOptions(**options)
    for name, value in {"seq_len": seq_len, "global_batch": global_batch}.items():
        check_count(name, value)
    if not isinstance(model, (DescribedModel, ModelCount)):
        model = DescribedModel(model)
    find_source = partial(
        choose_costs,
        model,
        cluster,
        seq_len=seq_len,
        dtype=dtype,
        num_nodes=num_nodes,
        devices=devices,
        num_ranks=num_ranks,
        tensor_parallel=allowed.allowed.get("tensor_parallel"),
        freeze=freeze,
        lora=lora,
        lora_base_precision=lora_base_precision,
    )
    source = find_source(fused=fused)
    problem = ClusterProblem(source, seq_len, global_batch, allowed)
    # All weights are trained: an adapter would need less.
    if isinstance(model, DescribedModel) and isinstance(source, CountedSource) and not source.trained():
        problem = replace(problem, cheaper=partial(_with_adapters, find_source, fused))
    report = find_plan(problem, progress or untold)
    if isinstance(model, ModelCount) or isinstance(source, ProfileSource) or fused:
        return report
    return replace(report, fused_seconds=partial(_fused_seconds, report.best.plan, problem, find_source))


_RANK = 8  # of adapters that are advised, the default of a training's section `lora`


def _with_adapters(find_source: Callable[..., CostSource], fused: bool) -> Iterator[tuple[str, CostSource]]:
    """Yields what to type for an adapter by LoRA on all linear layers, and on weights in 4 bits, with the costs of each
    that can be trained."""
    from peft import LoraConfig

    adapter = LoraConfig(r=_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    ways: dict[BasePrecision, str] = {
        "full": f"train an adapter (lora.r={_RANK} in a training configuration, or lora=LoraConfig(...))",
        "nf4": f"train an adapter on weights in 4 bits (lora.r={_RANK} and lora.base_precision=nf4 in a training "
        'configuration, or lora=LoraConfig(...) with lora_base_precision="nf4")',
    }
    for precision, typed in ways.items():
        try:
            yield typed, find_source(fused=fused, lora=adapter, lora_base_precision=precision)
        except SlipstreamError:
            continue


def _fused_seconds(plan: Plan, problem: ClusterProblem, find_source: Callable[..., CostSource]) -> float:
    """Returns the seconds of a plan's step with fused kernels, for which the model's operations are counted again."""
    space = PlanSpace(find_source(fused=True), problem.seq_len, problem.global_batch, problem.options)
    return space.evaluate_in_part(plan).seconds


Model: TypeAlias = str | Path | PretrainedConfig | DescribedModel | ModelCount


def choose_costs(
    model: Model,
    cluster: str | Path | Cluster | None,
    *,
    seq_len: int,
    dtype: str | None = None,
    num_nodes: int | None = None,
    devices: int | None = None,
    num_ranks: int | None = None,
    tensor_parallel: Collection[int] | None = None,
    freeze: Sequence[str] = (),
    lora: Any = None,
    lora_base_precision: BasePrecision = "full",
    fused: bool = False,
) -> CostSource:
    """Returns the costs of a model's parts; the arguments are those of `slipstream.plan`.

    Raises:
        SlipstreamError: for input that can't be used, and where no costs are kept of this model.
    """
    if dtype is not None:
        dtype = find_format(dtype).name
    if not isinstance(model, (DescribedModel, ModelCount)):
        model = DescribedModel(model)
    if isinstance(model, DescribedModel):
        freeze = freeze or model.freeze
    is_counted = isinstance(model, ModelCount) or freeze or lora is not None or fused or num_nodes or devices
    if cluster is None and is_counted and num_ranks is None:
        cluster = gpus_here()
    if (freeze or lora is not None) and not _is_counted_on(cluster):
        setting = "lora" if lora is not None else f"freeze={[*freeze]}"
        raise SlipstreamError(
            f"{setting} with measured costs, which are those of training all weights. Name a cluster such as h100-dgx, "
            "or leave schedule, slices and partition out of a configuration: `slipstream train` then plans by itself."
        )
    if fused and not _is_counted_on(cluster):
        raise SlipstreamError(
            "fused with measured costs, which hold only for what was measured. Name a cluster such as h100-dgx, or "
            "leave fused out."
        )
    if devices is not None and not _is_counted_on(cluster):
        raise SlipstreamError(
            f"devices={devices} is for a cluster: name one, such as h100-dgx. With a profile give num_ranks."
        )
    if cluster is None:
        if isinstance(model, ModelCount):
            raise SlipstreamError("a counted model needs a cluster, such as h100-dgx.")
        config = _config_for(model, seq_len)
        try:
            profile = newest_costs(config, seq_len, dtype, num_ranks, tensor_parallel)
        except SlipstreamError as error:
            cluster = gpus_here() if num_ranks is None else None
            if cluster is None:
                raise SlipstreamError(f"{error}{_about_gpus_here()}") from None
        else:
            return _profile_source(model, profile, seq_len, dtype, num_nodes, num_ranks)
    path = _profile_path(cluster)
    if path is not None:
        return _profile_source(model, load_profile(path), seq_len, dtype, num_nodes, num_ranks)
    if num_ranks is not None:
        raise SlipstreamError(f"num_ranks={num_ranks} is for a profile; a cluster has nodes: give num_nodes.")
    assert cluster is not None
    described = choose_cluster(cluster, num_nodes, devices)
    return _counted_source(model, described, seq_len, dtype, freeze, lora, lora_base_precision, fused)


def _about_gpus_here() -> str:
    """Returns what is missing to plan for this machine's GPUs; "" where there are none."""
    names = sorted({*gpu_names()})
    if not names:
        return ""
    return f" What {' and '.join(names)} can do isn't known: to plan for them here, describe them in a file (.yaml)."


def choose_cluster(cluster: str | Path | Cluster, num_nodes: int | None, devices: int | None) -> Cluster:
    """Returns a cluster with so many nodes and devices in all; the arguments are those of `slipstream.plan`.

    Raises:
        SlipstreamError: for a cluster that can't be read, and for more devices than the nodes have, or a number that
            isn't the same on each.
    """
    described = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    if num_nodes is None and (devices is not None or cluster in SHIPPED):
        num_nodes = 1
    if num_nodes is not None:
        described = described.with_nodes(check_count("num_nodes", num_nodes))
    if devices is not None:
        described = described.with_devices(_devices_of_a_node(described, check_count("devices", devices)))
    return described


def _devices_of_a_node(cluster: Cluster, devices: int) -> int:
    """Returns how many devices of each node a plan has, of so many on all nodes."""
    num_nodes = cluster.num_nodes
    nodes = f"a node of {cluster.name} has" if num_nodes == 1 else f"{num_nodes} nodes of {cluster.name} have"
    if devices > cluster.num_devices:
        enough = -(-devices // cluster.devices_per_node)
        raise SlipstreamError(
            f"devices={devices}, but {nodes} {cluster.num_devices}. Give at most {cluster.num_devices}, or "
            f"num_nodes={enough}, which have {enough * cluster.devices_per_node}."
        )
    if devices % num_nodes:
        raise SlipstreamError(
            f"devices={devices} can't be spread evenly over num_nodes={num_nodes}. Give a multiple of {num_nodes}."
        )
    return devices // num_nodes


def _is_counted_on(cluster: str | Path | Cluster | None) -> bool:
    return cluster is not None and _profile_path(cluster) is None


def _profile_path(cluster: str | Path | Cluster) -> Path | None:
    """Returns the file of a profile; None where this is a cluster, or a cluster's name or description."""
    if isinstance(cluster, Cluster) or Path(cluster).suffix != ".json":
        return None
    try:
        values = parse_json(read_text(Path(cluster)))
    except (ValueError, OSError):
        return None  # the error is raised where it is read as a cluster
    return None if isinstance(values, dict) and "device" in values else Path(cluster)


def _config_for(model: DescribedModel, seq_len: int) -> PretrainedConfig:
    """Returns the model's configuration. Raises SlipstreamError where it doesn't take sequences of so many tokens."""
    check_length(model.config, seq_len, "seq_len")
    return model.config


def _profile_source(
    model: DescribedModel | ModelCount,
    profile: Profile,
    seq_len: int,
    dtype: str | None,
    num_nodes: int | None,
    num_ranks: int | None,
) -> ProfileSource:
    if num_nodes is not None:
        raise SlipstreamError(f"num_nodes={num_nodes} is for a cluster; with a profile give num_ranks.")
    if isinstance(model, ModelCount):
        raise SlipstreamError("a profile needs the model it was measured for: give its configuration, folder or name.")
    profile.check(identify_model(_config_for(model, seq_len)), dtype)
    measured = profile.hardware.processes // profile.degrees.num_ranks
    return ProfileSource(profile, measured if num_ranks is None else num_ranks)


def _counted_source(
    model: DescribedModel | ModelCount,
    described: Cluster,
    seq_len: int,
    dtype: str | None,
    freeze: Sequence[str],
    lora: Any,
    lora_base_precision: BasePrecision,
    fused: bool,
) -> CountedSource:
    if isinstance(model, ModelCount):
        if freeze or lora is not None or lora_base_precision != "full":
            raise SlipstreamError(
                "a counted model says itself what is trained; leave freeze, lora and lora_base_precision out."
            )
        if fused:
            raise SlipstreamError("a counted model has the kernels with which it was counted: leave fused out.")
        if dtype not in (None, model.dtype):
            raise SlipstreamError(f"dtype={dtype!r}, but the model was counted in {model.dtype}: count it again.")
        return CountedSource(model, described, "counted model")
    dtype = dtype or _format_of(described)
    described.device.matmul_flops(dtype)  # raises where the dtype has no peak, before the model is counted
    config = _config_for(model, seq_len)
    trained = _trained_weights(config, freeze, lora, lora_base_precision)
    count = count_model(config, seq_len, torch_dtype(dtype), trained, fused)
    shares_tokens = len(find_anatomy(config).after) <= _NORM_AND_HEAD
    refusals: dict[str, str] = {}
    if described.num_devices > 1:
        shared = possible_sharing(config, find_anatomy(config))
        degrees = (each for each in SHARED_WORK if each.degree != "tensor")  # which counted heads tell
        refusals = {each.choice: reason for each in degrees if (reason := shared[each.degree].refusal)}
        if refused := _why_head_stays_whole(config, bool(freeze) or lora is not None):
            refusals["vocabulary"] = refused
    if trained.adapter is not None:
        refusals["shard"] = "Sharded parameters haven't been shown to be exact with adapters."
        if refused := _why_adapter_stays_whole(trained.adapter):
            refusals["tensor_parallel"] = refused
    return CountedSource(count, described, model.name, shares_tokens, fused, refusals)


def _format_of(cluster: Cluster) -> str:
    """Returns bfloat16, or float16 where that alone has a peak."""
    peaks = cluster.device.flops
    return FLOAT16.name if FLOAT16.name in peaks and BFLOAT16.name not in peaks else BFLOAT16.name


def _why_head_stays_whole(config: PretrainedConfig, trains_a_part: bool) -> str:
    """Returns why the rows of a model's head can't be spread over the ranks of a pipeline; "" where they can."""
    if trains_a_part:
        return "It is planned for models all of whose weights train."
    try:
        find_spreadable_head(config, find_anatomy(config))
    except SlipstreamError as error:
        return str(error)
    return ""


def _why_adapter_stays_whole(adapter: Adapter) -> str:
    """Returns why training refuses tensor ranks with an adapter; "" where it takes some."""
    try:
        check_parallel(adapter, 2, shards_parameters=False)
    except SlipstreamError as error:
        return str(error)
    return ""


_NORM_AND_HEAD = 2  # modules after the layers of a model whose tensor-parallel ranks can share tokens


def _trained_weights(
    config: PretrainedConfig, freeze: Sequence[str], lora: Any, base_precision: BasePrecision
) -> TrainedWeights:
    """Returns the trained weights. Raises SlipstreamError for patterns or an adapter that don't fit the model."""
    check_base_precision(base_precision, lora)
    if lora is None:
        return TrainedWeights(find_frozen(meta_model(config), freeze)) if freeze else ALL_WEIGHTS
    if freeze:
        raise SlipstreamError(
            f"freeze={[*freeze]} with lora, which freezes all weights: leave freeze out, and choose layers by "
            "layers_to_transform."
        )
    check_method(lora)
    if base_precision != "full":
        check_quantisable(meta_model(config), lora, "lora_base_precision")
    find_targets(meta_model(config), lora)
    return TrainedWeights(adapter=Adapter("default", lora, base_precision))
