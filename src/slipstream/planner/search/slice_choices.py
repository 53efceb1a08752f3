"""The slicings among which a search of plans chooses: of equal time in several numbers, and the exact one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property, lru_cache
from math import inf

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.cost import Costs, CostSource, Degrees, Stage
from slipstream.errors import SlipstreamError
from slipstream.planner.search.plan_options import PlanOptions
from slipstream.planner.slicing import equal_time_slices
from slipstream.planner.slicing.equal_stage_slicing import TimeTable, best_slicing, between_cuts, cut_positions
from slipstream.schedule import Op

_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_COUNTS_OF_ONE = (1, 2, 4, 8, 16, 32)  # on a single rank, where slices save memory alone
_SHORTEST = 128  # tokens of a slice; the described devices have no times for shorter ones
_MULTIPLE = 64  # tokens; slices of so many suit matrix products
_FEWEST_CUTS, _MOST_CUTS = 64, 256  # places where an exact slicing may cut
_TOLERANCE = 5e-4  # of its step's time, by which an exact slicing may miss the best
_KEPT_TABLES = 64  # of up to three megabytes: the same stages are part of many pipelines
_MOST_EXACT = 128  # slices: a schedule with more takes seconds to simulate


class SliceChoices:
    """The slicings of one search, each computed once.

    Args:
        source: the model on its hardware.
        seq_len: tokens per sequence.
        options: the choices that are allowed.
        costs: of stages by degrees and sequences of a microbatch.
    """

    def __init__(
        self, source: CostSource, seq_len: int, options: PlanOptions, costs: Callable[[Degrees, int], Costs]
    ) -> None:
        self.seq_len, self.options, self._costs, self._num_layers = seq_len, options, costs, len(source.kinds)
        self.shortest, self.longest = source.slice_range(seq_len)
        self.equal_time, self.exact = cache(self._compute_equal_time), cache(self._compute_exact)
        self._attention_share = cache(self._compute_attention_share)
        self._table = lru_cache(_KEPT_TABLES)(self._compute_table)

    def counts(self, pipeline: int, context: int = 1) -> list[int]:
        """Returns the numbers of slices that take equal time, each of whose `context` parts is long enough."""
        most = self.seq_len // (context * self.least_tokens)
        counts = self.options.values("num_slices", _COUNTS if pipeline > 1 else _COUNTS_OF_ONE)
        possible = [n for n in counts if n <= most and self.seq_len / n <= self.longest]
        if not possible and "num_slices" not in self.options.allowed:
            return [-(-self.seq_len // self.longest)]
        return possible

    @property
    def least_tokens(self) -> int:
        """The tokens that a rank has at least of a slice."""
        return max(self.shortest, min(_SHORTEST, max(1, self.seq_len // 8)))

    def _compute_equal_time(self, degrees: Degrees, size: int, count: int) -> tuple[int, ...]:
        """Returns slice lengths that take equal time, in multiples that suit matrix products."""
        granularity = max(1, min(_MULTIPLE, self.seq_len // (4 * count)))
        slices = equal_time_slices(self.seq_len, count, self._attention_share(degrees, size), granularity)
        if min(slices) < self.shortest or max(slices) > self.longest:
            slices = equal_time_slices(self.seq_len, count, 0.0)
        return slices

    def _compute_attention_share(self, degrees: Degrees, size: int) -> float:
        """Returns A of t(x T) = t(T) ((1-A) x + A x²), from a layer's times of T and T/2 tokens."""
        costs, length = self._costs(degrees, size), min(self.seq_len, self.longest)
        middle = range(self._num_layers // 2, self._num_layers // 2 + 1)
        whole, half = (sequence_seconds(costs, tokens, middle) for tokens in (length, length // 2))
        return min(1.0, max(0.0, 2 * (1 - 2 * half / whole)))

    def _least(self, degrees: Degrees) -> int:
        """Returns the tokens of the shortest slice of an exact slicing: of slices that take equal time the last ones
        may also be half as long as the mean."""
        return max(self.shortest, degrees.context * self.least_tokens // 2, self.seq_len // _MOST_EXACT)

    def least_first(self, degrees: Degrees) -> int:
        """Returns the tokens of the shortest first slice of an exact slicing."""
        return min(self.seq_len, self.longest, max(self._least(degrees), self.granularity))

    def _compute_exact(
        self, degrees: Degrees, size: int, stage: Stage, num_ranks: int, num_passes: int
    ) -> tuple[int, ...] | None:
        """Returns the slices with the least latency if all stages are like `stage`; None where none is allowed.

        The pipeline is filled once, by a slice on each rank (TeraPipe, Eq. 5). In all, a rank runs `num_passes` whole
        sequences of microbatches through one stage: as many as its microbatches times its stages.
        """
        try:
            return best_slicing(self._table(degrees, size, stage), num_ranks, num_passes, _TOLERANCE).slices
        except SlipstreamError:  # no slices that end at these places are as long as those whose times are known
            return None

    def _compute_table(self, degrees: Degrees, size: int, stage: Stage) -> TimeTable:
        """Returns the seconds of the slice between any two places to cut, forward and backward; infinite where they
        aren't known, or the slice is too short."""
        costs, least = self._costs(degrees, size), self._least(degrees)

        def seconds(lengths: Ints, contexts: Ints) -> Floats:
            known = np.minimum(lengths, self.longest)
            predicted = np.stack([costs.seconds(stage, op, known, contexts) for op in (Op.F, Op.B)])
            return np.where((lengths > self.longest) | (lengths < least), inf, predicted)

        times = between_cuts(self.seq_len, self.granularity, seconds, inf)
        return TimeTable(cut_positions(self.seq_len, self.granularity), times)

    @cached_property
    def granularity(self) -> int:
        """The tokens between two places to cut: multiples that suit matrix products, unless the sequence is short."""
        least = -(-self.seq_len // _MOST_CUTS)
        if least <= _MULTIPLE:
            return max(least, min(_MULTIPLE, self.seq_len // _FEWEST_CUTS))
        return -(-least // _MULTIPLE) * _MULTIPLE


def sequence_seconds(costs: Costs, length: int, layers: Stage) -> float:
    """Returns the time of a whole sequence, forward and backward."""
    return sum(float(costs.seconds(layers, op, length, 0)) for op in (Op.F, Op.I, Op.W))
