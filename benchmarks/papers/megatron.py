"""Megatron PTD-P: Table 1's ten throughputs, two constants fitted on three rows; its studies as orders of predictions.

An iteration of m microbatches on p ranks of v stages is that of the slowest rank, the last with the head, and the
bubble of the others, then the gradients' all-reduce and the optimizer:

    m (t_last + v hops) + (p-1) (t / v + hop) + all-reduce + Adam

The paper doesn't give microbatch sizes and stages a rank: those with the best prediction are taken, as its authors
chose them for speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from benchmarks.papers.formulas import GPT, data_parallel_bubble
from benchmarks.papers.tables import errors, gpt, read
from benchmarks.papers.unfused_attention import UnfusedCosts
from slipstream.planner.costs import AnalyticCosts, Cluster, load_cluster
from slipstream.schedule import Op

LENGTH = 2048
FITTED = (0, 5, 9)  # the first, the last and one in the middle
ADAM_BYTES = 20  # per parameter: float16 gradient, float32 master and two moments, read and written


@dataclass(frozen=True)
class Constants:
    """The constants that are fitted."""

    matmul: float  # of the A100's peak, attention's products too
    traffic: float  # of its memory's bandwidth, over what unfused kernels move: above 1, as Megatron fuses kernels

    def cluster(self) -> Cluster:
        base = load_cluster("a100-selene")
        device = replace(
            base.device,
            efficiency=((1.0, self.matmul),),
            attention_efficiency=self.matmul,
            memory_efficiency=self.traffic,
        )
        return replace(base, device=device)


@dataclass(frozen=True)
class Model:
    """A GPT of the paper."""

    num_layers: int
    hidden_size: int
    num_heads: int

    @property
    def flops(self) -> GPT:
        return GPT(self.num_layers, self.hidden_size)


@dataclass(frozen=True)
class Run:
    """A row's configuration: how the devices are used."""

    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    batch_size: int
    microbatch_size: int = 1
    stages_per_rank: int = 1
    scattered: bool = True

    @property
    def num_gpus(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


def seconds(model: Model, run: Run, cluster: Cluster) -> float:
    """Returns the seconds of one iteration, with recomputation."""
    t, p, v = run.tensor_parallel, run.pipeline_parallel, run.stages_per_rank
    counted = gpt(model.hidden_size, model.num_heads, model.num_layers)
    costs = UnfusedCosts(counted, cluster, t, run.microbatch_size)
    count = costs.model
    layer = _passes(costs, count.layers[0], (Op.F, Op.R, Op.B))
    head = _passes(costs, count.head, (Op.F, Op.B))
    rank = model.num_layers // p * layer
    slowest = rank + head + (_passes(costs, count.embedding, (Op.F, Op.B)) if p == 1 else 0)
    hop = _hop(costs, run)
    num_microbatches = run.batch_size // (run.microbatch_size * run.data_parallel)
    pipeline = num_microbatches * (slowest + v * hop) + (p - 1) * (rank / v + hop)
    parameters = count.layers[0].num_parameters * (model.num_layers // p) / t
    gradients = cluster.all_reduce_seconds(parameters * count.dtype_bytes, run.data_parallel, stride=t)
    return float(pipeline + gradients + parameters * ADAM_BYTES / cluster.device.bytes_per_second)


def _passes(costs: AnalyticCosts, part: Any, ops: tuple[Op, ...]) -> float:
    return float(sum(costs.part_seconds(part, op, LENGTH, 0) for op in ops))


def _hop(costs: AnalyticCosts, run: Run) -> float:
    """Returns the seconds of an activation and a gradient from a stage to the next."""
    if run.pipeline_parallel == 1:
        return 0.0
    cluster, t = costs.cluster, run.tensor_parallel
    message = float(costs.message_bytes(LENGTH))
    link = cluster.inside if t * run.data_parallel < cluster.devices_per_node else cluster.between
    if not run.scattered:
        return 2 * float(link.latency + message / link.rate())
    gathered = message * (t - 1) / t / cluster.inside.rate()
    return 2 * float(link.latency + message / t / link.rate() + gathered)


def tflops(model: Model, run: Run, cluster: Cluster) -> float:
    """Returns teraFLOP/s per GPU, by the paper's eq. 3."""
    return model.flops.flops(run.batch_size) / (run.num_gpus * seconds(model, run, cluster)) / 1e12


def choices(model: Model, run: Run) -> Iterator[Run]:
    """Yields the microbatch sizes and stages per rank that the configuration allows."""
    layers = model.num_layers // run.pipeline_parallel
    for size in (1, 2, 4, 8):
        if run.batch_size % (size * run.data_parallel):
            continue
        whole_rounds = run.batch_size // (size * run.data_parallel) % run.pipeline_parallel == 0
        for v in range(1, layers + 1 if run.pipeline_parallel > 1 and whole_rounds else 2):
            if layers % v == 0:
                yield replace(run, microbatch_size=size, stages_per_rank=v)


def best(model: Model, run: Run, cluster: Cluster) -> tuple[float, Run]:
    return max(((tflops(model, each, cluster), each) for each in choices(model, run)), key=lambda found: found[0])


def rows() -> list[tuple[Model, Run, float]]:
    found = []
    for row in read("megatron_table1_weak_scaling"):
        t, p, gpus = (int(row[name]) for name in ("tensor_parallel", "pipeline_parallel", "num_gpus"))
        model = Model(int(row["num_layers"]), int(row["hidden_size"]), int(row["num_heads"]))
        found.append((model, Run(t, p, gpus // (t * p), int(row["batch_size"])), float(row["tflops_per_gpu"])))
    return found


@cache
def fit(fitted: tuple[int, ...] = FITTED) -> Constants:
    """Fits the constants by least squares of the logarithms over these rows."""
    from scipy.optimize import least_squares

    chosen = [rows()[index] for index in fitted]

    def off(values: Any) -> list[float]:
        cluster = Constants(*values).cluster()
        return [float(np.log(best(model, run, cluster)[0] / paper)) for model, run, paper in chosen]

    bounds = ([0.4, 0.2], [0.95, 5.0])
    return Constants(*map(float, least_squares(off, [0.7, 1.5], bounds=bounds, diff_step=1e-3).x))


def table_1(fitted: tuple[int, ...] = FITTED) -> dict[str, object]:
    """Predicts the ten rows."""
    constants = fit(fitted)
    cluster = constants.cluster()
    found: list[dict[str, object]] = []
    for index, (model, run, paper) in enumerate(rows()):
        predicted, chosen = best(model, run, cluster)
        found.append(
            {
                "parameters": model.flops.num_parameters,
                "fitted": index in fitted,
                "paper": paper,
                "predicted": predicted,
                "error": predicted / paper - 1,
                "microbatch size": chosen.microbatch_size,
                "stages a rank": chosen.stages_per_rank,
            }
        )
    return {"constants": vars(constants), "fitted on rows": fitted, "rows": found, **errors(found)}


# --- the studies ------------------------------------------------------------------------------------------------------

GPT_162B, GPT_5_9B, GPT_175B = Model(32, 20480, 128), Model(32, 3840, 32), Model(96, 12288, 96)
GPT_1B = Model(4, 4096, 128)


def studies() -> dict[str, dict[str, object]]:
    """Figures 6, 8, 11 to 14 and 16: teraFLOP/s per GPU by what is varied, what the text says, and whether it holds."""
    cluster = fit().cluster()

    def sweep(model: Model, runs: dict[object, Run]) -> dict[str, float]:
        return {str(name): tflops(model, run, cluster) for name, run in runs.items()}

    bubbles = {str(d): data_parallel_bubble(32, d, 128) for d in (1, 2, 4, 8, 16, 32)}
    sizes = sweep(GPT_1B, {b: Run(1, 1, 1, 16, b) for b in (1, 2, 4, 8, 16)})
    tensor = sweep(GPT_162B, {t: Run(t, 64 // t, 1, 128) for t in (2, 4, 8, 16, 32)})
    pipeline = sweep(GPT_5_9B, {p: Run(1, p, 64 // p, 512) for p in (2, 4, 8, 16, 32)})
    data = sweep(GPT_5_9B, {t: Run(t, 1, 64 // t, 512) for t in (2, 4, 8, 16, 32)})
    batches = (12, 24, 36, 48, 60)
    plain = sweep(GPT_175B, {batch: Run(8, 12, 1, batch) for batch in batches})
    interleaved = sweep(GPT_175B, {batch: Run(8, 12, 1, batch, 1, 2) for batch in batches})
    unscattered = sweep(GPT_175B, {batch: Run(8, 12, 1, batch, 1, 2, False) for batch in batches})
    gains = [interleaved[key] / plain[key] for key in plain]
    scatter_gains = [interleaved[key] / unscattered[key] for key in plain]
    pipelined = {b: _eq_1(b, cluster) for b in (1, 2, 4, 8, 16)}
    return {
        "figure 6": _study("the bubble falls as d rises", bubbles, _falls(bubbles)),
        "figure 7": _study("a larger microbatch is faster on one GPU", sizes, _rises(sizes)),
        "figure 7, by how much": _study("by up to 1.3 times", sizes, sizes["16"] / sizes["1"] > 1.2),
        "figure 8": _study(
            "for (p, t) = (8, 8) and batches of 128 and 512 the best microbatch is neither the least nor the largest",
            {str(b): value for b, value in pipelined.items()},
            max(pipelined, key=lambda b: pipelined[b]) not in (1, 16),
        ),
        "figure 11": _study(
            "interleaving is faster, and the gap closes as the batch grows",
            {"plain": plain, "interleaved": interleaved},
            min(gains) > 1 and gains == sorted(gains, reverse=True),
        ),
        "figure 12": _study(
            "tensor parallelism of a node's 8 GPUs is best", tensor, max(tensor, key=lambda t: tensor[t]) == "8"
        ),
        "figure 13": _study("throughput falls as p rises", pipeline, _falls(pipeline)),
        "figure 14": _study("throughput falls as t rises", data, _falls(data)),
        "figure 16": _study(
            "scatter/gather helps", {"with": interleaved, "without": unscattered}, min(scatter_gains) > 1
        ),
        "figure 16, by how much": _study(
            "by up to 11%, with a large batch",
            {"gain": scatter_gains},
            max(scatter_gains) > 1.08 and scatter_gains == sorted(scatter_gains),
        ),
    }


def _eq_1(microbatch_size: int, cluster: Cluster, batch_size: int = 128) -> float:
    """Returns sequences per second by eq. 1 with p = 8, t_f and t_b of the four layers on one GPU."""
    costs = UnfusedCosts(gpt(GPT_1B.hidden_size, GPT_1B.num_heads, 4), cluster, 1, microbatch_size)
    once = 4 * _passes(costs, costs.model.layers[0], (Op.F, Op.R, Op.B))
    return batch_size / ((batch_size / microbatch_size + 8 - 1) * once)


def _study(text: str, values: object, holds: bool) -> dict[str, object]:
    return {"the paper says": text, "predicted": values, "holds": holds}


def _falls(values: dict[str, float]) -> bool:
    return list(values.values()) == sorted(values.values(), reverse=True)


def _rises(values: dict[str, float]) -> bool:
    return list(values.values()) == sorted(values.values())
