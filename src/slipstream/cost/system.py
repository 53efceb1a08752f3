"""What training systems do differently, as far as the seconds and bytes of a step depend on it.

A `System` is a record of facts that a system's code or its authors say; `SLIPSTREAM` is the entry of this library.
Counted costs (`slipstream.cost.counted`) ask their system wherever systems differ, so that a plan and a prediction of
somebody else's run are computed by the same functions:

    kernels      how fast attention is, and whether it writes its scores; whether products of weight gradients add them
                 up; in how many bits products compute
    passes       whether a backward is one action; what selective recomputation repeats; whether the host runs ahead
    exchanges    what hides those of tensor parallelism, of experts and of replicas, and in which type gradients travel
    state        what is kept of a parameter
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType
from typing import Literal

from slipstream.cost.cluster import Device
from slipstream.cost.operation_counts import Amount, ModelCount, OpCount, PartCount
from slipstream.cost.update import StateBytes
from slipstream.schedule import Op

_NARROW_FORMATS: Mapping[int, str] = MappingProxyType({8: "float8", 4: "float4"})


@dataclass(frozen=True)
class ReplicaExchange:
    """How ranks with the same weights exchange gradients and updated weights.

    Args:
        gradient_bytes: of a gradient that is reduced. None: as the format of the weights keeps it.
        beside_passes: whether gradients travel while the last microbatch's backward computes, layer after layer, and
            weights while the first one's forward does. Otherwise both take time of their own.
        each_microbatch: whether weights are gathered for every pass of every microbatch, and gradients reduced after
            each, as FSDP does, in place of once a step.
        bucket_bytes: of an exchange of several tensors, of which there are as many as it takes; a larger tensor has one
            for itself.
        num_sharing: ranks that share the optimizer's state, next to each other: they reduce gradients and gather
            weights among themselves, and gradients are summed over such groups. None: all that have the same weights.
    """

    gradient_bytes: float | None = None
    beside_passes: bool = False
    each_microbatch: bool = False
    bucket_bytes: float = inf
    num_sharing: int | None = None

    def num_gathers(self, num_microbatches: int) -> int:
        """Returns how often a step gathers the weights: once, or for the forward and the backward of every
        microbatch."""
        return 2 * num_microbatches if self.each_microbatch else 1


@dataclass(frozen=True)
class ExpertRuns:
    """How a layer's experts run.

    Args:
        sends: "rows", one for every expert that a token chose, or "devices", a token once to every device that has some
            of its experts, and once to every node, whose devices pass it on.
        beside_passes: whether exchanges run while another microbatch computes.
        launches: seconds in which the host starts a layer's kernels in a forward, and as many in a backward, where it
            waits for the numbers of each expert's rows and isn't ahead of the device.
        launches_of_expert: seconds of them for every expert of a rank.
        part_of_tile: rows of an expert's last tile of products that are computed in vain.
    """

    sends: Literal["rows", "devices"] = "rows"
    beside_passes: bool = False
    launches: float = 0.0
    launches_of_expert: float = 0.0
    part_of_tile: int = 0


@dataclass(frozen=True)
class System:
    """What a training system does, where systems differ.

    Args:
        name: of the system.
        attention_time: of the attention kernel, over that of the one that the device's description is about.
        attention_bits: in which the products of attention compute.
        writes_scores: whether attention writes all scores to memory, as before FlashAttention.
        adds_in_products: whether products of weight gradients add them to those that are there, in place of kernels of
            their own.
        product_bits: in which the products of layers compute: 16, 8 or 4.
        selective: what `recompute="selective"` repeats: the "kernels" besides products and attention, the "scores" of
            attention, or the kernels and "half" of the products.
        whole_backwards: whether a backward is one action, at whose end a rank sends the gradient of its input.
        replays_in_backward: whether a replay is a part of the backward's action, and takes no action of its own.
        keeps_gathered: whether the inputs of products that tensor-parallel ranks gather are kept whole for the
            backward, in place of gathering them again.
        runs_ahead: whether the host starts kernels while earlier ones run; otherwise its time adds up.
        tensor_beside: what hides the exchanges of tensor-parallel ranks: "nothing", the "products" around them, or the
            products of "weights"' gradients.
        replicas: how gradients and updated weights travel.
        experts: how experts run.
        state: bytes that it keeps of a trained parameter. None: as this library, by the dtype.
    """

    name: str
    attention_time: float = 1.0
    attention_bits: int = 16
    writes_scores: bool = False
    adds_in_products: bool = False
    product_bits: int = 16
    selective: Literal["kernels", "scores", "half"] = "kernels"
    whole_backwards: bool = False
    replays_in_backward: bool = False
    keeps_gathered: bool = True
    runs_ahead: bool = True
    tensor_beside: Literal["nothing", "products", "weights"] = "nothing"
    replicas: ReplicaExchange = ReplicaExchange()
    experts: ExpertRuns = ExpertRuns()
    state: StateBytes | None = None

    def counted(self, model: ModelCount, device: Device) -> ModelCount:
        """Returns the counts of a model with this system's kernels.

        Raises:
            SlipstreamError: where the device's description has no peak for `product_bits`.
        """
        model = _with_sums_in_products(model) if self.adds_in_products else model
        return _narrowed(model, self.product_rate(model.dtype, device), self.product_bits / 16)

    def product_rate(self, dtype: str, device: Device) -> float:
        """Returns how many times as fast as in `dtype` the products of layers are."""
        if self.product_bits == 16:
            return 1.0
        return device.narrow_rate(_NARROW_FORMATS[self.product_bits], dtype)


BUCKET_BYTES = 25 * 2**20
"""Bytes of an exchange of several gradients, or weights, of this library."""

SLIPSTREAM = System("slipstream", replicas=ReplicaExchange(bucket_bytes=BUCKET_BYTES))
"""What this library does."""


def _with_sums_in_products(model: ModelCount) -> ModelCount:
    """Returns the model without the bytes of kernels that add gradients of weights: these don't grow with the
    tokens."""

    def without(part: PartCount) -> PartCount:
        count = part.ops[Op.W]
        wide, other = (Amount(0.0, moved.per_token) for moved in (count.wide_bytes, count.other_bytes))
        return replace(part, ops={**part.ops, Op.W: replace(count, wide_bytes=wide, other_bytes=other)})

    return replace(_of_layers(model, without), head=without(model.head))


def _of_layers(model: ModelCount, change: Callable[[PartCount], PartCount]) -> ModelCount:
    """Returns the model with changed layers, and halves of layers."""
    halves = tuple((change(first), change(second)) for first, second in model.halves)
    return replace(model, layers=tuple(map(change, model.layers)), halves=halves)


def _narrowed(model: ModelCount, rate: float, size: float) -> ModelCount:
    """Returns the model whose layers' products are `rate` times as fast and whose operands take `size` times the bytes.

    A cast reads what F and I read of tokens in 16 bits, and writes it by rows and, for W, by columns. Their products
    read one of these and write 16 bits: with as many numbers read as written, (1 + 2 size + size + 1) / 2 of the bytes.
    To 4 bits a cast reads twice, as their scales need the largest of all numbers first (Transformer Engine, NVFP4).
    """
    if size == 1:
        return model
    num_reads = 2 if size < 1 / 2 else 1

    def times(amount: Amount, factor: float) -> Amount:
        return Amount(factor * amount.constant, factor * amount.per_token)

    def narrow(op: Op, count: OpCount) -> OpCount:
        moved = count.matmul_bytes
        of_tokens = size if op is Op.W else (num_reads + 3 * size + 1) / 2
        return replace(
            count,
            flops=times(count.flops, 1 / rate),
            unaligned_flops=times(count.unaligned_flops, 1 / rate),
            hidden_depth=times(count.hidden_depth, 1 / rate),
            other_depth=times(count.other_depth, 1 / rate),
            matmul_bytes=Amount(size * moved.constant, of_tokens * moved.per_token),
        )

    return _of_layers(model, lambda part: replace(part, ops={op: narrow(op, part.ops[op]) for op in part.ops}))
