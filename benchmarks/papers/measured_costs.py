"""The costs of the systems whose steps others published, where they differ from Slipstream's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from benchmarks.papers.megatron_experts import EAGER, Recipe
from benchmarks.papers.unfused_attention import UnfusedCosts
from slipstream.array_types import Floats
from slipstream.cost import ActionBytes, AttentionCall, CountedCosts, OpCount, PartCount, Sharing, Stage, Update, Work
from slipstream.schedule import Op


@dataclass(frozen=True)
class OverlappedCosts(CountedCosts):
    """Costs of Megatron and of FSDP: exchanges run behind what computes."""

    gradient_bytes: float = 2.0
    overlaps_tensor: bool = False
    length: int = 0
    num_gathers: int = 1  # of the weights in a step: FSDP's are two for each microbatch

    def exchange_seconds(self, way: str, part: PartCount, op: Op, length: Any) -> Any:
        """Returns what isn't hidden of all-reduces: the first of as many pieces as there are ranks, and what takes
        longer than the products beside which it runs. Experts' exchanges are those of `expert_seconds`."""
        if way == "experts":
            return self.expert_seconds(part, length) if op in (Op.F, Op.R, Op.I) else 0.0
        whole = super().exchange_seconds(way, part, op, length)
        if way != "tensor" or not self.overlaps_tensor or not part.attentions:
            return whole
        tokens = self.sharing.tokens(length)
        products = self.product_seconds(part, part.ops[Op.F if op is Op.R else op], tokens)
        return np.maximum(whole / self.degrees.tensor, whole - products)

    def expert_seconds(self, part: PartCount, length: Any) -> Any:
        """Returns the time of exchanges that send a token once to every device that has some of its experts, and once
        to every node, whose devices pass it on: of k experts on n devices it is n (1 - (1 - 1/n)^k) of them."""
        if not part.experts_per_token:
            return 0.0
        cluster, size = self.cluster, self.degrees.experts
        num_nodes = max(1, size * self.degrees.tensor // cluster.devices_per_domain)
        reached = [n * (1 - (1 - 1 / n) ** part.experts_per_token) for n in (size, num_nodes)]
        token = self.sharing.tokens(length) * self.model.hidden_size * self.model.dtype_bytes / self.degrees.tensor
        inside = token * reached[0] / cluster.inside.rate() * (1 - 1 / size)
        across = token * reached[1] / cluster.between.rate(cluster.devices_per_node) * (1 - 1 / num_nodes)
        return 2 * (cluster.between.latency * (num_nodes > 1) + np.maximum(inside, across)) * (size > 1)

    def gradient_seconds(self, layers: Stage, update: Update) -> float:
        whole = self.between_copies(layers, self.gradient_bytes, update.copies)
        return self._exposed(layers, Op.B, whole, (self.num_gathers + 1) // 2)

    def gather_seconds(self, layers: Stage, update: Update) -> float:
        whole = super().gather_seconds(layers, update)
        return self.num_gathers * self._exposed(layers, Op.F, whole, 1)

    def _exposed(self, layers: Stage, op: Op, whole: float, times: int) -> float:
        """Returns the seconds of an exchange beyond the pass of a microbatch beside which it runs, at least those of a
        layer, which nothing hides."""
        hidden = float(self.seconds(layers, op, self.length, 0))
        return times * max(whole / max(1, len(self.parts_of(layers))), whole - hidden)


class KorthikantiCosts(UnfusedCosts):
    """Costs of 2022, whose selective recomputation is that of attention's scores."""

    def exchange_seconds(self, way: str, part: PartCount, op: Op, length: Any) -> Any:
        """Returns what isn't hidden. In the backward the sums of input gradients run beside the products of the weight
        gradient; where ranks share tokens, the gathering of output gradients, half of it all, runs beside nothing."""
        whole = super().exchange_seconds(way, part, op, length)
        if way != "tensor" or op is not Op.I or not part.attentions:
            return whole
        ahead = whole / 2 if self.sequence_parallel else 0.0
        products = self.product_seconds(part, part.ops[Op.W], self.sharing.tokens(length))
        return ahead + np.maximum(0.0, whole - ahead - products)

    def fixed_seconds(self, work: Work) -> Floats:
        """Returns the seconds of an action besides its parts: of a replay none, as it is part of the backward."""
        fixed = super().fixed_seconds(work)
        return 0 * fixed if work.op is Op.R else fixed

    def part_selective_replay(self, part: PartCount, length: Any, context: Any) -> Any:
        return sum(self.attention_seconds(call, Op.F, length, context) for call in part.attentions)


# FlashAttention-2's time over that of cuDNN's attention, on a Hopper from 32,768 tokens on (the record gpu_attention)
FLASH_2 = 1.65


@dataclass(frozen=True)
class TorchtitanCosts(OverlappedCosts):
    """Costs of FlashAttention-2, the only kernel that torchtitan took on a Hopper (its pull request 1196), and of
    selective recomputation that computes every second matrix product again."""

    def attention_seconds(self, call: AttentionCall, op: Op, length: Any, context: Any) -> Any:
        return FLASH_2 * super().attention_seconds(call, op, length, context)

    def part_selective_replay(self, part: PartCount, length: Any, context: Any) -> Any:
        scores = sum(self.attention_seconds(call, Op.F, length, context) for call in part.attentions)
        kernels = super().part_selective_replay(part, length, context)
        return kernels + (self.part_seconds(part, Op.F, length, context) - scores - kernels) / 2


@dataclass(frozen=True)
class SpreadHeadCosts(OverlappedCosts):
    """Costs where every stage has its share of embedding and head, as the vocabulary is spread over them: two more
    actions forward, and two backward."""

    num_stages: int = 1

    def part_seconds(self, part: PartCount, op: Op, length: Any, context: Any) -> Any:
        return (
            0.0 if part in (self.model.embedding, self.model.head) else super().part_seconds(part, op, length, context)
        )

    def fixed_seconds(self, work: Work) -> Floats:
        """Returns the seconds of an action with its share of the ends, and of two more but for W."""
        ends = (self.model.embedding, self.model.head)
        ops = (Op.I, Op.W) if work.op is Op.B else (work.op,)
        spread = sum(
            super(SpreadHeadCosts, self).part_seconds(part, op, work.lengths, work.contexts)
            for part in ends
            for op in ops
        )
        more = 0 if work.op is Op.W else 2 * self.cluster.device.action_seconds
        fixed: Floats = super().fixed_seconds(work) + spread / self.num_stages + more
        return fixed


_GELU_TENSORS = 7  # that its backward holds, of those as wide as its input, before any is freed


class _GatheringAgain(Sharing):
    def wide_activation_bytes(self, part: PartCount, wide: float) -> float:
        return wide / self.divided.wide


@dataclass(frozen=True)
class Seq1F1BCosts(OverlappedCosts):
    """Costs of Seq1F1B's runs, by its code and logs. Its timers wait for the device before and after each action: the
    host starts no kernel ahead, so what that takes it adds up."""

    num_slices: int = 1
    feed_forward: int = 0

    def part_seconds(self, part: PartCount, op: Op, length: Any, context: Any) -> Any:
        seconds, host = super().part_seconds(part, op, length, context), self._host_seconds(part, op)
        # A whole backward is the sum of its halves, each of which has brought the host's time of one.
        return seconds - host if op is Op.B else seconds + host

    @cached_property
    def sharing(self) -> Sharing:
        """Megatron's sharing, which gathers the inputs of products again in the backward."""
        return _GatheringAgain(self.model, self.degrees, self.microbatch_size, self.sequence_parallel)

    @cached_property
    def each_context(self) -> Floats:
        """The bytes of keys and values of all slices in one tensor; each slice's own are among its activations."""
        whole = self.microbatch_size * self._each(self.sharing.keys_bytes)
        return whole if self.num_slices > 1 else 0 * whole

    @cached_property
    def each_context_gradient(self) -> Floats:
        """The bytes of their gradients, which are added up in 16 bits."""
        return self.each_context

    def action_bytes(self, layers: Stage, length: int) -> ActionBytes:
        """Returns the bytes of actions. TorchScript fuses nothing: so much of GELU's backward is there at once, less
        its output, which is freed before. The loss's F has the logits in 16 bits and twice in 32, of which it keeps
        one, in whose place its backward makes their gradient, and then another one in 16 bits."""
        counted, tokens = super().action_bytes(layers, length), self.sharing.tokens(length)
        gradient = tokens * self.model.hidden_size * self.model.dtype_bytes
        wide = tokens * self.feed_forward * self.model.dtype_bytes / self.degrees.tensor
        logits = self.logits_gradient_bytes(layers, length)
        most = max(counted.peaks[Op.B] - logits / 2, gradient + (_GELU_TENSORS - 1) * wide)
        return replace(counted, peaks={**counted.peaks, Op.F: counted.peaks[Op.F] + 1.5 * logits, Op.B: most})


# Seconds in which a host starts a layer's kernels where there are experts, forward and backward each, by what CUDA
# graphs replay, and those of an expert; and how much longer it takes where two microbatches run beside each other.
LAUNCH_SECONDS = {"none": 3.6e-3, "router": 3.0e-3, "attention": 2.0e-3}
EXPERT_LAUNCH_SECONDS = 8e-5
LAUNCHES_OF_OVERLAP = 1.55
_ROWS = 64  # half a tile, which each expert's rows don't fill


@dataclass(frozen=True)
class ExpertCosts(OverlappedCosts):
    """Costs of Megatron's runs of models with experts, as their recipe says."""

    recipe: Recipe = EAGER
    narrow_rate: float = 1.0  # of products of layers, over that of 16 bits

    def part_seconds(self, part: PartCount, op: Op, length: Any, context: Any) -> Any:
        """Returns the time of kernels and exchanges, or that in which the host starts them: it waits for the numbers of
        rows of each expert, so that it isn't ahead of the device."""
        seconds = super().part_seconds(part, op, length, context)
        if op is Op.B or not part.experts_per_token:
            return seconds
        passes = 1 if op in (Op.F, Op.R) else 1 / 2  # I and W are half a backward each
        if self.recipe.overlap:  # exchanges run beside what another microbatch computes
            exchange = self.expert_seconds(part, length)
            seconds = np.maximum(seconds - (0 if op is Op.W else exchange), passes * exchange)
        if self.recipe.graphs == "step":
            return seconds
        launches = LAUNCH_SECONDS[self.recipe.graphs]
        launches += EXPERT_LAUNCH_SECONDS * part.num_experts / self.degrees.experts
        launches *= LAUNCHES_OF_OVERLAP if self.recipe.overlap else 1.0
        return np.maximum(seconds, passes * launches)

    def product_seconds(self, part: PartCount, count: OpCount, tokens: Any) -> Any:
        seconds = super().product_seconds(part, count, tokens)
        if count is part.ops[Op.W]:
            return seconds
        rate = self.cluster.device.matmul_flops(self.model.dtype) * self.narrow_rate
        return seconds + 2 * _ROWS * part.num_in_experts / self.degrees.experts / rate

    def attention_seconds(self, call: AttentionCall, op: Op, length: Any, context: Any) -> Any:
        """Returns the time of scores; in 8 bits their products, whose share of it is the efficiency, take half."""
        seconds = super().attention_seconds(call, op, length, context)
        share = self.cluster.device.attention_efficiency if self.recipe.attention_bits == 8 else 0.0
        return seconds * (1 - share / 2)

    def expert_seconds(self, part: PartCount, length: Any) -> Any:
        if self.recipe.dispatcher == "flex":
            return super().expert_seconds(part, length)
        return CountedCosts.exchange_seconds(self, "experts", part, Op.F, length)
