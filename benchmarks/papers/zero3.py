"""PTD-P's Table 2: ZeRO-3 alone and PTD-P on the same GPUs, predicted without a constant fitted on it.

A rank of ZeRO-3 gathers every weight twice a step, for the forward and for the backward, and scatters its gradient
once: it sends 3 (n-1)/n of the model's bytes, however many GPUs share a batch. Its compute falls as 1/n, so that from
some n on a step takes what the network takes:

    max(passes of the whole model over b sequences, gathers and scatters) + Adam on 1/n

A rank of PTD-P sends all-reduces inside its node, and between nodes its stages' messages and 2 (d-1)/d of its own
weights. Its step is the planner's, `megatron.seconds`. Both take the two constants that three rows of Table 1 give.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.papers import megatron
from benchmarks.papers.megatron import LENGTH, Model, Run
from benchmarks.papers.paper_plans import PaperCosts
from benchmarks.papers.tables import errors, gpt, read
from slipstream.cost import Cluster, CountedCosts
from slipstream.schedule import Op

DTYPE_BYTES = 2  # float16
GATHERS, SCATTERS = 2, 1  # of every weight in a step
ADAM_BYTES = 20  # per parameter: float16 gradient, float32 master and two moments, read and written
LAYER_REDUCES = 6  # of a layer over tensor ranks: two in the forward, its repetition, and the backward


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    scheme: str
    model: Model
    run: Run
    paper: float  # teraFLOP/s per GPU


def rows() -> list[Row]:
    return [_row(row) for row in read("megatron_table2_zero3")]


def _row(row: dict[str, str]) -> Row:
    t, p, gpus, size = (
        int(row[key]) for key in ("tensor_parallel", "pipeline_parallel", "num_gpus", "microbatch_size")
    )
    model = Model(int(row["num_layers"]), int(row["hidden_size"]), int(row["num_heads"]))
    run = Run(t, p, gpus // (t * p), int(row["batch_size"]), size)
    return Row(row["scheme"], model, run, float(row["tflops_per_gpu"]))


def exchanged(num_bytes: float, num_ranks: int, times: float = 1) -> float:
    """Returns what each of n ranks sends to gather or to reduce-scatter so many bytes: (n-1)/n of them."""
    return times * (num_ranks - 1) / num_ranks * num_bytes


def zero3_bytes(parameter_bytes: float, num_ranks: int) -> float:
    """Returns the bytes a rank sends in a step: each weight gathered twice, its gradient scattered once."""
    return exchanged(parameter_bytes, num_ranks, GATHERS + SCATTERS)


def zero3_network_seconds(model: Model, num_ranks: int, cluster: Cluster) -> float:
    """Returns the seconds of a step's gathers and scatters, layer by layer, in a ring of neighbouring ranks.

    Half an all-reduce each: a ring's all-reduce is a scatter and a gather.
    """
    count = gpt(model.hidden_size, model.num_heads, model.num_layers)
    layer = count.layers[0].num_parameters * DTYPE_BYTES
    rest = model.flops.num_parameters * DTYPE_BYTES - model.num_layers * layer
    apart = cluster.devices_per_node  # one ring leaves each node by one card, as if its ranks were nodes apart
    both = (model.num_layers, layer), (1, rest)
    once = sum(times * cluster.exchange_seconds(num_bytes, num_ranks, apart) for times, num_bytes in both)
    return float((GATHERS + SCATTERS) * once)


def zero3_compute_seconds(model: Model, run: Run, cluster: Cluster) -> float:
    """Returns the seconds of one rank's sequences through the whole model, with recomputation."""
    counted = gpt(model.hidden_size, model.num_heads, model.num_layers)
    costs = PaperCosts(counted, cluster, microbatch_size=run.microbatch_size)
    count = costs.model
    once = model.num_layers * _passes(costs, count.layers[0], Op.F, Op.R, Op.B)
    once += _passes(costs, count.head, Op.F, Op.B) + _passes(costs, count.embedding, Op.F, Op.B)
    return _num_microbatches(run) * once


def zero3(row: Row, cluster: Cluster) -> dict[str, Any]:
    """Predicts seconds and bytes of a row without model parallelism."""
    model, run = row.model, row.run
    parameter_bytes = model.flops.num_parameters * DTYPE_BYTES
    rounds, ranks = _num_microbatches(run), run.data_parallel
    compute = zero3_compute_seconds(model, run, cluster)
    network = rounds * zero3_network_seconds(model, ranks, cluster)
    all_cards = network / cluster.devices_per_node  # as many rings as a node has cards
    adam = model.flops.num_parameters / ranks * ADAM_BYTES / cluster.device.bytes_per_second
    sent = rounds * zero3_bytes(parameter_bytes, ranks)
    return {
        "seconds": max(compute, network) + adam,
        "seconds without overlap": compute + network + adam,
        "seconds with all cards": max(compute, all_cards) + adam,
        "compute": compute,
        "network": network,
        "sent": sent,
        "out of a node": sent,  # the ring leaves every node once
        "stages a rank": 1,
    }


def ptdp(row: Row, cluster: Cluster) -> dict[str, Any]:
    """Predicts seconds and bytes of a row of PTD-P, with the number of stages per rank that is predicted best."""
    choices = megatron.fitting(row.model, row.run, (row.run.microbatch_size,))
    run = min(choices, key=lambda each: megatron.seconds(row.model, each, cluster))
    seconds = megatron.seconds(row.model, run, cluster)
    inside, between = ptdp_bytes(row.model, run)
    per_node = cluster.devices_per_node
    compute = megatron.seconds(row.model, run, _without_links(cluster))
    return {
        "seconds": seconds,  # nothing overlaps, and every card is used
        "compute": compute,
        "network": seconds - compute,
        "sent": inside + between,
        "out of a node": per_node * between,
        "stages a rank": run.stages_per_rank,
        "peak bytes": megatron.peak_bytes(row.model, run),
    }


def ptdp_bytes(model: Model, run: Run) -> tuple[float, float]:
    """Returns the bytes a middle rank sends inside its node (tensor parallelism) and out of it (stages, replicas)."""
    t, layers = run.tensor_parallel, model.num_layers // run.pipeline_parallel
    message = run.microbatch_size * LENGTH * model.hidden_size * DTYPE_BYTES
    messages = 2 * run.stages_per_rank  # an activation and a gradient of every stage
    reduced = exchanged(message, t, 2 * LAYER_REDUCES * layers)
    gathered = exchanged(message, t, messages)  # of what other ranks of the node received
    weights = gpt(model.hidden_size, model.num_heads, model.num_layers).layers[0].num_parameters * layers / t
    inside = _num_microbatches(run) * (reduced + gathered)
    stages = _num_microbatches(run) * messages * message / t
    return inside, stages + exchanged(weights * DTYPE_BYTES, run.data_parallel, 2)


def table_2() -> dict[str, Any]:
    """Predicts all rows, with the constants of Table 1."""
    cluster = megatron.fit().cluster()
    found = [_predicted(row, cluster) for row in rows()]
    by_scheme = {scheme: errors([row for row in found if row["scheme"] == scheme]) for scheme in ("zero3", "ptdp")}
    return {"constants": vars(megatron.fit()), "rows": found, "errors": by_scheme}


def _predicted(row: Row, cluster: Cluster) -> dict[str, Any]:
    found = (zero3 if row.scheme == "zero3" else ptdp)(row, cluster)
    work = row.model.flops.flops(row.run.batch_size) / row.run.num_gpus / 1e12
    predicted = work / found["seconds"]
    return {
        "scheme": row.scheme,
        "parameters": row.model.flops.num_parameters,
        "gpus": row.run.num_gpus,
        "batch": row.run.batch_size,
        "microbatch": row.run.microbatch_size,
        "paper": row.paper,
        "paper seconds": work / row.paper,
        "predicted": predicted,
        "error": predicted / row.paper - 1,
        **found,
    }


def _passes(costs: CountedCosts, part: Any, *ops: Op) -> float:
    return float(sum(costs.part_seconds(part, op, LENGTH, 0) for op in ops))


def _num_microbatches(run: Run) -> int:
    return run.batch_size // (run.microbatch_size * run.data_parallel)


def _without_links(cluster: Cluster) -> Cluster:
    """Links that take no time."""
    endless = {"bandwidth": float("inf"), "latency": 0.0}
    return replace(cluster, inside=replace(cluster.inside, **endless), between=replace(cluster.between, **endless))
