"""A plan's numbers from a profile of the present hardware: pipelines alone, of one microbatch size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.planner.costs.analytic_costs import StateBytes
from slipstream.planner.costs.cost_sources import ActionSeconds, CostSource, StageCosts
from slipstream.planner.costs.profile_file import Profile
from slipstream.schedule import Op
from slipstream.simulator import CostModel, TableCost


class ProfileSource:
    """A model measured on the present hardware: pipelines alone, of one microbatch size."""

    devices_per_node = 2**62
    recomputations: tuple[str, ...] = ("none", "full")

    def __init__(self, profile: Profile, num_ranks: int, memory: float | None) -> None:
        if num_ranks < 1:
            raise SlipstreamError(f"num_ranks={num_ranks}: a plan needs at least one rank.")
        self.profile = profile
        self.name = f"{profile.model.model_type}, {profile.model.num_layers} layers of {profile.model.hidden_size}"
        self.hardware = profile.hardware.cpu if profile.hardware.device == "cpu" else profile.hardware.device
        self.kinds, self.num_devices = profile.kinds, num_ranks
        self.memory = float("inf") if memory is None else memory
        self.state = StateBytes(4, 4, 8)

    def tensor_parallel_degrees(self) -> tuple[int, ...]:
        return (1,)

    def microbatch_sizes(self) -> tuple[int, ...]:
        return (self.profile.microbatch_size,)

    def slice_range(self, seq_len: int) -> tuple[int, int]:
        if seq_len > self.profile.seq_len:
            raise SlipstreamError(
                f"seq_len={seq_len}, but the profile has times up to {self.profile.seq_len} tokens. Profile with "
                f"--seq-len={seq_len}."
            )
        lengths = [fit.lengths for stage in self.profile.stages for fit in stage.fits.values()]
        return max(each[0] for each in lengths), min(each[-1] for each in lengths)

    def costs(self, tensor_parallel: int, microbatch_size: int) -> StageCosts:
        return _ProfileStages(self.profile)

    def peak_seconds(self, num_sequences: int, seq_len: int) -> None:
        return None

    def host(self) -> None:
        return None

    def larger(self, most: int) -> Iterator[CostSource]:
        return iter(())

    def notes(self) -> tuple[str, ...]:
        return (
            f"Times are those of a profile; its fits are off by {self.profile.error:.1%} on average where they were "
            "not fitted.",
        )


@dataclass(frozen=True)
class _ProfileStages:
    profile: Profile

    def seconds(self, layers: range, op: Op, length: Any, context: Any) -> Any:
        return self.profile.time(layers, op)(length, context)

    def reduce_seconds(self, layers: range, op: Op, length: Any) -> Any:
        return 0.0 * np.asarray(length)

    def replay_seconds(self, layers: range, recompute: str, length: Any, context: Any) -> Any:
        return self.seconds(layers, Op.R, length, context)

    def activation_bytes(self, layers: range, length: int, context: int) -> float:
        return self.profile.activation_bytes(layers, length)

    def kept_bytes(self, layers: range, recompute: str, length: int) -> float:
        return float(self.profile.message_bytes(length)) if layers.start else 0.0

    def context_bytes(self, layers: range, length: int) -> float:
        return self.profile.context_bytes(layers, length)

    def context_gradient_bytes(self, layers: range, length: int) -> float:
        return self.profile.context_gradient_bytes(layers, length)

    def logits_gradient_bytes(self, layers: range, length: int) -> float:
        return self.profile.logits_gradient_bytes(layers, length)

    def message_bytes(self, length: Any) -> Any:
        return self.profile.microbatch_size * length * self.profile.model.hidden_size * self.profile.dtype_bytes

    def num_parameters(self, layers: range) -> float:
        return self.profile.num_parameters(layers)

    def gradient_seconds(self, layers: range, data_parallel: int) -> float:
        return 0.0

    def optimizer_seconds(self, layers: range, shards: int) -> float:
        return self.profile.optimizer_time(layers)

    def cost(self, times: ActionSeconds, slices: Sequence[int], data_parallel: int) -> CostModel:
        link = self.profile.link
        return TableCost(
            times=times,
            message_bytes=[float(self.message_bytes(length)) for length in slices],
            latency=link.latency if link else 0,
            bandwidth=link.bandwidth if link else None,
        )
