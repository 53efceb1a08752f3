"""Megatron PTD-P: Table 1's ten throughputs, two constants fitted on three rows.

Each row is a configuration as `slipstream plan` simulates it: 1F1B, interleaved where a rank has several stages, full
recomputation, messages with scatter/gather, then the gradients' all-reduce and the optimizer.

The paper doesn't give microbatch sizes and stages a rank: of those that fit the device's memory, by the planner's
account, the ones with the best prediction are taken, as its authors chose them for speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from benchmarks.papers.formulas import GPT
from benchmarks.papers.paper_plans import LayersAlone, PaperCosts, PaperSource, PaperSpace, UnscatteredCosts
from benchmarks.papers.tables import errors, gpt, read
from slipstream.cost import Cluster, load_cluster
from slipstream.planner.plan import ONE_DEVICE, Plan
from slipstream.planner.search.evaluate import Evaluation

LENGTH = 2048
SIZES = (1, 2, 4, 8)  # sequences of a microbatch, of which the best is taken
FITTED = (0, 5, 9)  # the first, the last and one in the middle
SELENE = load_cluster("a100-selene")


@dataclass(frozen=True)
class Constants:
    """The constants that are fitted."""

    matmul: float  # of the A100's peak, attention's products too
    traffic: float  # of its memory's bandwidth

    def cluster(self) -> Cluster:
        device = replace(
            SELENE.device,
            matmul_efficiency=self.matmul,
            attention_efficiency=self.matmul,
            memory_efficiency=self.traffic,
        )
        return replace(SELENE, device=device)


@dataclass(frozen=True)
class Model:
    """A GPT of the paper; `layers_alone` leaves its embedding and head out."""

    num_layers: int
    hidden_size: int
    num_heads: int
    layers_alone: bool = False

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

    @property
    def plan(self) -> Plan:
        """The choices of `slipstream plan` that this is."""
        return replace(
            ONE_DEVICE,
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            data_parallel=self.data_parallel,
            stages_per_rank=self.stages_per_rank,
            schedule="1f1b" if self.stages_per_rank == 1 else "interleaved-1f1b",
            microbatch_size=self.microbatch_size,
            recompute="stage",
        )


def candidate(model: Model, run: Run, cluster: Cluster) -> Evaluation:
    """Returns the plan with its costs on the cluster, simulated."""
    counted = gpt(model.hidden_size, model.num_heads, model.num_layers)
    counted = LayersAlone.of(counted) if model.layers_alone else counted
    source = PaperSource(counted, cluster, PaperCosts if run.scattered else UnscatteredCosts)
    return PaperSpace(source, LENGTH, run.batch_size, slices=(LENGTH,)).evaluate(run.plan)


def seconds(model: Model, run: Run, cluster: Cluster) -> float:
    """Returns the seconds of one iteration, with recomputation."""
    return candidate(model, run, cluster).seconds


@cache
def peak_bytes(model: Model, run: Run) -> float:
    """Returns what the fullest device holds by the planner's account."""
    return float(max(candidate(model, run, SELENE).peaks()))


def fits(model: Model, run: Run) -> bool:
    """Returns whether the planner would let it run on Selene's devices."""
    return peak_bytes(model, run) <= SELENE.device.memory


def tflops(model: Model, run: Run, cluster: Cluster) -> float:
    """Returns teraFLOP/s per GPU, by the paper's eq. 3."""
    return model.flops.flops(run.batch_size) / (run.num_gpus * seconds(model, run, cluster)) / 1e12


def choices(model: Model, run: Run, sizes: tuple[int, ...] = SIZES) -> Iterator[Run]:
    """Yields the microbatch sizes and stages per rank that are possible; the paper interleaves its pipelines."""
    p, layers = run.pipeline_parallel, model.num_layers // run.pipeline_parallel
    for size in sizes:
        rounds, rest = divmod(run.batch_size, size * run.data_parallel)
        stages = [1] if p == 1 else [v for v in range(2, layers + 1) if layers % v == 0 and rounds % p == 0]
        if rest == 0:
            yield from (replace(run, microbatch_size=size, stages_per_rank=v) for v in stages)


@cache
def fitting(model: Model, run: Run, sizes: tuple[int, ...] = SIZES) -> tuple[Run, ...]:
    """Returns the choices that fit; where none does, the one that takes the least memory."""
    found = list(choices(model, run, sizes))
    return tuple(each for each in found if fits(model, each)) or (min(found, key=partial(peak_bytes, model)),)


def best(model: Model, run: Run, cluster: Cluster) -> tuple[float, Run]:
    found = ((tflops(model, each, cluster), each) for each in fitting(model, run))
    return max(found, key=lambda each: each[0])


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
                "peak bytes": peak_bytes(model, chosen),
                "fits": fits(model, chosen),
                "microbatch sizes that fit": sorted({each.microbatch_size for each in fitting(model, run)}),
            }
        )
    return {"constants": vars(constants), "fitted on rows": fitted, "rows": found, **errors(found)}
