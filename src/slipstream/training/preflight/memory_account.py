"""What the fullest rank of a run holds at its peak, by the planner's account: as it is configured, or with changes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.planner.costs import AnalyticSource, Cluster, ModelCount, load_cluster
from slipstream.planner.search import make_options, search_plans
from slipstream.profiler import count_model
from slipstream.schedule import GENERATORS
from slipstream.training.config import Config
from slipstream.training.training_step import compute_dtype

_ANY_CLUSTER = "a100-dgx"  # memory doesn't depend on how fast it is
_ROOM = 1e15  # bytes; nothing is refused

Account = Callable[..., float]


def memory_account(config: Config, model_config: Any) -> Account | None:
    """Returns a function of changes, named `seq_len`, `num_microbatches`, `slices`, `recompute`, `offload` and
    `shard_optimizer`, that returns the bytes of the fullest rank with them. None where the model can't be counted.

    Activations are those of the longest sequences, attention that of a fused kernel; an order that is open is taken
    for 1f1b with 8 slices.
    """
    dtype = compute_dtype(config)
    counts: dict[int, ModelCount] = {}

    def account(**changes: Any) -> float:
        length = changes.get("seq_len", config.training.seq_len)
        if length not in counts:
            counts[length] = count_model(model_config, length, dtype)
        return _peak(config, counts[length], length, changes)

    with suppress(SlipstreamError, ValueError, NotImplementedError):
        account()
        return account
    return None


def _peak(config: Config, count: ModelCount, length: int, changes: dict[str, Any]) -> float:
    pipeline, parallel, memory = config.pipeline, config.parallel, config.memory
    rows = max(1, _sequences(config, length) // parallel.data)
    given = pipeline.num_microbatches if pipeline.microbatches is None else len(pipeline.microbatches)
    each = -(-rows // changes.get("num_microbatches", given))
    num_slices = len(pipeline.slices) if isinstance(pipeline.slices, list) else pipeline.slices
    options = make_options(
        tensor_parallel=parallel.tensor,
        pipeline_parallel=pipeline.num_ranks,
        data_parallel=parallel.data,
        stages_per_rank=pipeline.stages_per_rank,
        schedule=pipeline.schedule if pipeline.schedule in GENERATORS else "1f1b",
        microbatch_size=each,
        num_slices=changes.get("slices", 8 if num_slices == "auto" else num_slices),
        recompute=changes.get("recompute", memory.recompute),
        offload=float(changes.get("offload", memory.offload)),
        shard_optimizer=changes.get("shard_optimizer", parallel.shard_optimizer),
        slicing="equal-time",
        num_simulated=1,
    )
    batch = each * -(-rows // each) * parallel.data
    source = AnalyticSource(count, _cluster(config.num_processes, count.dtype), "the run")
    return search_plans(source, length, batch, options=options).best.peak_memory


def _sequences(config: Config, length: int) -> int:
    """Returns how many of the longest sequences a step has."""
    tokens = config.training.batch_tokens
    return config.training.batch_size if tokens is None else max(1, tokens // length)


def _cluster(num_devices: int, dtype: str) -> Cluster:
    """Returns a node that has as many devices as the run has ranks, with room for anything."""
    cluster = load_cluster(_ANY_CLUSTER)
    device = replace(cluster.device, memory=_ROOM, host_memory=_ROOM, flops={**cluster.device.flops, dtype: 1e12})
    return replace(cluster, device=device, num_nodes=1, devices_per_node=num_devices)
