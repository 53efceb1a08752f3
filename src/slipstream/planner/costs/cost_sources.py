"""Where a plan's numbers come from: counted operations on a described cluster, or a profile of the present hardware."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slipstream.planner.costs.analytic_costs import AnalyticCosts, ClusterCost, StateBytes
from slipstream.planner.costs.cluster import Cluster
from slipstream.planner.costs.operation_counts import ModelCount
from slipstream.schedule import Op
from slipstream.simulator import CostModel

ActionSeconds = Mapping[tuple[int, int, Op], float]  # stage, slice, op -> seconds


class StageCosts(Protocol):
    """What stages cost on one of `tensor_parallel` ranks, for microbatches of one size. Times in seconds."""

    def seconds(self, layers: range, op: Op, length: Any, context: Any) -> Any:
        """Of F, I or W; integer arrays give an array."""
        ...

    def reduce_seconds(self, layers: range, op: Op, length: Any) -> Any:
        """What of it are all-reduces between tensor-parallel ranks."""
        ...

    def replay_seconds(self, layers: range, recompute: str, length: Any, context: Any) -> Any:
        """Of R."""
        ...

    def activation_bytes(self, layers: range, length: int, context: int) -> float:
        """What F leaves where nothing is recomputed, keys and values aside."""
        ...

    def kept_bytes(self, layers: range, recompute: str, length: int) -> float:
        """What F leaves of that where the slice is recomputed."""
        ...

    def context_bytes(self, layers: range, length: int) -> float: ...

    def context_gradient_bytes(self, layers: range, length: int) -> float: ...

    def logits_gradient_bytes(self, layers: range, length: int) -> float:
        """What the loss's backward makes before anything that F left is free; 0 but for the last stage."""
        ...

    def message_bytes(self, length: Any) -> Any: ...

    def num_parameters(self, layers: range) -> float:
        """Those on one rank."""
        ...

    def gradient_seconds(self, layers: range, data_parallel: int) -> float:
        """The reduction of a stage's gradients between the replicas."""
        ...

    def optimizer_seconds(self, layers: range, shards: int) -> float: ...

    def cost(self, times: ActionSeconds, slices: Sequence[int], data_parallel: int) -> CostModel:
        """The simulator's costs, with these times of actions and the links' of messages."""
        ...


class CostSource(Protocol):
    """A model on some devices."""

    name: str
    hardware: str
    kinds: tuple[int, ...]  # of the layers; equal layers have equal numbers
    num_devices: int
    devices_per_node: int
    memory: float  # bytes of a device
    state: StateBytes
    recomputations: tuple[str, ...]  # which can be predicted

    def tensor_parallel_degrees(self) -> tuple[int, ...]: ...

    def microbatch_sizes(self) -> tuple[int, ...] | None:
        """None: any."""
        ...

    def slice_range(self, seq_len: int) -> tuple[int, int]:
        """The shortest and the longest slice whose time is known."""
        ...

    def costs(self, tensor_parallel: int, microbatch_size: int) -> StageCosts: ...

    def peak_seconds(self, num_sequences: int, seq_len: int) -> float | None:
        """Of three forwards' products at one device's peak: what MFU is measured against."""
        ...

    def host(self) -> tuple[float, float] | None:
        """Bytes per second between a device and its host, in one direction, and bytes there; None: no offload."""
        ...

    def larger(self, most: int) -> Iterator[CostSource]:
        """The same with 2, 4, ... up to `most` times the nodes; none where that is not for a plan to say."""
        ...

    def notes(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class _AnalyticStages:
    """The protocol's view of AnalyticCosts."""

    analytic: AnalyticCosts

    def seconds(self, layers: range, op: Op, length: Any, context: Any) -> Any:
        return self.analytic.seconds(layers, op, length, context)

    def reduce_seconds(self, layers: range, op: Op, length: Any) -> Any:
        parts = self.analytic.model.counted(layers)
        return sum(number * self.analytic.reduce_seconds(part, op, length) for number, part in parts)

    def replay_seconds(self, layers: range, recompute: str, length: Any, context: Any) -> Any:
        return self.analytic.replay_seconds(layers, recompute, length, context)

    def activation_bytes(self, layers: range, length: int, context: int) -> float:
        return self.analytic.activation_bytes(layers, length, context)

    def kept_bytes(self, layers: range, recompute: str, length: int) -> float:
        return self.analytic.kept_bytes(layers, recompute, length)

    def context_bytes(self, layers: range, length: int) -> float:
        return self.analytic.context_bytes(layers, length)

    def context_gradient_bytes(self, layers: range, length: int) -> float:
        return self.analytic.context_bytes(layers, length) * 4 / self.analytic.model.dtype_bytes  # in float32

    def logits_gradient_bytes(self, layers: range, length: int) -> float:
        return self.analytic.logits_gradient_bytes(layers, length)

    def message_bytes(self, length: Any) -> Any:
        return self.analytic.message_bytes(length)

    def num_parameters(self, layers: range) -> float:
        return self.analytic.num_parameters(layers)

    def gradient_seconds(self, layers: range, data_parallel: int) -> float:
        return self.analytic.gradient_seconds(layers, data_parallel)

    def optimizer_seconds(self, layers: range, shards: int) -> float:
        return self.analytic.optimizer_seconds(layers, shards)

    def cost(self, times: ActionSeconds, slices: Sequence[int], data_parallel: int) -> CostModel:
        analytic = self.analytic
        return ClusterCost(
            times=times,
            message_bytes=[float(analytic.message_bytes(length)) for length in slices],
            cluster=analytic.cluster,
            stride=analytic.tensor_parallel * data_parallel,
            tensor_parallel=analytic.tensor_parallel,
        )


class AnalyticSource:
    """A counted model on a described cluster."""

    recomputations: tuple[str, ...] = ("none", "selective", "full")

    def __init__(self, model: ModelCount, cluster: Cluster, name: str) -> None:
        self.model, self.cluster, self.name, self.hardware = model, cluster, name, cluster.name
        self.kinds = model.kinds
        self.num_devices, self.devices_per_node = cluster.num_devices, cluster.devices_per_node
        self.memory = cluster.device.memory
        self.state = StateBytes.of(model.dtype)
        cluster.device.matmul_flops(model.dtype, 1)  # says so where the dtype has no peak

    def tensor_parallel_degrees(self) -> tuple[int, ...]:
        heads = {call.num_heads for part in self.model.layers for call in part.attentions}
        return tuple(t for t in range(1, min(heads) + 1) if all(h % t == 0 for h in heads))

    def microbatch_sizes(self) -> None:
        return None

    def slice_range(self, seq_len: int) -> tuple[int, int]:
        return 1, seq_len

    def costs(self, tensor_parallel: int, microbatch_size: int) -> StageCosts:
        return _AnalyticStages(
            AnalyticCosts(self.model, self.cluster, tensor_parallel, microbatch_size, state=self.state)
        )

    def peak_seconds(self, num_sequences: int, seq_len: int) -> float:
        parts, flops = self.model.parts(range(len(self.kinds))), 0.0
        for part in parts:
            flops += part.ops[Op.F].flops.at(num_sequences * seq_len)
            for call in part.attentions:
                scores = num_sequences * call.num_heads * float(call.window.scores(seq_len))
                flops += 2 * scores * (call.key_width + call.value_width)
        return 3 * flops / self.cluster.device.flops[self.model.dtype]

    def host(self) -> tuple[float, float]:
        return self.cluster.device.host_bandwidth, self.cluster.device.host_memory

    def larger(self, most: int) -> Iterator[CostSource]:
        times = 2
        while times <= most:
            yield AnalyticSource(self.model, self.cluster.with_nodes(times * self.cluster.num_nodes), self.name)
            times *= 2

    def notes(self) -> tuple[str, ...]:
        state = self.state
        return (
            f"Times are computed from counted operations and the description of {self.cluster.name}, not measured.",
            f"A parameter takes {state.weights:g} bytes, its gradient {state.gradients:g}, its optimizer state "
            f"{state.optimizer:g}.",
            "The gradients' reduction and the optimizer's step follow a rank's last backward, without overlap.",
        )
