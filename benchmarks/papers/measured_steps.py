"""Published steps on clusters, each predicted as `slipstream plan` would, or with the reason why it can't be.

    python -m benchmarks.papers.measured_steps             # predicts all rows and writes the record `measured_steps`

A row is a configuration with its measured step. What the systems that were measured do otherwise than Slipstream is set
here: Megatron reduces gradients behind the last microbatch's backward and gathers weights behind the first one's
forward, FSDP both in every microbatch; kernels are fused, ranks of tensor parallelism share tokens, and where the
system overlaps their exchanges with products, only what can't be hidden counts. Eight and four bits have the data
sheets' rates for products of layers, attention and head not. Products of weight gradients add them up, but
torchtitan's; Seq1F1B's timers wait for the device around each action. Models with experts have the shapes of their
published configurations, and tokens choose all experts alike, as in the measured runs; a token is sent once to every
node that has some of its experts. Nothing is fitted but one factor of the rates for each device, number of bits, and
models with experts or without, on every second row.
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
from benchmarks.papers.paper_plans import PaperSource, PaperSpace
from benchmarks.papers.tables import read
from benchmarks.papers.unfused_attention import UnfusedCosts
from slipstream.cost import (
    Amount,
    AnalyticCosts,
    Cluster,
    Degrees,
    ModelCount,
    PartCount,
    Stage,
    StageParts,
    load_cluster,
)
from slipstream.planner.partition import partition_layers
from slipstream.planner.plans import Configuration
from slipstream.planner.search.bounds import PlacedPartition
from slipstream.planner.search.plan_options import PlanOptions
from slipstream.planner.search.plan_space import sequence_seconds
from slipstream.planner.search.simulated_configuration import SimulatedConfiguration
from slipstream.schedule import Op

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
# dense teraFLOP/s of 8 and of 4 bits, of the data sheets that the descriptions name
NARROW = {
    "H100": {8: 1978.9},
    "H200": {8: 1978.9},
    "B200": {8: 4500.0, 4: 9000.0},
    "B300": {8: 4500.0, 4: 13500.0},
    "GB200": {8: 5000.0, 4: 10000.0},
    "GB300": {8: 5000.0, 4: 15000.0},
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
LORA_RANK = 32  # Megatron-Bridge's default, on all four products of a layer
VOCABULARY = 51200  # of a GPT where the row doesn't say


_QWEN3 = {"head_dim": 128, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936}
_GPT_OSS = {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 128, "num_experts_per_tok": 4}
_GPT_OSS |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088}
_DEEPSEEK = {"hidden_size": 7168, "moe_intermediate_size": 2048, "num_experts_per_tok": 8, "first_k_dense_replace": 1}
_DEEPSEEK |= {"intermediate_size": 18432, "n_shared_experts": 1}
_V3 = {"num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256, "vocab_size": 129280}
_K2 = {"num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "vocab_size": 163840}
_K2 |= {"n_group": 1, "topk_group": 1}
# Models with experts, by how the table's names begin: their type in transformers, which of two layers each layer is
# like, and the sizes of their published configurations.
EXPERTS: dict[str, tuple[str, tuple[int, ...], dict[str, int]]] = {
    "Qwen3_30B": (
        "qwen3_moe", (0,) * 48, _QWEN3 | {"hidden_size": 2048, "num_attention_heads": 32, "moe_intermediate_size": 768}
    ),
    "Qwen3_235B": (
        "qwen3_moe", (0,) * 94, _QWEN3 | {"hidden_size": 4096, "num_attention_heads": 64, "moe_intermediate_size": 1536}
    ),
    "GPT OSS 120B": ("gpt_oss", (0, 1) * 18, _GPT_OSS),
    "DeepSeekV3": ("deepseek_v3", (0,) * 3 + (1,) * 58, _DEEPSEEK | _V3),
    "Kimi_K2": ("deepseek_v3", (0,) + (1,) * 60, _DEEPSEEK | _K2),
}  # fmt: skip


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
        if not self.text["vocab"]:
            return f"a vocabulary of {VOCABULARY}"
        return None

    @property
    def configuration(self) -> Configuration:
        tensor, pipeline, stages = self.number("tp"), self.number("pp"), self.number("vp")
        if self.text["schedule"] == "interleaved 1F1B" and not self.text["vp"]:
            stages = 2
        per_replica = self.number("gbs") // self.replicas
        size = self.number("mbs") if self.text["mbs"] else max(1, per_replica // (pipeline * stages))
        recompute = "full" if self.text["recompute"] == "full" else "none"
        recompute = "selective" if self.text["recompute"].startswith("selective") else recompute
        return Configuration(
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            data_parallel=self.replicas,
            stages_per_rank=stages if pipeline > 1 else 1,
            schedule="interleaved-1f1b" if stages > 1 and pipeline > 1 else "1f1b",
            microbatch_size=size,
            num_slices=self.number("token_slices"),
            recompute=recompute,
            offload=0.0,
            shard="optimizer" if self.replicas * self.number("cp") > 1 else "none",
            context_parallel=self.number("cp"),
            # one row spreads experts over ranks that share layers, too, which counts as spread over the others
            expert_parallel=min(self.number("ep"), self.replicas * self.number("cp")) if self.experts else 1,
        )

    @cached_property
    def model(self) -> ModelCount:
        is_fused = self.source != "torchtitan" or "compile" in self.text["note"]
        if self.experts is not None:
            model = counted_experts(self.experts, self.number("seq"))
        else:
            shape = [self.number(name) for name in ("hidden", "heads", "kv_heads", "ffn", "layers")]
            kind = "llama" if self.text["gated"] == "1" else "nemotron" if "Nemotron" in self.text["model"] else "gpt"
            kind = "gpt with dropout" if self.source == "Korthikanti 2022" else kind
            rest = self.number("vocab", VOCABULARY), self.number("seq"), is_fused, "LoRA" in self.text["use"]
            model = counted(kind, *shape, *rest)
        model = model if self.source == "torchtitan" else with_sums_in_products(model)
        if self.bits == 16:
            return model
        rate = NARROW[self.device.split("-")[0].upper()][self.bits]
        return narrowed(model, 1e12 * rate / load_cluster(self.device).device.flops["bfloat16"], self.bits / 16)

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

    def candidate(self, factor: float) -> SimulatedConfiguration:
        source = MeasuredSource(self, self.cluster(factor))
        return SimulatedConfiguration.of(MeasuredSpace(source), self.configuration)

    def seconds(self, factor: float = 1.0) -> float:
        """Returns the step's predicted seconds."""
        return self.candidate(factor).step()[0]


@cache
def counted(
    kind: str,
    hidden: int,
    heads: int,
    key_heads: int,
    feed_forward: int,
    layers: int,
    vocabulary: int,
    length: int,
    fused: bool = True,
    with_lora: bool = False,
) -> ModelCount:
    """Counts a model of whole layers. But for the first, which may have nothing to train below it, they are alike, so
    that two of them are enough."""
    import torch
    from peft import LoraConfig
    from transformers import GPT2Config, LlamaConfig, NemotronConfig

    from slipstream.model.adapters import Adapter, TrainedWeights
    from slipstream.profile import count_model

    config: Any
    if kind.startswith("gpt"):
        sizes = {"n_embd": hidden, "n_head": heads, "n_inner": feed_forward, "n_positions": length, "n_layer": 2}
        sizes |= {} if "dropout" in kind else {"resid_pdrop": 0, "embd_pdrop": 0}
        config = GPT2Config(**sizes, vocab_size=vocabulary, use_cache=False, tie_word_embeddings=False)
    else:
        config = {"llama": LlamaConfig, "nemotron": NemotronConfig}[kind](
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            intermediate_size=feed_forward,
            num_hidden_layers=2,
            vocab_size=vocabulary,
            max_position_embeddings=length,
            use_cache=False,
        )
    lora = Adapter("default", LoraConfig(r=LORA_RANK, target_modules="all-linear"))
    trained = TrainedWeights(adapter=lora if with_lora else None)
    model = count_model(config, length, torch.bfloat16, trained, fused=fused)
    return replace(model, kinds=(model.kinds[0], *model.kinds[1:] * (layers - 1)), halves=())


def with_sums_in_products(model: ModelCount) -> ModelCount:
    """Returns the model whose products of weight gradients add to those that are there, as Megatron's do, where
    Slipstream's are added by kernels of their own: bytes that don't grow with the tokens."""

    def part(layer: PartCount) -> PartCount:
        count = layer.ops[Op.W]
        moved = {name: Amount(0.0, getattr(count, name).per_token) for name in ("wide_bytes", "other_bytes")}
        return replace(layer, ops={**layer.ops, Op.W: replace(count, **moved)})

    return replace(model, layers=tuple(map(part, model.layers)), head=part(model.head))


@cache
def counted_experts(name: str, length: int) -> ModelCount:
    """Counts a model of EXPERTS, of whole layers."""
    import torch
    from transformers import AutoConfig

    from slipstream.profile import count_model

    model_type, kinds, sizes = EXPERTS[name]
    sizes = sizes | {"num_hidden_layers": 2, "max_position_embeddings": length}
    config = AutoConfig.for_model(model_type, **sizes, use_cache=False, tie_word_embeddings=False)
    model = count_model(config, length, torch.bfloat16, fused=True)
    return replace(model, kinds=tuple(model.kinds[kind] for kind in kinds), halves=())


def narrowed(model: ModelCount, rate: float, size: float) -> ModelCount:
    """Returns the model whose layers' products are `rate` times as fast and read and write `size` times the bytes."""

    def times(amount: Amount, factor: float) -> Amount:
        return Amount(factor * amount.constant, factor * amount.per_token)

    def part(layer: PartCount) -> PartCount:
        ops = {
            op: replace(count, flops=times(count.flops, 1 / rate), matmul_bytes=times(count.matmul_bytes, size))
            for op, count in layer.ops.items()
        }
        return replace(layer, ops=ops)

    return replace(model, layers=tuple(map(part, model.layers)))


@dataclass(frozen=True)
class MeasuredCosts(AnalyticCosts):
    """Costs of Megatron and of FSDP: exchanges run behind what computes."""

    gradient_bytes: float = 2.0
    overlaps_tensor: bool = False
    length: int = 0
    num_gathers: int = 1  # of the weights in a step: FSDP's are two for each microbatch

    def _part_reduce_seconds(self, part: PartCount, op: Op, length: Any) -> Any:
        """Returns what isn't hidden: the first of as many pieces as there are ranks, and what takes longer than the
        products beside which it runs."""
        whole = super()._part_reduce_seconds(part, op, length)
        if not self.overlaps_tensor or not part.attentions:
            return whole
        tokens = self._tokens(length)
        products = self.product_seconds(part, part.ops[Op.F if op is Op.R else op], tokens)
        return np.maximum(whole / self.tensor_parallel, whole - products)

    def _part_expert_seconds(self, part: PartCount, length: Any) -> Any:
        """Returns the time of exchanges that send a token once to every device that has some of its experts, and once
        to every node, whose devices pass it on: of k experts on n devices it is n (1 - (1 - 1/n)^k) of them."""
        if not part.experts_per_token:
            return 0.0
        cluster, size = self.cluster, self.expert_parallel
        num_nodes = max(1, size * self.tensor_parallel // cluster.devices_per_domain)
        reached = [n * (1 - (1 - 1 / n) ** part.experts_per_token) for n in (size, num_nodes)]
        token = self._tokens(length) * self.model.hidden_size * self.model.dtype_bytes / self.tensor_parallel
        inside = token * reached[0] / cluster.inside.rate() * (1 - 1 / size)
        across = token * reached[1] / cluster.between.rate(cluster.devices_per_node) * (1 - 1 / num_nodes)
        return 2 * (cluster.between.latency * (num_nodes > 1) + np.maximum(inside, across)) * (size > 1)

    def gradient_seconds(self, layers: Stage, copies: int, shards: int = 1) -> float:
        whole = self._between_copies(layers, self.gradient_bytes, copies)
        return self._exposed(layers, Op.B, whole, (self.num_gathers + 1) // 2)

    def gather_seconds(self, layers: Stage, shards: int) -> float:
        whole = super().gather_seconds(layers, shards)
        return self.num_gathers * self._exposed(layers, Op.F, whole, 1)

    def _exposed(self, layers: Stage, op: Op, whole: float, times: int) -> float:
        """Returns the seconds of an exchange beyond the pass of a microbatch beside which it runs, at least those of a
        layer, which nothing hides."""
        hidden = float(self.seconds(layers, op, self.length, 0))
        return times * max(whole / max(1, len(self.parts_of(layers))), whole - hidden)


class KorthikantiCosts(UnfusedCosts):
    """Costs of 2022, whose selective recomputation is that of attention's scores."""

    def _part_reduce_seconds(self, part: PartCount, op: Op, length: Any) -> Any:
        """Returns what isn't hidden. In the backward the sums of input gradients run beside the products of the weight
        gradient; where ranks share tokens, the gathering of output gradients, half of it all, runs beside nothing."""
        whole = super()._part_reduce_seconds(part, op, length)
        if op is not Op.I or not part.attentions:
            return whole
        ahead = whole / 2 if self.sequence_parallel else 0.0
        products = self.product_seconds(part, part.ops[Op.W], self._tokens(length))
        return ahead + np.maximum(0.0, whole - ahead - products)

    def replay_seconds(self, layers: Stage, recompute: str, length: Any, context: Any) -> Any:
        if recompute != "selective":
            return super().replay_seconds(layers, recompute, length, context)
        counted = self.model.counted(layers)
        return sum(n * self.attention_seconds(c, Op.F, length, context) for n, part in counted for c in part.attentions)


@dataclass(frozen=True)
class TorchtitanCosts(MeasuredCosts):
    """Costs of selective recomputation that computes every second matrix product again."""

    def replay_seconds(self, layers: Stage, recompute: str, length: Any, context: Any) -> Any:
        if recompute != "selective":
            return super().replay_seconds(layers, recompute, length, context)
        counted = self.model.counted(layers)
        scores = sum(n * self.attention_seconds(c, Op.F, length, context) for n, p in counted for c in p.attentions)
        kernels = super().replay_seconds(layers, recompute, length, context)
        return kernels + (self.seconds(layers, Op.F, length, context) - scores - kernels) / 2


@dataclass(frozen=True)
class SpreadHeadCosts(MeasuredCosts):
    """Costs where every stage has its share of embedding and head, as the vocabulary is spread over them: two more
    actions forward, and two backward."""

    num_stages: int = 1

    def part_seconds(self, part: PartCount, op: Op, length: Any, context: Any) -> Any:
        return (
            0.0 if part in (self.model.embedding, self.model.head) else super().part_seconds(part, op, length, context)
        )

    def seconds(self, layers: Stage, op: Op, length: Any, context: Any) -> Any:
        ends = (self.model.embedding, self.model.head)
        ops = (Op.I, Op.W) if op is Op.B else (op,)
        spread = sum(super(SpreadHeadCosts, self).part_seconds(p, o, length, context) for p in ends for o in ops)
        seconds = super().seconds(layers, op, length, context) + spread / self.num_stages
        return seconds + (0 if op is Op.W else 2 * self.cluster.device.action_seconds)


class TimedCosts(MeasuredCosts):
    """Costs of a run whose timers wait for the device before and after each action: the host starts no kernel ahead, so
    what that takes it adds up."""

    def seconds(self, layers: Stage, op: Op, length: Any, context: Any) -> Any:
        host = sum(number * self._host_seconds(part, op) for number, part in self.model.counted(layers))
        return super().seconds(layers, op, length, context) + host


class MeasuredSource(PaperSource):
    """The costs of a row's model on its cluster."""

    def __init__(self, row: Row, cluster: Cluster) -> None:
        super().__init__(row.model, cluster)
        self.row = row

    def costs(self, degrees: Degrees, microbatch_size: int) -> AnalyticCosts:
        row, common = self.row, (self.model, self.cluster, degrees.tensor, microbatch_size)
        if row.source == "Korthikanti 2022":
            return KorthikantiCosts(*common, sequence_parallel="sequence" in row.text["recompute"])
        per_replica = row.number("gbs") // (row.replicas * microbatch_size)
        more = {
            "sequence_parallel": degrees.tensor > 1,
            "context_parallel": degrees.context,
            "expert_parallel": degrees.experts,
            "gradient_bytes": GRADIENT_BYTES.get(row.source, 2.0),
            "overlaps_tensor": row.source in OVERLAPS_TENSOR or "async" in row.text["note"].lower(),
            "length": row.number("seq"),
            "num_gathers": 2 * per_replica if row.text["fsdp"] else 1,
        }
        if "vocab-" in row.text["schedule"]:
            return SpreadHeadCosts(*common, **more, num_stages=row.number("pp"))
        kinds = {"torchtitan": TorchtitanCosts, "Seq1F1B": TimedCosts}
        return kinds.get(row.source, MeasuredCosts)(*common, **more)


class MeasuredSpace(PaperSpace):
    """The planner's space with a row's stages: as many layers in each, or as many parts of the model, or balanced."""

    def __init__(self, source: MeasuredSource) -> None:
        row = source.row
        slices = (row.number("seq"),) if row.number("token_slices") == 1 else None
        super().__init__(source, row.number("seq"), row.number("gbs"), PlanOptions(), slices)
        self._of = row

    def cut(self, configuration: Configuration) -> PlacedPartition:
        return self._equal_layers(
            configuration.degrees,
            configuration.microbatch_size,
            configuration.pipeline_parallel,
            configuration.stages_per_rank,
        )

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
        about |= {"group": each.group, "measured": each.measured}
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
        "not expressed": reasons(found),
        "llama 3 405b": meta_405b(),
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
        source, seconds = candidate.space.source, candidate.step()[0]
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
