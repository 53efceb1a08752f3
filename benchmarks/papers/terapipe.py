"""TeraPipe Tables 2 and 3: constants fitted on the rows with equal slices, the others predicted.

An iteration is Eq. 5 over the sequences of a pipeline, t = forward + backward + the slice's two messages, and the
reduction of the gradients between replicas:

    M sum(t) + (K-1) max(t) + [d > 1] (all-reduce of the gradients + what a reduction costs however small)

The paper's FLOP/s show that the model is layers alone, without embedding and head (7.86e9 FLOPs a token of GPT3-1B
are 6 times its layers' parameters and causal attention).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from benchmarks.papers.tables import errors, gpt, read, slice_lengths
from benchmarks.papers.unfused_attention import UnfusedCosts
from slipstream.planner.costs import AnalyticCosts, Cluster, load_cluster
from slipstream.planner.slicing import slice_tokens
from slipstream.schedule import Op

LENGTH = 2048
GRANULARITY = 8  # all slices of the paper are multiples of it
HEAD_WIDTH = 128  # GPT-3's


@dataclass(frozen=True)
class Constants:
    """The constants that are fitted: factors of the data-sheet numbers in the cluster's description."""

    matmul: float  # of the V100's float16 peak
    attention: float  # the same, of attention's products
    memory: float  # of its memory's bandwidth
    kernel: float  # seconds
    inside: float  # of NVLink's bandwidth, all-reduces of tensor parallelism
    messages: float  # of the 25 Gb/s between nodes, messages between stages
    gradients: float  # the same, gradients; shared by a node's eight GPUs
    reduction: float  # seconds, of any reduction between replicas

    def cluster(self) -> Cluster:
        base = load_cluster("v100-p3.16xlarge")
        device = replace(
            base.device,
            efficiency=((1.0, self.matmul),),
            attention_efficiency=self.attention,
            memory_efficiency=self.memory,
            kernel_seconds=self.kernel,
        )
        inside, between = replace(base.inside, efficiency=self.inside), replace(base.between, efficiency=self.messages)
        return replace(base, device=device, inside=inside, between=between)


START = Constants(0.5, 0.15, 0.8, 5e-6, 0.6, 0.9, 0.65, 0.3)
LEAST = Constants(0.3, 0.02, 0.4, 1e-6, 0.1, 0.3, 0.3, 0.0)
MOST = Constants(0.8, 0.8, 1.0, 5e-5, 1.0, 1.0, 1.0, 0.6)


@dataclass(frozen=True)
class Row:
    """A measured row of either table."""

    table: int
    setting: str
    algorithm: str
    num_sequences: int
    slices: tuple[int, ...]
    seconds: float

    @property
    def uniform(self) -> bool:
        return len(set(self.slices)) == 1


@dataclass(frozen=True)
class Setting:
    """A row of Table 1."""

    num_layers: int
    hidden_size: int
    data_parallel: int
    pipeline_parallel: int
    tensor_parallel: int

    def slice_seconds(self, constants: Constants, length: Any, context: Any) -> Any:
        """Returns t(i, j) of a stage: forward, backward, and both messages over the pipeline's mean link."""
        cluster = constants.cluster()
        costs = self._costs(cluster)
        layer = costs.model.layers[0]
        ops = (Op.F, Op.B)
        computed = sum(costs.part_seconds(layer, op, length, context) for op in ops)
        return self.num_layers // self.pipeline_parallel * computed + 2 * self._message(costs, length)

    def _message(self, costs: AnalyticCosts, length: Any) -> Any:
        """Returns the seconds of a message; the tensor-parallel ranks send a part each, over the node's one link."""
        stages_a_node = costs.cluster.devices_per_node // self.tensor_parallel
        across = (self.pipeline_parallel - 1) // stages_a_node / (self.pipeline_parallel - 1)
        sent = [
            link.latency + costs.message_bytes(length) / link.rate()
            for link in (costs.cluster.inside, costs.cluster.between)
        ]
        return (1 - across) * sent[0] + across * sent[1]

    def reduction_seconds(self, constants: Constants) -> float:
        """Returns the seconds of reducing float16 gradients over the replicas, when a node's GPUs share its 25 Gb/s."""
        if self.data_parallel == 1:
            return 0.0
        cluster = constants.cluster()
        cluster = replace(cluster, between=replace(cluster.between, efficiency=constants.gradients))
        costs = self._costs(cluster)
        stage = range(1, 1 + self.num_layers // self.pipeline_parallel)
        parameters = costs.model.layers[0].num_parameters * len(stage) / self.tensor_parallel
        node = cluster.devices_per_node  # replicas are nodes apart: the pipeline runs along a node
        ring = cluster.all_reduce_seconds(parameters * costs.model.dtype_bytes, self.data_parallel, stride=node)
        return float(ring) + constants.reduction

    def latency(self, constants: Constants, slices: tuple[int, ...], num_sequences: int) -> float:
        contexts = np.array([0, *accumulate(slices)][:-1])
        t = self.slice_seconds(constants, np.array(slices), contexts)
        pipeline = num_sequences * t.sum() + (self.pipeline_parallel - 1) * t.max()
        return float(pipeline) + self.reduction_seconds(constants)

    def _costs(self, cluster: Cluster) -> AnalyticCosts:
        model = gpt(self.hidden_size, self.hidden_size // HEAD_WIDTH, self.num_layers)
        return UnfusedCosts(model, cluster, self.tensor_parallel)


def settings() -> dict[str, Setting]:
    names = ("num_layers", "hidden_size", "data_parallel", "pipeline_parallel", "tensor_parallel")
    return {row["setting"]: Setting(*(int(row[name]) for name in names)) for row in read("terapipe_table1_settings")}


def rows() -> list[Row]:
    tables = {2: read("terapipe_table2_latency"), 3: read("terapipe_table3_uniform")}
    return [
        Row(
            number,
            row["setting"],
            row.get("algorithm", "terapipe"),
            int(row["num_sequences"]),
            slice_lengths(row["slices"]),
            float(row["latency_s"]),
        )
        for number, table in tables.items()
        for row in table
    ]


def fit(measured: list[Row]) -> Constants:
    """Fits the constants by least squares of the logarithms over the rows with equal slices; outliers weigh less."""
    from scipy.optimize import least_squares

    table = settings()
    uniform = [row for row in measured if row.uniform]
    start, least, most = (np.array(list(vars(each).values())) for each in (START, LEAST, MOST))

    def off(values: Any) -> list[float]:
        constants = Constants(*values)
        return [
            float(np.log(table[r.setting].latency(constants, r.slices, r.num_sequences) / r.seconds)) for r in uniform
        ]

    found = least_squares(off, start, bounds=(least, most), x_scale=start, loss="soft_l1", f_scale=0.1)
    return Constants(*map(float, found.x))


def found_slices(setting: Setting, constants: Constants, num_sequences: int) -> tuple[int, ...]:
    """Slices the same problem by `slice_tokens`."""
    found = slice_tokens(
        lambda length, context: setting.slice_seconds(constants, length, context),
        LENGTH,
        setting.pipeline_parallel,
        GRANULARITY,
        num_microbatches=num_sequences,
    )
    return found.slices


def table_2_and_3() -> dict[str, object]:
    """Predicts all rows of both tables from one set of hardware constants."""
    table, measured = settings(), rows()
    constants = fit(measured)
    found: list[dict[str, object]] = []
    for row in measured:
        setting = table[row.setting]
        predicted = setting.latency(constants, row.slices, row.num_sequences)
        ours = found_slices(setting, constants, row.num_sequences)
        found.append(
            {
                "table": row.table,
                "setting": row.setting,
                "algorithm": row.algorithm,
                "slices": row.slices,
                "fitted": row.uniform,
                "paper": row.seconds,
                "predicted": predicted,
                "error": predicted / row.seconds - 1,
                "our slices": ours,
                "ours": setting.latency(constants, ours, row.num_sequences),
            }
        )
    return {
        "constants": vars(constants),
        "fitted on": "the rows of Tables 2 and 3 whose slices are all equal",
        "rows": found,
        "table 2": errors([row for row in found if row["table"] == 2]),
        "table 2, rows not fitted": errors([row for row in found if row["table"] == 2 and not row["fitted"]]),
        "table 3": errors([row for row in found if row["table"] == 3]),
    }


# --- Table 3 by itself ------------------------------------------------------------------------------------------------


SCALE = np.array([5e-3, 2e-5, 1e-9])  # where the search of the three coefficients starts


def smooth(coefficients: Any, length: Any, context: Any) -> Any:
    """t(i, j) = sqrt(a² + (b i)²) + c i (j + i/2): a floor, tokens, scores; the floor rounded off where both meet."""
    a, b, c = np.abs(coefficients)
    return np.hypot(a, b * length) + c * length * (context + length / 2)


def table_3() -> list[dict[str, object]]:
    """Fits each setting's three coefficients on its rows with equal slices; predicts the dynamic program's row."""
    from scipy.optimize import least_squares

    table, found = settings(), []
    for name in ("8", "9"):
        measured = [row for row in rows() if row.table == 3 and row.setting == name]
        stages = table[name].pipeline_parallel

        def latency(coefficients: Any, slices: tuple[int, ...], sequences: int, stages: int = stages) -> float:
            t = smooth(coefficients, np.array(slices), np.array([0, *accumulate(slices)][:-1]))
            return float(sequences * t.sum() + (stages - 1) * t.max())

        def off(scaled: Any, measured: list[Row] = measured, latency: Any = latency) -> list[float]:
            uniform = [row for row in measured if row.uniform]
            return [float(np.log(latency(scaled * SCALE, r.slices, r.num_sequences) / r.seconds)) for r in uniform]

        coefficients = np.abs(least_squares(off, np.ones(3)).x * SCALE)
        sequences = measured[0].num_sequences
        ours = slice_tokens(
            lambda i, j, c=coefficients: smooth(c, i, j), LENGTH, stages, GRANULARITY, num_microbatches=sequences
        )
        for row in measured:
            predicted = latency(coefficients, row.slices, sequences)
            found.append(
                {
                    "setting": name,
                    "slices": row.slices,
                    "fitted": row.uniform,
                    "paper": row.seconds,
                    "predicted": predicted,
                    "error": predicted / row.seconds - 1,
                    "our slices": ours.slices,
                    "ours": ours.latency,
                    "coefficients": coefficients.tolist(),
                }
            )
    return found
