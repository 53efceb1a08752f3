"""The costs of a model's parts by a profile: differences of measured stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from slipstream.array_types import Floats
from slipstream.cost.action_bytes import ActionBytes
from slipstream.cost.costs import NO_LINK, Costs, LinkTime, total
from slipstream.cost.mode import Mode
from slipstream.cost.profile import MeasuredStage, Profile
from slipstream.cost.sharing import Copies
from slipstream.cost.update import Numbers, Update
from slipstream.cost.work import OPS, Stage, Work
from slipstream.errors import SlipstreamError
from slipstream.options import Degrees
from slipstream.schedule import Op
from slipstream.simulator import TableCost


@dataclass(frozen=True)
class MeasuredCosts(Costs):
    """The costs of a model by measured times, for the microbatch size, the dtype and the degrees of the profile.

    Exchanges of ranks that share work are in the times.
    """

    profile: Profile

    @property
    def parts(self) -> Sequence[int]:
        return self.profile.parts

    @property
    def units_per_layer(self) -> int:
        return self.profile.units_per_layer

    @property
    def microbatch_size(self) -> int:
        return self.profile.microbatch_size

    @property
    def dtype_bytes(self) -> int:
        return self.profile.dtype_bytes

    @property
    def vocab_size(self) -> int:
        return self.profile.model.vocab_size

    @property
    def num_head_weights(self) -> int:
        return self.vocab_size * self.profile.model.hidden_size

    @property
    def degrees(self) -> Degrees:
        return self.profile.degrees

    # --- seconds -----------------------------------------------------------------------------------------------------

    def each_seconds(self, work: Work) -> Floats:
        return self._seconds(work)[1:]

    def fixed_seconds(self, work: Work) -> Floats:
        fixed: Floats = self._seconds(work)[0]
        return fixed

    def _seconds(self, work: Work) -> Floats:
        """Returns the seconds of the fixed part of a stage, and of a part of each kind, (1 + kinds, slices).

        A part is a difference of measured stages, so that noise may bring it below 0: then it counts as 0.
        """
        op = Op.F if work.op is Op.R else work.op
        fitted = np.stack([stage.fits[op](work.lengths, work.contexts) for stage in self.profile.stages])
        seconds: Floats = self.profile.slowdown * np.maximum(self._of_parts(fitted), 0.0)
        return seconds

    def _of_parts(self, stages: Floats) -> Floats:
        """Splits a quantity of the measured stages, (stages, ...), into that of the fixed part of a stage and of a part
        of each kind, (1 + kinds, ...)."""
        return np.array([total(weights, stages) for weights in self.profile.part_weights])

    # --- bytes -------------------------------------------------------------------------------------------------------

    def _each(self, value: Callable[[MeasuredStage], Any]) -> Floats:
        """Returns what the fixed part of a stage and a part of each kind have of a quantity of the measured stages,
        (1 + kinds, ...)."""
        return self._of_parts(np.array([value(stage) for stage in self.profile.stages], float))

    def each_activation(self, lengths: Any) -> Floats:
        return self._each(lambda stage: stage.activation_bytes_at(lengths))[1:]

    def fixed_activation(self, lengths: Any) -> Floats:
        fixed: Floats = self._each(lambda stage: stage.activation_bytes_at(lengths))[0]
        return fixed

    @cached_property
    def each_context(self) -> Floats:
        return self._each(lambda stage: stage.context_bytes)[1:]

    @cached_property
    def each_context_gradient(self) -> Floats:
        return self._each(lambda stage: stage.context_gradient_bytes)[1:]

    @cached_property
    def each_number(self) -> Numbers:
        numbers = np.maximum(self._each(lambda stage: stage.num_parameters)[1:], 0.0).round()
        in_experts = self._each(lambda stage: stage.num_in_experts)[1:].round()
        return Numbers(numbers, numbers, in_experts)

    def action_bytes(self, stage: Stage, length: int) -> ActionBytes:
        if not self.profile.has_action_bytes:
            return super().action_bytes(stage, length)
        kept, deferred = (
            float(fixed_and_parts[0] + total(self.count(stage), fixed_and_parts[1:]))
            for fixed_and_parts in (
                self._each(lambda each: each.action_bytes_at(length).kept),
                self._each(lambda each: each.action_bytes_at(length).deferred),
            )
        )
        kinds = {self.parts[part] for part in self.parts_of(stage)}
        single = {
            self.parts[measured.first]: measured.action_bytes_at(length)
            for measured in self.profile.stages
            if measured.first == measured.last
        }
        peaks = {op: max((single[kind].peaks[op] for kind in kinds), default=0.0) for op in OPS}
        # W's inputs of the parts whose I has run already
        peaks[Op.I] += max(0.0, deferred)
        alone = max((single[kind].kept + single[kind].peaks[Op.F] for kind in kinds), default=0.0)
        return ActionBytes(kept, deferred, peaks, alone)

    def logits_gradient_bytes(self, stage: Stage, length: int) -> float:
        vocabulary = self.vocab_size / (self.divided.width * self.divided.tokens)
        return 4 * self.microbatch_size * length * vocabulary if self.has_head(stage) else 0.0

    # --- messages and state ------------------------------------------------------------------------------------------

    def message_bytes(self, length: Any) -> Any:
        # The rank with the most tokens of a slice counts.
        num_tokens = -(-length // self.divided.tokens)
        return self.microbatch_size * num_tokens * self.profile.model.hidden_size * self.dtype_bytes

    def handling_seconds(self, length: Any) -> Any:
        num_bytes = np.asarray(self.message_bytes(length))
        return self.profile.link.handling_seconds(num_bytes) if self.profile.link else 0.0 * num_bytes

    def link(self, num_ranks: int, replicas: int = 1) -> LinkTime:
        link = self.profile.link
        return LinkTime(link.latency, link.bandwidth) if link else NO_LINK

    def action_costs(
        self, times: Mapping[tuple[int, int, Op], float], slices: Sequence[int], data_parallel: int = 1
    ) -> TableCost:
        known = self.profile.seq_len
        if sum(slices) > known:
            raise SlipstreamError(
                f"slices={list(slices)} add up to {sum(slices)} tokens, more than the profile's {known}. Profile with "
                f"--seq-len={sum(slices)}."
            )
        return super().action_costs(times, slices, data_parallel)

    def gathering_seconds(self, num_bytes: float, copies: Copies) -> float:
        """Returns the time in which a ring passes on so many bytes."""
        link = self.profile.link
        ranks = copies.num_ranks
        if link is None or not num_bytes or ranks == 1:
            return 0.0
        return (ranks - 1) * (link.latency + num_bytes / ranks / link.ring_bandwidth)

    def update_seconds(self, update: Update, trained: float, optimized: float) -> float:
        # AdamW was measured, without shards.
        return self.profile.optimizer_seconds * optimized


def profile_behind(costs: Costs | None) -> Profile:
    """Returns the profile of measured costs, also of those that a Mode has changed."""
    while isinstance(costs, Mode):
        costs = costs.costs
    assert isinstance(costs, MeasuredCosts)
    return costs.profile
