"""Lower bounds of a configuration's step time and memory, which no simulation beats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from slipstream.array_types import Flags, Floats
from slipstream.planner.costs import CostSource, StageCosts, StageParts
from slipstream.planner.plans import Configuration
from slipstream.schedule import Op


@dataclass(frozen=True, eq=False)
class PlacedPartition:
    """The parts of each stage, the rank that holds it, and what stages cost."""

    costs: StageCosts
    placement: tuple[int, ...]
    bounds: tuple[int, ...]  # the first part of each stage, and the number of parts

    @cached_property
    def stages(self) -> list[StageParts]:
        return StageParts.of_units(self.bounds)

    @cached_property
    def num_ranks(self) -> int:
        return max(self.placement) + 1

    @cached_property
    def firsts(self) -> list[int]:
        """The first stage on each rank."""
        return [self.placement.index(rank) for rank in range(self.num_ranks)]

    @cached_property
    def trains(self) -> Flags:
        """Marks the stages that have backwards."""
        return np.array([self.costs.has_backward(stage) for stage in self.stages])

    @cached_property
    def num_frozen(self) -> int:
        """The number of first stages that have none."""
        return int(np.argmax(self.trains))

    @cached_property
    def sends_back(self) -> Flags:
        """Marks the stages that send their input gradient to another rank."""
        return np.array([False, *(a != b for a, b in pairwise(self.placement))])

    def per_stage(self, value: Callable[[StageParts], float]) -> Floats:
        """Returns the value of each stage."""
        return np.array([value(stage) for stage in self.stages])

    def per_rank(self, values: Sequence[float] | Floats) -> Floats:
        """Returns the sum over the stages of each rank."""
        return np.bincount(self.placement, values, self.num_ranks).astype(np.float64)


@dataclass(frozen=True)
class StageSizes:
    """The parameters of each stage, how many of them are trained, and the bytes of one microbatch's keys and values and
    of what its F keep."""

    parameters: Floats
    trained: Floats
    context: Floats
    kept: dict[str, Floats]  # by kind of recomputation
    largest: Floats  # without recomputation, of each rank's largest stage


@dataclass(frozen=True)
class StageTimes:
    """The seconds of each (stage, slice)."""

    compute: dict[Op, Floats]  # of F, B, I and W; B in one may differ from the sum of its two halves
    replay: dict[str, Floats]  # by kind of recomputation
    reduce: dict[Op, Floats]  # the part of F and of I that is all-reduces between tensor-parallel ranks
    slices: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ConfigurationGroup:
    """The bounds of configurations that differ only in how they save memory.

    That no simulation beats the bounds is tested (`test_no_simulation_beats_a_bound`).
    """

    cut: PlacedPartition
    times: StageTimes
    sizes: StageSizes
    source: CostSource
    num_microbatches: int
    splits_all: bool  # whether all backwards are I and W, or only those that send their result to another rank

    def least_seconds(self, configuration: Configuration, tail: Floats) -> float:
        """Returns a lower bound of the step, where each rank's last action is followed by `tail` seconds.

        It is the longest of the ranks' times: what precedes their first stage's first forward, their work, what follows
        their first stage's last backward, and the optimizer; or the copies to the host and back, if longer. Where a
        backward is split, what follows overlaps with late weight gradients: the larger counts.
        """
        ends = float((self._last_action_ends[configuration.recompute] + tail).max())
        return max(ends, self._copy_seconds(configuration))

    @cached_property
    def _last_action_ends(self) -> dict[str, Floats]:
        """The earliest end of each rank's last action, by kind of recomputation."""
        times, cut = self.times, self.cut
        forward, inputs = times.compute[Op.F], times.compute[Op.I]
        split = (self.splits_all | cut.sends_back)[:, None]
        whole = np.where(split, inputs + times.compute[Op.W], times.compute[Op.B])
        back = np.where(split, inputs, times.compute[Op.B])
        before, after = _sums_before(forward[:, 0]), _sums_before(back[:, 0])
        ends = {}
        for recompute, seconds in times.replay.items():
            replay = seconds.copy()
            replay[-1, -1] = 0  # not recomputed where its backward directly follows its forward
            critical, everything = (
                cut.per_rank((forward + replay + each).sum(axis=1)) * self.num_microbatches for each in (back, whole)
            )
            ends[recompute] = before[cut.firsts] + np.maximum(critical + after[cut.firsts], everything)
        return ends

    def _copy_seconds(self, configuration: Configuration) -> float:
        """Returns the seconds of a rank's copies to the host; a slice or two of a microbatch may stay on the device."""
        c, host, slices = configuration, self.source.host, self.times.slices
        if not c.offload or host is None:
            return 0.0
        sent = c.offload * self.num_microbatches * self.cut.per_rank(self.sizes.kept[c.recompute]).min()
        return float(sent * sum(sorted(slices)[:-2]) / sum(slices) / host.bandwidth)

    def least_bytes(self, configuration: Configuration) -> float:
        """Returns a lower bound of the fullest rank's bytes: its state and one microbatch.

        Between its forwards and its backwards every rank holds a microbatch whole, on the device or on its host. For
        the first microbatch there are no gradients yet.
        """
        sizes, state, per_rank = self.sizes, self.source.state, self.cut.per_rank
        per_trained = state.gradients if self.num_microbatches > 1 else 0
        per_trained += state.optimizer / configuration.optimizer_shards
        # a backward has all of its slice's activations, whatever was dropped or offloaded before
        slices = self.times.slices
        activations = sizes.largest * max(slices) / sum(slices)
        if not configuration.offload:
            activations = np.maximum(activations, per_rank(sizes.kept[configuration.recompute]))
        context = per_rank(sizes.context * self.cut.trains)  # a stage without backwards frees it after its forwards
        kept = state.weights * per_rank(sizes.parameters) + per_trained * per_rank(sizes.trained)
        return float((kept + context + activations).max())


def _sums_before(seconds: Floats) -> Floats:
    """Returns the sum of all entries before each."""
    return np.concatenate([[0.0], np.cumsum(seconds)[:-1]])
