"""Published steps on clusters, each predicted as `slipstream plan` would, or with the reason why it can't be.

    python -m benchmarks.papers.measured_steps             # predicts all rows and writes the record `measured_steps`

A row is a configuration with its measured step. What the system that ran it does otherwise than Slipstream is a record
of facts (`benchmarks.papers.systems`); the seconds are those that the planner's `PlanSpace` says of the plan.
Models with experts have the shapes of their published configurations, and run by their published recipes
(`megatron_experts`); tokens choose all experts alike, as in the measured runs. To see how far a description is from
its device, one factor of the rates of dense models is fitted for each device and number of bits: on the rows of half of
the sources, and judged on those of the other half, both ways. For "as described", the Blackwell devices' matrix
products, the host's time to start a layer with experts, and the bandwidth of their rows were fitted on every second
row.
"""

from __future__ import annotations

import argparse
import gc
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Any

import numpy as np

from benchmarks.harness import few, write
from benchmarks.papers.allocated import allocated_peaks
from benchmarks.papers.measured_models import (
    ALL_LORA,
    MEGATRON_LORA,
    counted,
    with_adapters,
    with_own_activation,
    with_rotations,
)
from benchmarks.papers.megatron_experts import EXPERTS, Recipe, counted_experts
from benchmarks.papers.systems import SYSTEMS, with_recipe
from benchmarks.papers.tables import read, with_dropout
from slipstream.cost import Cluster, CountedSource, LinkKind, ModelCount, StageParts, System, load_cluster
from slipstream.planner.partition import partition_layers
from slipstream.planner.plan import ONE_DEVICE, Plan
from slipstream.planner.search.evaluate import Evaluation
from slipstream.planner.search.placed_partition import sequence_seconds
from slipstream.planner.search.plan_options import PlanOptions
from slipstream.planner.search.plan_space import PlanSpace
from slipstream.schedule import Schedule, make_schedule, spread_vocabulary

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
    "H100-SXM5-80GB (HF hopper-prod, 8 a node)": "h100-dgx",
    "H100-SXM5-80GB (DGX)": "h100-dgx",
    "A100-SXM4-80GB, 4x100Gb RoCE a node": "a100-dgx",
}
BETWEEN = {"A100-SXM4-80GB, 4x100Gb RoCE a node": LinkKind(12.5e9, 1e-5, shared_by=2)}  # other nodes' network
NODES_OF_A_RACK = 16  # of 18: jobs of 2^n devices take 64 of a rack's 72
BITS = {"BF16": 16, "FP16": 16, "NVFP4": 4}  # all others have 8
SOURCES = {  # where a row's source begins so
    "arXiv 2205.05198": "Korthikanti 2022",
    "mlcommons": "MLPerf",
    "NVIDIA/dgxc": "DGX Cloud",
    "NVIDIA-NeMo/Automodel": "NeMo Automodel",
    "NVIDIA-NeMo/Megatron-Bridge": "Megatron-Bridge",
    "huggingface.co/nanotron": "nanotron",
    "InternLM/InternEvo": "InternEvo",
    "huggingface/trl": "TRL",
    "AMD-AGI/Primus": "Primus",
    "pytorch/torchtitan": "torchtitan",
    "zwx119": "Seq1F1B",
    "sail-sg": "Vocabulary Parallelism",
    "arXiv 2407.21783": "Llama 3",
}
EAGER_KERNELS = ("torchtitan", "InternEvo")  # norms, activations and rotary embeddings as PyTorch has them
# layers of each stage by vocabulary, of the authors' file of stage times (artifact/exp_one_host.csv)
REDISTRIBUTED = {
    32000: (4, 4, 4, 4, 4, 4, 4, 4),
    64000: (4, 4, 4, 4, 4, 4, 5, 3),
    128000: (4, 4, 4, 4, 4, 5, 5, 2),
    256000: (4, 4, 4, 5, 5, 5, 5, 0),
}
_CHUNK = 2048  # tokens whose logits exist at the same time, where a loss is chunked: assumed
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
        return CLUSTERS.get(self.text["gpu"], self.text["gpu"]).replace("a100-selene", "a100-dgx")

    @property
    def kind(self) -> tuple[str, int]:
        """The device and the bits: dense rows that share a factor."""
        return self.device, self.bits

    @property
    def half(self) -> int:
        """The half of the sources that the row's belongs to: 0 or 1, alternating in the order of their names."""
        return sorted(SOURCES.values(), key=str.lower).index(self.source) % 2

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
        if self.text["gpu"] not in CLUSTERS or not self.text["gbs"]:
            return "devices that aren't described, or a batch that isn't published"
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
        recompute = "full" if self.text["recompute"].startswith("full") else "none"
        recompute = "selective" if self.text["recompute"].startswith("selective") else recompute
        # Nothing else fits 80 GB.
        recompute = "full" if self.source == "NeMo Automodel" and tensor > 1 else recompute
        schedule: str | Schedule = "interleaved-1f1b" if stages > 1 and pipeline > 1 else "1f1b"
        if "vocab-" in self.text["schedule"]:
            # With two barriers between a head's parts, as many microbatches more are on their way as with one barrier.
            ahead = 2 if "vocab-1" in self.text["schedule"] else 1
            schedule = spread_vocabulary(make_schedule("1f1b", pipeline, per_replica // size), ahead=ahead)
        return replace(
            ONE_DEVICE,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            data_parallel=self.replicas,
            stages_per_rank=stages if pipeline > 1 else 1,
            schedule=schedule,
            vocabulary="spread" if isinstance(schedule, Schedule) else "whole",
            microbatch_size=size,
            num_slices=self.number("token_slices"),
            recompute=recompute,
            offload=1.0 if "on the host" in self.text["recompute"] else 0.0,
            loss_tokens=_CHUNK if "chunked loss" in self.text["note"] else 0,
            shard="optimizer" if self.replicas * self.number("cp") > 1 else "none",
            context_parallel=self.number("cp"),
            # one row spreads experts over ranks that share layers, too, which counts as spread over the others
            expert_parallel=min(self.number("ep"), self.replicas * self.number("cp")) if self.experts else 1,
        )

    @cached_property
    def model(self) -> ModelCount:
        is_fused = self.source not in EAGER_KERNELS or "compile" in self.text["note"]
        if self.experts is not None:
            predicts_second = self.experts == "DeepSeekV3" and "w/o MTP" not in self.text["model"]
            model = counted_experts(self.experts, self.number("seq"), self.recipe, predicts_second)
        else:
            shape = [self.number(name) for name in ("hidden", "heads", "kv_heads", "ffn", "layers")]
            kind = "llama" if self.text["gated"] == "1" else "nemotron" if "Nemotron" in self.text["model"] else "gpt"
            rest = self.number("vocab", VOCABULARY), self.number("seq"), is_fused
            model = counted(kind, *shape, *rest)
            if "LoRA" in self.text["use"]:
                is_all = self.source == "NeMo Automodel"
                adapted = counted(kind, *shape, *rest, ALL_LORA if is_all else MEGATRON_LORA)
                model = with_adapters(model, adapted, self.number("ffn") if is_all else 0)
            model = with_rotations(model) if self.source == "Seq1F1B" else model
            model = with_own_activation(model, self.number("ffn")) if self.source == "nanotron" else model
            # Seq1F1B drops nothing, but the functions that add residuals make masks all the same
            model = with_dropout(model) if self.source in ("Korthikanti 2022", "Seq1F1B") else model
        return model

    @cached_property
    def recipe(self) -> Recipe:
        """What a run of a model with experts sets."""
        assert self.experts is not None
        return Recipe.of(self.experts, self.text["gpu"], self.bits, self.text["note"].split()[0])

    def cluster(self, factor: float) -> Cluster:
        """Returns the description of the cluster, with its device's rates times a factor."""
        described = load_cluster(CLUSTERS[self.text["gpu"]])
        described = replace(described, between=BETWEEN.get(self.text["gpu"], described.between))
        per_node = min(described.devices_per_node, self.number("gpus"))
        described = replace(described, num_nodes=self.number("gpus") // per_node, devices_per_node=per_node)
        if described.nodes_per_domain > 1:
            described = replace(described, nodes_per_domain=NODES_OF_A_RACK)
        device = described.device
        names = ("matmul_efficiency", "attention_efficiency")
        return replace(described, device=replace(device, **{name: factor * getattr(device, name) for name in names}))

    @property
    def system(self) -> System:
        """What the system does that ran the step."""
        system = SYSTEMS[self.source]
        if self.experts is not None:
            system = with_recipe(system, self.recipe)
        if re.search(r"(?<!no )async", self.text["note"].lower()):
            system = replace(system, tensor_beside="products")
        if self.text["fsdp"]:
            system = replace(system, replicas=replace(system.replicas, each_microbatch=True))
        if sharing := re.search(r"ZeRO-1 over (\d+)", self.text["note"]):
            system = replace(system, replicas=replace(system.replicas, num_sharing=int(sharing[1])))
        return replace(system, product_bits=self.bits)

    @property
    def shares_tokens(self) -> bool:
        """Whether tensor-parallel ranks share the tokens too."""
        # In 2022 it was new, and compared with runs without it.
        return self.number("tp") > 1 and (self.source != "Korthikanti 2022" or "sequence" in self.text["recompute"])

    def space(self, factor: float) -> PlanSpace:
        """Returns the planner's space of the row's model, cluster and system."""
        cluster = self.cluster(factor)
        source = CountedSource(self.model, cluster, self.text["model"], self.shares_tokens, system=self.system)
        return PlanSpace(source, self.number("seq"), self.number("gbs"), PlanOptions())

    def candidate(self, factor: float) -> Evaluation:
        """Returns what the planner says of the row's plan."""
        space = self.space(factor)
        return space.evaluate(with_cut(self.plan, self, space))

    def seconds(self, factor: float = 1.0) -> float:
        """Returns the step's predicted seconds."""
        return self.candidate(factor).seconds


def with_cut(plan: Plan, row: Row, space: PlanSpace) -> Plan:
    """Returns a row's plan with its stages: as many layers in each, or as many parts of the model, or balanced; and
    with its slices."""
    num_layers, num_stages = len(space.source.kinds), plan.pipeline_parallel * plan.stages_per_rank
    redistributed, num_parts = "redis" in row.text["schedule"], num_layers + 2
    if num_layers % num_stages == 0 and not redistributed and row.source != "nanotron":
        layers = [num_layers // num_stages] * num_stages
    elif redistributed:
        layers = [*REDISTRIBUTED[row.number("vocab")]]
    elif row.source == "nanotron":
        layers = past_thresholds(row, num_stages)
    else:
        parts = [num_parts // num_stages] * num_stages
        if num_parts % num_stages:  # otherwise embedding and head count as a layer each
            costs, length = space.costs(plan.degrees, plan.microbatch_size), row.number("seq")
            weight = cache(lambda part: sequence_seconds(costs, length, part))
            each = [weight(space.alike(StageParts(part, part + 1))) for part in range(num_parts)]
            parts = list(partition_layers(each, num_stages))
        layers = [parts[0] - 1, *parts[1:-1], parts[-1] - 1] if num_stages > 1 else [num_layers]
    return plan.closed(partition=tuple(map(float, layers)), slices=equal_operations(row))


def past_thresholds(row: Row, num_stages: int) -> list[int]:
    """Returns the layers of nanotron's stages: each ends with the part that brings the operations of all parts so far
    above its share, of layers and the head without attention's scores."""
    hidden, head = row.number("hidden"), row.number("vocab") * row.number("hidden")
    layer = 4 * hidden**2 + 3 * hidden * row.number("ffn")
    share = (row.number("layers") * layer + head) / num_stages
    layers = [0] * num_stages
    stage = 0
    for number in range(1, row.number("layers") + 1):
        layers[stage] += 1
        stage += number * layer > (stage + 1) * share
    return layers


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
    return [Row(text) for table in ("measured_steps", "measured_steps_2") for text in read(table)]


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
    """Predicts all rows: without a factor, and dense ones with a factor of either half of the sources."""
    chosen = expressible()
    at = {each.text["id"]: (each.seconds(), each.seconds(0.8)) for each in chosen}
    halves: dict[tuple[str, int, int], list[Row]] = defaultdict(list)
    for each in chosen:
        if each.experts is None:
            halves[*each.kind, each.half].append(each)
    factors = {half: factor_of(each, at) for half, each in halves.items()}
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
        ways = {"fitted": each.half, "judged": 1 - each.half} if each.experts is None else {}
        predicted = {"as described": at[number][0]} | {
            way: along(at[number], factors[*each.kind, half])
            for way, half in ways.items()
            if (*each.kind, half) in factors
        }
        found.append(
            about
            | {"half": each.half, "replicas": each.replicas, "slices": each.number("token_slices")}
            | {"assumed": each.assumed}
            | {name: {"seconds": s, "error": s / each.measured - 1} for name, s in predicted.items()}
        )
    return {
        "factors": [
            {"device": device, "bits": bits, "half": half, "rows": len(halves[device, bits, half]), "factor": factor}
            for (device, bits, half), factor in sorted(factors.items())
        ],
        "groups": summaries(found),
        "not expressed": reasons(found),
        "llama 3 405b": meta_405b(),
        "peaks": published_peaks(chosen),
        "allocated": allocated_peaks({each.text["id"]: each for each in rows()}),
        "rows": found,
    }


def published_peaks(chosen: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the account's bytes of the fullest rank, where those are published of a dense run in 16 bits: but of
    sharded weights, which plans don't count as gone in between, and of spread vocabularies, whose gradients of weights
    the order computes later."""
    found = []
    for each in chosen:
        published = each.text["peak_mem_gb"]
        is_other = each.experts is not None or each.text["fsdp"] or each.plan.vocabulary == "spread"
        if each.bits == 16 and not is_other and published.replace(".", "").isdigit():
            about = {name: each.text[name] for name in ("id", "model", "gpus", "tp", "pp", "cp")}
            predicted, measured = max(each.candidate(1.0).peaks()), 1e9 * float(published)
            found.append(
                about
                | {"source": each.source, "measured": measured, "predicted": predicted}
                | {"error": predicted / measured - 1}
            )
    return found


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
        source, seconds = row.space(1.0).source, candidate.seconds
        flops = source.peak_seconds(row.number("gbs"), row.number("seq")) * source.cluster.device.flops["bfloat16"]
        measured = flops / (row.number("gpus") * META_FLOPS)
        found.append(
            {"stages a rank": stages, "recompute": recompute, "seconds": seconds, "error": seconds / measured - 1}
            | {"bytes": max(candidate.peaks()), "fits": max(candidate.peaks()) <= source.memory, "measured": measured}
        )
    return found


def reasons(found: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    named = [each["not expressed"] for each in found if "not expressed" in each]
    return {reason: named.count(reason) for reason in dict.fromkeys(named)}


WAYS = ("as described", "fitted", "judged")


def summaries(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns for each group the mean of errors' sizes, their mean and the worst; and for all dense rows of 16 and of
    8 bits, by replicas and by halves of the sources, for all with experts, context parallelism or slices, and for all.
    """
    predicted = [each for each in found if "not expressed" not in each]
    named = [[each for each in predicted if word in each["group"]] for word in (", experts", ", context")]
    dense = [each for each in predicted if each not in named[0]]
    wide, narrow = ([each for each in dense if each["group"].endswith(f" {bits} bits")] for bits in (16, 8))
    groups = {name: [each for each in predicted if each["group"] == name] for name in {e["group"] for e in predicted}}
    groups = dict(sorted(groups.items())) | {
        "all of 16 bits": wide,
        "all of 16 bits, without replicas": [each for each in wide if each["replicas"] == 1],
        "all of 16 bits, with replicas": [each for each in wide if each["replicas"] > 1],
        "all of 16 bits, more than 64 replicas": [each for each in wide if each["replicas"] > 64],
        "all of 16 bits, first half of the sources": [each for each in wide if each["half"] == 0],
        "all of 16 bits, second half": [each for each in wide if each["half"] == 1],
        "all of 8 bits": narrow,
        "all with experts": named[0],
        "all with context parallelism": named[1],
        "all with slices": [each for each in predicted if each["slices"] > 1],
        "all others": [each for each in dense if each not in named[1]],
        "all": predicted,
    }
    return {name: {"rows": len(each)} | _errors(each) for name, each in groups.items() if each}


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
    for each in found["factors"]:
        print(each)
    print(found["not expressed"])


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    gc.disable()  # schedules are millions of tuples, none of them in a cycle
    found = report()
    show(found)
    print(f"wrote {write('measured_steps', found)}")


if __name__ == "__main__":
    main()
