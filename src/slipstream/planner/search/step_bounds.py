"""How fast and how small a configuration can be at best: bounds that no simulation beats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from slipstream.array_types import Flags, Floats
from slipstream.planner.costs import HostMemory, StateBytes
from slipstream.schedule import Op


@dataclass(frozen=True, eq=False)
class PlacedPartition:
    """Layers and their ranks."""

    placement: tuple[int, ...]
    partition: tuple[int, ...]

    @cached_property
    def stages(self) -> list[range]:
        return [range(a, b) for a, b in pairwise(accumulate(self.partition, initial=0))]

    @cached_property
    def num_ranks(self) -> int:
        return max(self.placement) + 1

    @cached_property
    def firsts(self) -> list[int]:
        """The first stage of every rank."""
        return [self.placement.index(rank) for rank in range(self.num_ranks)]

    @cached_property
    def sends_back(self) -> Flags:
        """Of every stage, whether the one before is on another rank."""
        return np.array([False, *(a != b for a, b in pairwise(self.placement))])

    def per_rank(self, values: Sequence[float] | Floats) -> Floats:
        """Sums over the stages of each rank."""
        return np.bincount(self.placement, values, self.num_ranks).astype(np.float64)


@dataclass(frozen=True)
class RankSizes:
    """Of every rank: its parameters, and the bytes of one microbatch's keys and values and of what its F leave."""

    parameters: Floats
    context: Floats
    kept: dict[str, Floats]  # by kind of recomputation
    largest: Floats  # of the largest of the rank's stages, where nothing is recomputed
    of_stages: dict[str, Floats]  # `kept`, per stage
    context_of_stages: Floats
    parameters_of_stages: Floats


@dataclass(frozen=True)
class StageTimes:
    """Seconds of each (stage, slice)."""

    forward: Floats
    backward: Floats  # in one; not always as long as its two halves together
    input_gradient: Floats
    weight_gradient: Floats
    replay: dict[str, Floats]  # by kind of recomputation
    reduce: dict[Op, Floats]  # what of F and I are all-reduces between tensor-parallel ranks
    slices: tuple[int, ...]


@dataclass(frozen=True)
class TailSeconds:
    """Of every rank, seconds after its last action."""

    gradients: Floats  # their reduction between the replicas
    optimizer: Floats

    @cached_property
    def total(self) -> Floats:
        return self.gradients + self.optimizer


@dataclass(frozen=True)
class Shared:
    """What the configurations share that differ only in how they save memory."""

    cut: PlacedPartition
    times: StageTimes
    sizes: RankSizes
    state: StateBytes
    host: HostMemory | None
    tails: dict[bool, TailSeconds]  # by whether the optimizer is sharded
    num_microbatches: int
    data_parallel: int
    splits: bool  # whether all backwards are I and W; else those that send their result to another rank are


class Bounds:
    """Of the configurations that share all that; each bound is computed once."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._seconds: dict[tuple[str, float, bool], float] = {}
        self._bytes: dict[tuple[str, float, bool], float] = {}
        self._ends: dict[str, Floats] = {}  # by kind of recomputation

    def seconds(self, recompute: str, offload: float, shard: bool) -> float:
        """The longest of the ranks' times: what must come before their first stage's first forward, their work, what
        must follow their first stage's last backward, and the optimizer; or the way to the host and back, if longer.

        Where a backward is split, what follows overlaps with weight gradients that come late: the larger counts.
        """
        key = recompute, offload, shard
        if key not in self._seconds:
            if recompute not in self._ends:
                self._ends[recompute] = self._ranks_end(recompute)
            ends = float((self._ends[recompute] + self._shared.tails[shard].total).max())
            self._seconds[key] = max(ends, self._copied(recompute, offload))
        return self._seconds[key]

    def _ranks_end(self, recompute: str) -> Floats:
        """Of every rank, its last action at the soonest."""
        times, cut = self._shared.times, self._shared.cut
        replay = times.replay[recompute].copy()
        replay[-1, -1] = 0  # its backward may follow its forward at once, and then nothing is recomputed
        split = (self._shared.splits | cut.sends_back)[:, None]
        whole = np.where(split, times.input_gradient + times.weight_gradient, times.backward)
        back = np.where(split, times.input_gradient, times.backward)
        before, after = _before(times.forward[:, 0]), _before(back[:, 0])
        must, everything = (
            cut.per_rank((times.forward + replay + each).sum(axis=1)) * self._shared.num_microbatches
            for each in (back, whole)
        )
        return before[cut.firsts] + np.maximum(must + after[cut.firsts], everything)

    def _copied(self, recompute: str, offload: float) -> float:
        """Seconds of a rank's copies to the host; a slice or two of a microbatch may find no time to be away."""
        num_slices = len(self._shared.times.slices)
        if not offload or self._shared.host is None or num_slices < 3:
            return 0.0
        sent = offload * self._shared.num_microbatches * self._shared.sizes.kept[recompute].min()
        return float(sent * (1 - 2 / num_slices) / self._shared.host.bandwidth)

    def bytes(self, recompute: str, offload: float, shard: bool) -> float:
        """Of the fullest rank: state, and one microbatch, which at its turn every rank holds whole or on its host.

        At the first microbatch's turn there are no gradients yet.
        """
        key = recompute, offload, shard
        if key not in self._bytes:
            sizes, state = self._shared.sizes, self._shared.state
            per_parameter = state.weights + (state.gradients if self._shared.num_microbatches > 1 else 0)
            per_parameter += state.optimizer / (self._shared.data_parallel if shard else 1)
            # a backward has all of its slice's activations, whatever was dropped or away before
            slices = self._shared.times.slices
            at_once = sizes.largest * max(slices) / sum(slices)
            if not offload:
                at_once = np.maximum(at_once, sizes.kept[recompute])
            self._bytes[key] = float((per_parameter * sizes.parameters + sizes.context + at_once).max())
        return self._bytes[key]


def _before(seconds: Floats) -> Floats:
    """The sum of all entries before each."""
    return np.concatenate([[0.0], np.cumsum(seconds)[:-1]])
