"""Published steps on clusters, each predicted as `slipstream plan` would, or with the reason why it can't be.

    python -m benchmarks.papers.measured_steps             # predicts all rows and writes the record `measured_steps`

A row is a configuration with its measured step. What the systems that were measured do otherwise than Slipstream is set
here and in `measured_costs`: Megatron reduces gradients behind the last microbatch's backward and gathers weights
behind the first one's forward, FSDP both in every microbatch; kernels are fused, ranks of tensor parallelism share
tokens, and where the system overlaps their exchanges with products, only what can't be hidden counts. Eight and four
bits have the data sheets' rates for products of layers, or measured ones, attention and head not, and what products
read is cast. Products of weight gradients add them up, but torchtitan's; Seq1F1B's timers wait for the device around
each action.
Models with experts have the shapes of their published configurations, and run by their published recipes
(`megatron_experts`); tokens choose all experts alike, as in the measured runs. Fitted are, on every second row, one
factor of the rates for each device, number of bits, and models with experts or without; and for "as described" the
Blackwell devices' matrix products, the host's time to start a layer with experts, and the bandwidth of their rows.
"""

from __future__ import annotations

import argparse
import gc
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Any

import numpy as np

from benchmarks.harness import few, write
from benchmarks.papers.measured_costs import (
    ExpertCosts,
    KorthikantiCosts,
    OverlappedCosts,
    Seq1F1BCosts,
    SpreadHeadCosts,
    TorchtitanCosts,
)
from benchmarks.papers.measured_models import counted, narrowed, with_adapters, with_rotations, with_sums_in_products
from benchmarks.papers.megatron_experts import EXPERTS, Recipe, counted_experts
from benchmarks.papers.paper_plans import PaperSource, PaperSpace
from benchmarks.papers.tables import read, with_dropout
from slipstream.cost import Cluster, CountedCosts, Degrees, ModelCount, StageParts, load_cluster
from slipstream.planner.partition import partition_layers
from slipstream.planner.plan import ONE_DEVICE, Plan
from slipstream.planner.search.evaluate import Evaluation
from slipstream.planner.search.placed_partition import PlacedPartition, sequence_seconds
from slipstream.planner.search.plan_options import PlanOptions
from slipstream.schedule import Op
from slipstream.simulator.memory_account import OrderBytes

CLUSTERS = {
    "A100-80GB": "a100-selene",
    "A100-SXM-80GB": "a100-dgx",
    "H100": "h100-dgx",
    "H100-SXM5-80GB": "h100-dgx",
    "H100-96GB HBM2e 500W (2.4 TB/s)": "h100-96gb",
    "H200-141GB": "h200-hgx",
    "B200": "b200-hgx",
    "B300": "b300-hgx",
    "GB200": "gb200-nvl72",
    "GB300": "gb300-nvl72",
}
NODES_OF_A_RACK = 16  # of 18: jobs of 2^n devices take 64 of a rack's 72
BITS = {"BF16": 16, "FP16": 16, "NVFP4": 4}  # all others have 8
# Dense teraFLOP/s of 8 and of 4 bits, of the data sheets that the descriptions name. But in 4 bits products on a B300
# are 3.55 times as fast as in 16, as Transformer Engine measured them without casts; its data sheet has 6 times.
NARROW = {
    "H100": {8: 1978.9},
    "H200": {8: 1978.9},
    "B200": {8: 4500.0, 4: 9000.0},
    "B300": {8: 4500.0, 4: 3.55 * 2250},
    "GB200": {8: 5000.0, 4: 10000.0},
    "GB300": {8: 5000.0, 4: 3.55 * 2500},
}
SOURCES = {  # where a row's source begins so
    "arXiv 2205.05198": "Korthikanti 2022",
    "mlcommons": "MLPerf",
    "NVIDIA/dgxc": "DGX Cloud",
    "NVIDIA-NeMo": "Megatron-Bridge",
    "pytorch/torchtitan": "torchtitan",
    "zwx119": "Seq1F1B",
    "sail-sg": "Vocabulary Parallelism",
    "arXiv 2407.21783": "Llama 3",
}
OVERLAPS_TENSOR = ("MLPerf", "DGX Cloud", "Megatron-Bridge")  # exchanges of tensor parallelism with products
GRADIENT_BYTES = {"torchtitan": 4.0, "Seq1F1B": 4.0}  # all others reduce in 16 bits
# layers of each stage by vocabulary, of the authors' file of stage times (artifact/exp_one_host.csv)
REDISTRIBUTED = {
    32000: (4, 4, 4, 4, 4, 4, 4, 4),
    64000: (4, 4, 4, 4, 4, 4, 5, 3),
    128000: (4, 4, 4, 4, 4, 5, 5, 2),
    256000: (4, 4, 4, 5, 5, 5, 5, 0),
}
VOCABULARY = 50304  # of Seq1F1B, by the parameters of its stages


@dataclass(frozen=True)
class Row:
    """A measured step: the row of the table as text."""

    text: Mapping[str, str]

    def number(self, name: str, default: int = 1) -> int:
        return int(self.text[name]) if self.text[name] else default

    @property
    def source(self) -> str:
        return next(name for start, name in SOURCES.items() if self.text["source"].startswith(start))

    @property
    def bits(self) -> int:
        return BITS.get(self.text["precision"], 8)

    @property
    def device(self) -> str:
        """The description's name of the device, whose factor the row shares."""
        return CLUSTERS[self.text["gpu"]].replace("a100-selene", "a100-dgx")

    @property
    def kind(self) -> tuple[str, int, bool]:
        """The device, the bits and whether there are experts: rows that share a factor."""
        return self.device, self.bits, self.experts is not None

    @property
    def group(self) -> str:
        shared = ", experts" if self.experts else ", context parallel" if self.number("cp") > 1 else ""
        return f"{self.source}{shared}, {self.bits} bits"

    @property
    def replicas(self) -> int:
        return self.number("dp")

    @property
    def measured(self) -> float:
        """The seconds of the step."""
        if self.text["step_time_s"]:
            return float(self.text["step_time_s"])
        tokens = self.number("gbs") * self.number("seq")
        return tokens / (float(self.text["tokens_per_s_per_gpu"]) * self.number("gpus"))

    @property
    def problem(self) -> str | None:
        """Says why the row can't be expressed; None where it can."""
        if self.text["dense"] != "y" and self.experts is None:
            return "experts beside layers that carry states, or of shapes that transformers doesn't have"
        return None

    @property
    def experts(self) -> str | None:
        """The name of a model with experts in EXPERTS; None without experts, or where their shape isn't known."""
        return next((name for name in EXPERTS if self.text["model"].startswith(name)), None)

    @property
    def assumed(self) -> str | None:
        """Says what is assumed, as neither the row nor its source tells it."""
        if self.experts is not None:
            return "published shapes of the model, without layers that predict several tokens"
        if not self.text["mbs"]:
            return "as many microbatches as stages, torchtitan's default"
        return None

    @property
    def plan(self) -> Plan:
        tensor, pipeline, stages = self.number("tp"), self.number("pp"), self.number("vp")
        if self.text["schedule"] == "interleaved 1F1B" and not self.text["vp"]:
            stages = 2
        per_replica = self.number("gbs") // self.replicas
        size = self.number("mbs") if self.text["mbs"] else max(1, per_replica // (pipeline * stages))
        recompute = "full" if self.text["recompute"] == "full" else "none"
        recompute = "selective" if self.text["recompute"].startswith("selective") else recompute
        return replace(
            ONE_DEVICE,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            data_parallel=self.replicas,
            stages_per_rank=stages if pipeline > 1 else 1,
            schedule="interleaved-1f1b" if stages > 1 and pipeline > 1 else "1f1b",
            microbatch_size=size,
            num_slices=self.number("token_slices"),
            recompute=recompute,
            shard="optimizer" if self.replicas * self.number("cp") > 1 else "none",
            context_parallel=self.number("cp"),
            # one row spreads experts over ranks that share layers, too, which counts as spread over the others
            expert_parallel=min(self.number("ep"), self.replicas * self.number("cp")) if self.experts else 1,
        )

    @cached_property
    def model(self) -> ModelCount:
        is_fused = self.source != "torchtitan" or "compile" in self.text["note"]
        if self.experts is not None:
            predicts_second = self.experts == "DeepSeekV3" and "w/o MTP" not in self.text["model"]
            model = counted_experts(self.experts, self.number("seq"), self.recipe, predicts_second)
        else:
            shape = [self.number(name) for name in ("hidden", "heads", "kv_heads", "ffn", "layers")]
            kind = "llama" if self.text["gated"] == "1" else "nemotron" if "Nemotron" in self.text["model"] else "gpt"
            rest = self.number("vocab", VOCABULARY), self.number("seq"), is_fused
            model = counted(kind, *shape, *rest)
            if "LoRA" in self.text["use"]:
                model = with_adapters(model, counted(kind, *shape, *rest, True))
            model = with_rotations(model) if self.source == "Seq1F1B" else model
            # Seq1F1B drops nothing, but the functions that add residuals make masks all the same
            model = with_dropout(model) if self.source in ("Korthikanti 2022", "Seq1F1B") else model
        model = model if self.source == "torchtitan" else with_sums_in_products(model)
        if self.bits == 16:
            return model
        return narrowed(model, self.narrow_rate, self.bits / 16)

    @property
    def narrow_rate(self) -> float:
        """How many times as fast as in 16 bits the products of layers are."""
        if self.bits == 16:
            return 1.0
        rate = NARROW[self.device.split("-")[0].upper()][self.bits]
        return 1e12 * rate / load_cluster(self.device).device.flops["bfloat16"]

    @cached_property
    def recipe(self) -> Recipe:
        """What a run of a model with experts sets."""
        assert self.experts is not None
        return Recipe.of(self.experts, self.text["gpu"], self.bits, self.text["note"].split()[0])

    def cluster(self, factor: float) -> Cluster:
        """Returns the description of the cluster, with its device's rates times a factor."""
        described = load_cluster(CLUSTERS[self.text["gpu"]])
        per_node = min(described.devices_per_node, self.number("gpus"))
        described = replace(described, num_nodes=self.number("gpus") // per_node, devices_per_node=per_node)
        if described.nodes_per_domain > 1:
            described = replace(described, nodes_per_domain=NODES_OF_A_RACK)
        device = described.device
        names = ("matmul_efficiency", "attention_efficiency")
        return replace(described, device=replace(device, **{name: factor * getattr(device, name) for name in names}))

    def candidate(self, factor: float) -> Evaluation:
        return MeasuredSpace(self.source_at(factor)).evaluate(self.plan)

    def source_at(self, factor: float) -> MeasuredSource:
        return MeasuredSource(self, self.cluster(factor))

    def seconds(self, factor: float = 1.0) -> float:
        """Returns the step's predicted seconds."""
        return self.candidate(factor).seconds


class MeasuredSource(PaperSource):
    """The costs of a row's model on its cluster."""

    def __init__(self, row: Row, cluster: Cluster) -> None:
        super().__init__(row.model, cluster)
        self.row = row

    def costs(self, degrees: Degrees, microbatch_size: int) -> CountedCosts:
        row = self.row
        common = self.model, self.cluster, degrees._replace(exchange="heads"), microbatch_size
        if row.source == "Korthikanti 2022":
            return KorthikantiCosts(*common, sequence_parallel="sequence" in row.text["recompute"])
        per_replica = row.number("gbs") // (row.replicas * microbatch_size)
        more = {
            "sequence_parallel": degrees.tensor > 1,
            "gradient_bytes": GRADIENT_BYTES.get(row.source, 2.0),
            "overlaps_tensor": row.source in OVERLAPS_TENSOR or "async" in row.text["note"].lower(),
            "length": row.number("seq"),
            "num_gathers": 2 * per_replica if row.text["fsdp"] else 1,
        }
        if "vocab-" in row.text["schedule"]:
            return SpreadHeadCosts(*common, **more, num_stages=row.number("pp"))
        if row.experts is not None:
            return ExpertCosts(*common, **more, recipe=row.recipe, narrow_rate=row.narrow_rate)
        if row.source == "Seq1F1B":
            sizes = {"num_slices": row.number("token_slices"), "feed_forward": row.number("ffn")}
            return Seq1F1BCosts(*common, **more, **sizes)
        return (TorchtitanCosts if row.source == "torchtitan" else OverlappedCosts)(*common, **more)


class MeasuredSpace(PaperSpace):
    """The planner's space with a row's stages: as many layers in each, or as many parts of the model, or balanced."""

    def __init__(self, source: MeasuredSource) -> None:
        row = source.row
        super().__init__(source, row.number("seq"), row.number("gbs"), PlanOptions(), equal_operations(row))
        self._of = row

    def cut(self, plan: Plan) -> PlacedPartition:
        return self._equal_layers(plan.degrees, plan.microbatch_size, plan.pipeline_parallel, plan.stages_per_rank)

    def _cut_equally(self, degrees: Degrees, size: int, pipeline: int, stages_per_rank: int) -> PlacedPartition:
        num_layers, num_stages = len(self.source.kinds), pipeline * stages_per_rank
        if num_layers % num_stages == 0 and "redis" not in self._of.text["schedule"]:
            return super()._cut_equally(degrees, size, pipeline, stages_per_rank)
        costs, num_parts = self.costs(degrees, size), num_layers + 2
        if "redis" in self._of.text["schedule"]:
            first, *inner, last = REDISTRIBUTED[self._of.number("vocab")]
            numbers: Sequence[int] = [first + 1, *inner, last + 1]
        elif num_parts % num_stages == 0:  # embedding and head count as a layer each
            numbers = [num_parts // num_stages] * num_stages
        else:
            parts = (StageParts(part, part + 1) for part in range(num_parts))
            weight = cache(lambda part: sequence_seconds(costs, self.seq_len, part))
            numbers = partition_layers([weight(self.alike(part)) for part in parts], num_stages)
        bounds = (0, *map(int, np.cumsum(numbers)))
        return PlacedPartition(costs, tuple(stage % pipeline for stage in range(num_stages)), bounds)


def equal_operations(row: Row) -> tuple[int, ...]:
    """Returns the slices of a row. Seq1F1B's have equally many operations by its own count, which has the head twice
    and softmax as 3 for each score and head."""
    hidden, heads, layers = (row.number(name) for name in ("hidden", "heads", "layers"))
    of_token = layers * (8 * hidden**2 + 4 * hidden * row.number("ffn")) + 4 * hidden * row.number("vocab", VOCABULARY)
    of_score = layers * (4 * hidden + 3 * heads)  # and a token has half as many as its sequence on average
    length, parts, tensor = row.number("seq"), row.number("token_slices"), row.number("tp")
    operations = np.linspace(0, of_token * length + of_score * length**2 / 2, parts + 1)
    ends = (np.sqrt(of_token**2 + 2 * of_score * operations) - of_token) / of_score
    return tuple(map(int, np.diff(tensor * np.round(ends / tensor))))


# --- factors, and what they leave -------------------------------------------------------------------------------------


def rows() -> list[Row]:
    return [Row(text) for text in read("measured_steps")]


def expressible() -> list[Row]:
    """Returns the rows that can be predicted; of rows of one configuration and step the first."""
    found = {tuple(v for k, v in each.text.items() if k not in ("id", "source", "note")): each for each in rows()[::-1]}
    return few([each for each in [*found.values()][::-1] if each.problem is None], 4)  # type: ignore[return-value]


def factor_of(chosen: Sequence[Row], at: Mapping[str, tuple[float, float]]) -> float:
    """Returns the factor of the rates with which the predictions' logarithms are right on average.

    A row's seconds are taken as a straight line over the inverse factor, through those with factors 1 and 0.8.
    """
    from scipy.optimize import brentq

    def off(factor: float) -> float:
        return float(np.mean([np.log(along(at[each.text["id"]], factor) / each.measured) for each in chosen]))

    low, high = 0.2, 3.0
    return float(brentq(off, low, high)) if off(low) > 0 > off(high) else (low if off(low) <= 0 else high)


def along(pair: tuple[float, float], factor: float) -> float:
    one, slower = pair
    return one + (slower - one) * (1 / factor - 1) / (1 / 0.8 - 1)


def report() -> dict[str, Any]:
    """Predicts all rows: without a factor, with one of every second row of a device, and with one of other sources."""
    chosen = expressible()
    at = {each.text["id"]: (each.seconds(), each.seconds(0.8)) for each in chosen}
    kinds: dict[tuple[str, int, bool], list[Row]] = defaultdict(list)
    for each in chosen:
        kinds[each.kind].append(each)
    used = {kind: each[::2] for kind, each in kinds.items()}
    factors = {kind: factor_of(each, at) for kind, each in used.items()}
    found = []
    for each in rows():
        number = each.text["id"]
        about: dict[str, Any] = {
            name: each.text[name] for name in ("id", "model", "gpu", "gpus", "precision", "source")
        }
        about |= {"group": each.group, "device": each.device, "measured": each.measured}
        if number not in at:
            found.append(about | {"not expressed": each.problem or "the same configuration and step as another row"})
            continue
        kind = each.kind
        others = [other for other in kinds[kind] if other.source != each.source]
        predicted = {"as described": at[number][0], "with a factor": along(at[number], factors[kind])}
        if others:
            predicted["with a factor of other sources"] = along(at[number], factor_of(others, at))
        found.append(
            about
            | {"fitted": each in used[kind], "replicas": each.replicas, "assumed": each.assumed}
            | {name: {"seconds": s, "error": s / each.measured - 1} for name, s in predicted.items()}
        )
    return {
        "factors": {
            f"{device}, {bits} bits{', experts' * has_experts}": factor
            for (device, bits, has_experts), factor in factors.items()
        },
        "groups": summaries(found),
        "sources left out": left_out(found),
        "not expressed": reasons(found),
        "llama 3 405b": meta_405b(),
        "allocated": allocated_peaks(),
        "rows": found,
    }


# Llama 3's Table 4: 400 teraFLOP/s a GPU. Stages per rank and recomputation aren't published.
META = {
    **{"model": "Llama3.1 405B", "layers": 126, "hidden": 16384, "heads": 128, "kv_heads": 8, "ffn": 53248, "gated": 1},
    **{"vocab": 128256, "seq": 8192, "gpu": "H100", "gpus": 16384, "precision": "BF16", "tp": 8, "pp": 16, "dp": 128},
    **{"mbs": 1, "gbs": 2048, "source": "arXiv 2407.21783"},
}
META_FLOPS = 400e12


def meta_405b() -> list[dict[str, Any]]:
    """Predicts Llama 3's training of 405B for every number of stages a rank and kind of recomputation: its time, and
    whether it fits a device's memory without headroom."""
    found, blank = [], dict.fromkeys(rows()[0].text, "")
    for stages, recompute in product(range(2, 9), ("none", "selective", "full")):
        given = META | {"vp": stages, "recompute": recompute}
        row = Row(blank | {name: str(value) for name, value in given.items()})
        candidate = row.candidate(1.0)
        source, seconds = row.source_at(1.0), candidate.seconds
        flops = source.peak_seconds(row.number("gbs"), row.number("seq")) * source.cluster.device.flops["bfloat16"]
        measured = flops / (row.number("gpus") * META_FLOPS)
        found.append(
            {"stages a rank": stages, "recompute": recompute, "seconds": seconds, "error": seconds / measured - 1}
            | {"bytes": max(candidate.peaks()), "fits": max(candidate.peaks()) <= source.memory, "measured": measured}
        )
    return found


MOMENT_BYTES = 8  # of a parameter, shared by the replicas


def allocated_peaks() -> list[dict[str, Any]]:
    """Returns what each stage of Seq1F1B had allocated at most in the first step, at whose end the optimizer's moments
    are made, and what the account says without these, with the buffers of all gradients from the start. Nobody else's
    memory is what was allocated."""
    table, peaks, found = {each.text["id"]: each for each in rows()}, {}, []
    for each in few(read("seq1f1b_peaks"), 4):
        row, number, stage = table[each["id"]], each["id"], int(each["stage"])
        if number not in peaks:
            candidate = row.candidate(1.0)
            account = with_keys_by_slice(candidate.bytes, candidate.times.slices)
            buffers = np.bincount(account.arrays.schedule.placement, account.made[0])
            if row.number("tp") > 1:  # one for the inputs that ranks gather
                buffers += 2 * max(candidate.times.slices) * row.number("hidden")
            without = replace(account, made=np.zeros_like(account.made), first=np.full_like(account.first, np.nan))
            peaks[number] = without.rank_peaks() + buffers
        counted = peaks[number][stage] - MOMENT_BYTES / row.replicas * int(each["parameters"])
        measured = float(each["max_allocated_mib"]) * 2**20
        about = {
            "id": number,
            "model": row.text["model"],
            "tokens": row.text["seq"],
            "slices": row.text["token_slices"],
        }
        found.append(about | {"stage": stage, "measured": measured, "bytes": counted, "error": counted / measured - 1})
    return found


def with_keys_by_slice(account: OrderBytes, slices: Sequence[int]) -> OrderBytes:
    """Returns the account with keys and values as Seq1F1B's code holds them.

    A slice but the first joins its own to those before in a new tensor, of which the whole stays until the last
    backward. A backward makes the gradients of all keys that it reads, in place of those of the backward before. And
    the variable that has the output of the last forward before the first backward is never set again: it keeps what
    belongs to its microbatch until the step ends.
    """
    arrays = account.arrays
    is_forward, is_backward = arrays.is_one_of(Op.F), arrays.is_one_of(Op.B)
    read = np.cumsum(slices) / sum(slices)  # the share of the keys that a slice reads
    joined = np.diff(np.append(0.0, read[1:]), prepend=0.0)
    made = np.diff(read[::-1], prepend=0.0)[::-1]
    forwards = arrays.schedule.num_ranks - arrays.rank + len(slices) - 2  # before a rank's first backward
    kept = arrays.microbatch == (forwards - 1) // len(slices)
    freed = (is_backward & (arrays.slice == 0) & ~kept) * (1 + read[0])
    changes = is_forward * joined[arrays.slice] + is_backward * made[arrays.slice] - freed
    # The account has the keys of a microbatch from its first forward, and their gradients from its first backward.
    began = is_forward & (arrays.slice == 0) | is_backward & (arrays.slice == len(slices) - 1)
    peaks = account.peaks + account.context * (is_forward * joined[arrays.slice] - began)
    nothing = np.zeros_like(account.context)
    leaves = account.leaves + account.context * changes
    return replace(account, leaves=leaves, peaks=peaks, context=nothing, context_gradients=nothing)


def reasons(found: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    named = [each["not expressed"] for each in found if "not expressed" in each]
    return {reason: named.count(reason) for reason in dict.fromkeys(named)}


WAYS = ("as described", "with a factor", "with a factor of other sources")


def summaries(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns for each group the mean of errors' sizes, their mean and the worst; and for all rows of 16 bits without
    experts, for all with experts, with context parallelism and without either, and for all."""
    predicted = [each for each in found if "not expressed" not in each]
    named = [[each for each in predicted if word in each["group"]] for word in (", experts", ", context")]
    wide = [each for each in predicted if each["group"].endswith(" 16 bits") and each not in named[0]]
    groups = {name: [each for each in predicted if each["group"] == name] for name in {e["group"] for e in predicted}}
    groups = dict(sorted(groups.items())) | {
        "all of 16 bits": wide,
        "all of 16 bits, without replicas": [each for each in wide if each["replicas"] == 1],
        "all of 16 bits, with replicas": [each for each in wide if each["replicas"] > 1],
        "all of 16 bits, not fitted": [each for each in wide if not each["fitted"]],
        "all with experts": named[0],
        "all with context parallelism": named[1],
        "all others": [each for each in predicted if each not in named[0] and each not in named[1]],
        "all": predicted,
        "all, not fitted": [each for each in predicted if not each["fitted"]],
    }
    return {name: {"rows": len(each)} | _errors(each) for name, each in groups.items() if each}


def left_out(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the errors of each source's rows on each device, with factors of the other sources on it."""
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for each in found:
        if WAYS[2] in each:
            groups[f"{each['group']}, {each['device']}"].append(each)
    return {name: {"rows": len(each)} | _errors(each) for name, each in sorted(groups.items())}


def _errors(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    summary = {}
    for way in WAYS:
        errors = np.array([each[way]["error"] for each in found if way in each])
        if len(errors):
            summary[way] = {
                "rows": len(errors),
                "mean": float(np.abs(errors).mean()),
                "bias": float(errors.mean()),
                "worst": float(np.abs(errors).max()),
            }
    return summary


def show(found: Mapping[str, Any]) -> None:
    for each in found["rows"]:
        if "not expressed" not in each:
            errors = "  ".join(f"{each[way]['error']:+7.1%}" if way in each else " " * 7 for way in WAYS)
            print(f"{each['id']:>4} {each['model'][:22]:22} {each['gpu'][:8]:8} {each['precision']:6} {errors}")
    for name, each in found["groups"].items():
        errors = "  ".join(f"{each[way]['mean']:6.1%} ({each[way]['bias']:+6.1%})" for way in WAYS if way in each)
        print(f"{name:36} {each['rows']:4} {errors}")
    print(found["factors"], found["not expressed"])


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    gc.disable()  # schedules are millions of tuples, none of them in a cycle
    found = report()
    show(found)
    print(f"wrote {write('measured_steps', found)}")


if __name__ == "__main__":
    main()
