"""A small described cluster, and models counted as the papers count theirs: what tests of plans search for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.cost import Amount, AttentionCall, AttentionWindow, CountedSource, ModelCount, OpCount, PartCount
from slipstream.cost.cluster import Cluster, parse_cluster
from slipstream.schedule import Op

SEQ_LEN = 512
CLUSTER: dict[str, Any] = {
    "name": "two-small-nodes",
    "num_nodes": 2,
    "devices_per_node": 2,
    "device": {
        "name": "small",
        "flops": {"float32": 1e9, "bfloat16": 2e9},
        "memory": 1e9,
        "memory_bandwidth": 1e10,
        "kernel_seconds": 0,
        "matmul_efficiency": 1,
    },
    "inside": {"bandwidth": 1e10, "latency": 1e-6},
    "between": {"bandwidth": 1e9, "latency": 1e-5},
}


def gpt(num_layers: int, hidden: int, heads: int, vocab: int = 51200, dtype: str = "float16") -> ModelCount:
    """A GPT as the papers count one: 12 h² weights a layer, four products, two matrices as wide as 4 h."""
    size = 2 if dtype == "float16" else 4

    def part(name: str, weights: float, activations: float, calls: tuple[AttentionCall, ...] = ()) -> PartCount:
        product = OpCount(
            flops=Amount(0, 2 * weights),
            matmul_bytes=Amount(size * weights, activations),
            wide_bytes=Amount(0, activations / 4),
            num_matmuls=6,
            num_kernels=20,
        )
        ops = {Op.F: product, Op.I: product, Op.W: product}
        return PartCount(name, int(weights), ops, calls, activations, activations / 2)

    call = AttentionCall(heads, heads, hidden // heads, hidden // heads, AttentionWindow())
    return ModelCount(
        kinds=(0,) * num_layers,
        layers=(part("layer", 12 * hidden**2, 17 * hidden * size, (call,)),),
        embedding=replace(part("embedding", 0, hidden * size), num_parameters=vocab * hidden),
        head=part("head", vocab * hidden, 2 * vocab * size),
        hidden_size=hidden,
        dtype=dtype,
        dtype_bytes=size,
    )


def with_frozen(model: ModelCount, num_frozen: int) -> ModelCount:
    """The model with the embedding and the first layers frozen, so that they have no backward."""

    def frozen(part: PartCount) -> PartCount:
        ops = {Op.F: part.ops[Op.F], Op.I: OpCount(), Op.W: OpCount()}
        calls = tuple(replace(call, has_gradient=False) for call in part.attentions)
        sizes = {"num_untrained": part.num_parameters, "activation_bytes": 0.0}
        return replace(part, ops=ops, attentions=calls, has_backward=False, **sizes)  # type: ignore[arg-type]

    (layer,), num_layers = model.layers, len(model.kinds)
    return replace(
        model,
        kinds=tuple(int(index >= num_frozen) for index in range(num_layers)),
        layers=(frozen(layer), layer),
        embedding=frozen(model.embedding),
    )


SMALL = gpt(num_layers=6, hidden=64, heads=4, vocab=512)


def small_cluster(num_nodes: int = 2, devices_per_node: int = 2, memory: float = 1e9) -> Cluster:
    return parse_cluster(
        {
            "name": "small",
            "num_nodes": num_nodes,
            "devices_per_node": devices_per_node,
            "device": {
                "name": "thing",
                "flops": {"float16": 1e10},
                "memory": memory,
                "memory_bandwidth": 1e10,
                "kernel_seconds": 1e-6,
                "matmul_efficiency": 0.9,
            },
            "host": {"bandwidth": 1e9, "latency": 0, "efficiency": 1},
            "inside": {"bandwidth": 1e9, "latency": 1e-6},
            "between": {"bandwidth": 1e8, "latency": 1e-5, "shared_by": 2},
        }
    )


def source(model: ModelCount = SMALL, cluster: Cluster | None = None) -> CountedSource:
    return CountedSource(model, cluster or small_cluster(), "small")
