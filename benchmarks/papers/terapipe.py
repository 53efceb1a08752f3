"""TeraPipe Tables 2 and 3: constants fitted on the rows with equal slices, the others predicted.

Each row is a configuration as `slipstream plan` simulates it: GPipe's schedule over the sequences of a pipeline and
their slices, messages over the cluster's links, then the gradients' reduction and the optimizer.

The paper's FLOP/s show that the model is layers alone, without embedding and head (7.86e9 FLOPs a token of GPT3-1B
are 6 times its layers' parameters and causal attention).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from benchmarks.papers.paper_plans import LayersAlone, PaperCosts, PaperSource, PaperSpace
from benchmarks.papers.tables import errors, gpt, read, slice_lengths
from slipstream.cost import Cluster, CountedCosts, Degrees, Stage, Update, load_cluster
from slipstream.cost.cluster_links import ClusterCost
from slipstream.planner.plan import ONE_DEVICE
from slipstream.planner.slicing import slice_batch, slice_tokens
from slipstream.schedule import Op

LENGTH = 2048
GRANULARITY = 8  # all slices of the paper are multiples of it
HEAD_WIDTH = 128  # GPT-3's
TOLERANCE = 1e-4  # of the fits' costs and constants
KEPT = 4096
CLUSTER = load_cluster("v100-p3.16xlarge")


@dataclass(frozen=True)
class Constants:
    """The constants that are fitted: numbers of the cluster's description, or factors of those on data sheets."""

    layer: float  # seconds in which the host starts a layer's kernels, forward or backward
    action: float  # seconds that a forward or backward of a stage takes, however short its slice
    inside: float  # of NVLink's bandwidth
    between: float  # of the 25 Gb/s between nodes
    reduction: float  # seconds, of any reduction between replicas

    def cluster(self) -> Cluster:
        base = CLUSTER
        device = replace(
            base.device,
            # scores are products like all others
            attention_efficiency=base.device.matmul_efficiency,
            layer_seconds=self.layer,
            action_seconds=self.action,
        )
        inside, between = replace(base.inside, efficiency=self.inside), replace(base.between, efficiency=self.between)
        return replace(base, device=device, inside=inside, between=between)


START = Constants(1e-3, 1e-3, 0.6, 0.9, 0.2)
LEAST = Constants(0.0, 0.0, 0.02, 0.1, 0.0)
MOST = Constants(4e-3, 1e-2, 1.0, 1.0, 0.6)


@dataclass(frozen=True)
class ReplicasApart(PaperCosts):
    """Costs where a pipeline runs along the nodes and its replicas are nodes apart; plans lay them out inside nodes."""

    num_ranks: int = 1
    reduction: float = 0.0  # seconds

    def action_costs(self, times: Any, slices: Any, data_parallel: int = 1) -> ClusterCost:
        return super().action_costs(times, slices)

    def gradient_seconds(self, layers: Stage, update: Update) -> float:
        return super().gradient_seconds(layers, update) + (self.reduction if update.copies > 1 else 0)

    @property
    def replica_stride(self) -> int:
        return self.degrees.tensor * self.num_ranks


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
    batch_size: int
    data_parallel: int
    pipeline_parallel: int
    tensor_parallel: int

    @property
    def num_sequences(self) -> int:
        """The sequences of a pipeline."""
        return self.batch_size // self.data_parallel

    @property
    def stage(self) -> range:
        """The layers of a stage that is neither first nor last."""
        return range(self.num_layers // self.pipeline_parallel)

    def space(self, constants: Constants, slices: tuple[int, ...] | None = None) -> PaperSpace:
        model = LayersAlone.of(gpt(self.hidden_size, self.hidden_size // HEAD_WIDTH, self.num_layers))
        costs = partial(ReplicasApart, num_ranks=self.pipeline_parallel, reduction=constants.reduction)
        source = PaperSource(model, constants.cluster(), costs)
        return PaperSpace(source, LENGTH, self.batch_size, slices=slices)

    def seconds(self, constants: Constants, num_sequences: int, op: Op, length: Any, context: Any) -> Any:
        """Returns the time of F or B of so many sequences on a stage."""
        return self._costs(constants, num_sequences).seconds(self.stage, op, length, context)

    def hop_seconds(self, constants: Constants) -> float:
        """Returns the seconds that a token's hidden state travels between the first two nodes."""
        costs = self._costs(constants, 1)
        between = costs.action_costs({}, ()).byte_seconds[False]
        return float(costs.message_bytes(1)) * between

    @lru_cache(maxsize=KEPT)  # noqa: B019  settings are few
    def _costs(self, constants: Constants, num_sequences: int) -> CountedCosts:
        return self.space(constants).costs(Degrees(self.tensor_parallel), num_sequences)


@lru_cache(maxsize=KEPT)
def step(setting: Setting, constants: Constants, slices: tuple[int, ...]) -> float:
    """Returns the simulated seconds of an iteration."""
    chosen = replace(
        ONE_DEVICE,
        tensor_parallel=setting.tensor_parallel,
        pipeline_parallel=setting.pipeline_parallel,
        data_parallel=setting.data_parallel,
        schedule="gpipe",
        num_slices=len(slices),
    )
    return setting.space(constants, slices).evaluate(chosen).seconds


def settings() -> dict[str, Setting]:
    names = ("num_layers", "hidden_size", "batch_size", "data_parallel", "pipeline_parallel", "tensor_parallel")
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


def fit(measured: list[Row], start: Constants = START) -> Constants:
    """Fits the constants by least squares of the logarithms over the rows with equal slices; outliers weigh less."""
    from scipy.optimize import least_squares

    table, uniform = settings(), [row for row in measured if row.uniform]
    first, least, most, scale = (np.array(list(vars(each).values())) for each in (start, LEAST, MOST, START))

    def off(values: Any) -> list[float]:
        constants = Constants(*map(float, values))
        return [float(np.log(step(table[row.setting], constants, row.slices) / row.seconds)) for row in uniform]

    found = least_squares(
        off, first, bounds=(least, most), x_scale=scale, loss="soft_l1", f_scale=0.1, ftol=TOLERANCE, xtol=TOLERANCE
    )
    return Constants(*map(float, found.x))


def fits_without(measured: list[Row], constants: Constants) -> dict[str, Constants]:
    """Fits the constants as often as there are settings, each time without the rows of one."""
    return {name: fit([row for row in measured if row.setting != name], constants) for name in settings()}


def found_slices(setting: Setting, constants: Constants) -> tuple[int, ...]:
    """Slices the same problem by `slice_tokens`, with and without messages; the simulator says which is better.

    The simulator's messages travel while the next slice is computed, so neither is exact.
    """
    hop = setting.hop_seconds(constants)
    candidates = [
        slice_tokens(
            lambda i, j, each=each: setting.seconds(constants, 1, Op.F, i, j) + each * i,
            LENGTH,
            setting.pipeline_parallel,
            GRANULARITY,
            backward=lambda i, j, each=each: setting.seconds(constants, 1, Op.B, i, j) + each * i,
            num_microbatches=setting.num_sequences,
        ).slices
        for each in (0.0, hop)
    ]
    return min(candidates, key=lambda slices: step(setting, constants, slices))


def table_2_and_3() -> dict[str, object]:
    """Predicts all rows of both tables from one set of constants, and each setting from those fitted without it."""
    table, measured = settings(), rows()
    constants = fit(measured)
    others = fits_without(measured, constants)
    ours = {name: found_slices(setting, constants) for name, setting in table.items()}
    found: list[dict[str, object]] = []
    for row in measured:
        setting = table[row.setting]
        predicted, left_out = (step(setting, each, row.slices) for each in (constants, others[row.setting]))
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
                "left out": left_out,
                "error left out": left_out / row.seconds - 1,
                "our slices": ours[row.setting],
                "ours": step(setting, constants, ours[row.setting]),
            }
        )
    return {
        "constants": vars(constants),
        "constants without a setting": {name: vars(each) for name, each in others.items()},
        "fitted on": "the rows of Tables 2 and 3 whose slices are all equal",
        "rows": found,
        "table 2": errors([row for row in found if row["table"] == 2]),
        "table 2, rows not fitted": errors([row for row in found if row["table"] == 2 and not row["fitted"]]),
        "table 3": errors([row for row in found if row["table"] == 3]),
        "table 2, settings left out": errors([row for row in found if row["table"] == 2], "error left out"),
        "table 3, settings left out": errors([row for row in found if row["table"] == 3], "error left out"),
    }


# --- batch and tokens cut together ------------------------------------------------------------------------------------


def equal_stage_sum(setting: Setting, constants: Constants, slices: tuple[int, ...]) -> float:
    """Returns Eq. 5 of a setting's sequences, each cut into these slices: all times and K-1 of the slowest."""
    context = np.cumsum(slices) - slices
    t = sum(setting.seconds(constants, 1, op, np.array(slices), context) for op in (Op.F, Op.B))
    return float(setting.num_sequences * t.sum() + (setting.pipeline_parallel - 1) * t.max())


def batch_sums(constants: Constants, granularity: int = GRANULARITY) -> list[dict[str, object]]:
    """Returns each setting's Eq. 5 for the paper's slices, and the least of whole sequences and of free batches."""
    chosen = {row.setting: row.slices for row in rows() if row.algorithm == "terapipe" and row.table == 2}
    return [
        {"setting": name, "paper's": equal_stage_sum(setting, constants, chosen[name])}
        | least_sums(setting, constants, granularity)
        for name, setting in settings().items()
    ]


def least_sums(setting: Setting, constants: Constants, granularity: int) -> dict[str, object]:
    def seconds(num_sequences: int, length: Any, context: Any) -> Any:
        return sum(setting.seconds(constants, num_sequences, op, length, context) for op in (Op.F, Op.B))

    whole, free = (
        slice_batch(seconds, setting.num_sequences, LENGTH, setting.pipeline_parallel, granularity, max_sequences=most)
        for most in (1, None)
    )
    return {"whole sequences": whole.latency, "free": free.latency, "microbatches": free.microbatches}
