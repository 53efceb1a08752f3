"""`slipstream.plan`: from any model and a cluster, or a profile, to the best configurations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slipstream.planner import Plan
from slipstream.planner.costs import Cluster
from slipstream.planner.search import check_count, make_options, search_plans
from slipstream.planning.cost_choice import Model, choose_costs


def plan(
    model: Model,
    cluster: str | Path | Cluster | None = None,
    *,
    seq_len: int,
    global_batch: int,
    dtype: str | None = None,
    num_nodes: int | None = None,
    num_ranks: int | None = None,
    freeze: Sequence[str] = (),
    lora: Any = None,
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
        freeze: patterns of names of parameters that aren't trained. Default: `model.freeze` of a training
            configuration.
        lora: a `peft.LoraConfig`: an adapter is trained, and all of the model's weights are frozen.
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
    source = choose_costs(
        model,
        cluster,
        seq_len=seq_len,
        dtype=dtype,
        num_nodes=num_nodes,
        num_ranks=num_ranks,
        tensor_parallel=allowed.tensor_parallel,
        freeze=freeze,
        lora=lora,
    )
    return search_plans(source, seq_len, global_batch, options=allowed, progress=progress)
