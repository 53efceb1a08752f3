"""The slices that a search tries: of equal times for a number of counts, and TeraPipe's exact optimum."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property, lru_cache, partial

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.errors import SlipstreamError
from slipstream.planner.costs import CostSource, Stage, StageCosts
from slipstream.planner.search.plan_options import PlanOptions
from slipstream.planner.slicing import equal_time_slices, slice_tokens
from slipstream.planner.slicing.time_table import between_cuts
from slipstream.schedule import Op

_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_SHORTEST = 128  # tokens of a slice; the described devices have no times for shorter ones
_MULTIPLE = 64  # tokens; slices of so many suit matrix products
_FEWEST_CUTS, _MOST_CUTS = 64, 256  # places where an exact slicing may cut
_KEPT_TABLES = 128  # of half a megabyte: the same stages are part of many pipelines
_MOST_EXACT = 128  # slices: a schedule with more takes seconds to simulate


class SliceChoices:
    """The slicings of one search, each computed once.

    Args:
        source: the model on its hardware.
        seq_len: tokens per sequence.
        options: the choices that are allowed.
        costs: what stages cost by tensor-parallel degree and sequences of a microbatch.
    """

    def __init__(
        self, source: CostSource, seq_len: int, options: PlanOptions, costs: Callable[[int, int], StageCosts]
    ) -> None:
        self.seq_len, self.options, self._costs, self._num_layers = seq_len, options, costs, len(source.kinds)
        self.shortest, self.longest = source.slice_range(seq_len)
        self.equal_time, self.exact = cache(self._compute_equal_time), cache(self._compute_exact)
        self._attention_share = cache(self._compute_attention_share)
        self._table = lru_cache(_KEPT_TABLES)(self._compute_table)

    def counts(self, pipeline: int) -> list[int]:
        """Returns the numbers of slices that take equal time."""
        if pipeline == 1 and self.options.num_slices is None:
            return [1] if self.seq_len <= self.longest else [-(-self.seq_len // self.longest)]
        most = self.seq_len // self._least_tokens
        return [n for n in self.options.num_slices or _COUNTS if n <= most and self.seq_len / n <= self.longest]

    @property
    def _least_tokens(self) -> int:
        return max(self.shortest, min(_SHORTEST, max(1, self.seq_len // 8)))

    def _compute_equal_time(self, tensor: int, size: int, count: int) -> tuple[int, ...]:
        """Returns slice lengths that take equal time, in multiples that suit matrix products."""
        granularity = max(1, min(_MULTIPLE, self.seq_len // (4 * count)))
        found = equal_time_slices(self.seq_len, count, self._attention_share(tensor, size), granularity)
        if min(found) < self.shortest or max(found) > self.longest:
            found = equal_time_slices(self.seq_len, count, 0.0)
        return found

    def _compute_attention_share(self, tensor: int, size: int) -> float:
        """Returns A of t(x T) = t(T) ((1-A) x + A x²), from a layer's times of T and T/2 tokens."""
        costs, length = self._costs(tensor, size), min(self.seq_len, self.longest)
        middle = range(self._num_layers // 2, self._num_layers // 2 + 1)
        whole, half = (sequence_seconds(costs, tokens, middle) for tokens in (length, length // 2))
        return min(1.0, max(0.0, 2 * (1 - 2 * half / whole)))

    def _compute_exact(
        self, tensor: int, size: int, stage: Stage, num_ranks: int, num_passes: int
    ) -> tuple[int, ...] | None:
        """Returns the slices with the least latency if all stages are like `stage`; None where none is allowed.

        The pipeline is filled once, by a slice on each rank (TeraPipe, Eq. 5). In all, a rank runs `num_passes` whole
        sequences of microbatches through one stage: as many as its microbatches times its stages.
        """
        # of slices that take equal time the last ones may also be half as long as the mean
        least = max(self.shortest, self._least_tokens // 2, self.seq_len // _MOST_EXACT)
        forward, backward = (partial(self._slice_seconds, tensor, size, stage, op) for op in (Op.F, Op.B))
        between = self.granularity
        try:
            found = slice_tokens(
                forward, self.seq_len, num_ranks, between, least, backward=backward, num_microbatches=num_passes
            )
        except SlipstreamError:  # no slices that end at these places are as long as those whose times are known
            return None
        return found.slices

    def _slice_seconds(self, tensor: int, size: int, stage: Stage, op: Op, length: Ints, context: Ints) -> Floats:
        end = -(-(context + length) // self.granularity)
        found: Floats = self._table(tensor, size, stage, op)[end, context // self.granularity]
        return found

    def _compute_table(self, tensor: int, size: int, stage: Stage, op: Op) -> Floats:
        """Returns the seconds of the slice between any two places to cut, [end, start]; infinite where not known."""

        def seconds(lengths: Ints, contexts: Ints) -> Floats:
            found = self._costs(tensor, size).seconds(stage, op, np.minimum(lengths, self.longest), contexts)
            return np.where(lengths > self.longest, np.inf, found)

        return between_cuts(self.seq_len, self.granularity, seconds, np.inf)

    @cached_property
    def granularity(self) -> int:
        """The tokens between two places to cut: multiples that suit matrix products, unless the sequence is short."""
        least = -(-self.seq_len // _MOST_CUTS)
        if least <= _MULTIPLE:
            return max(least, min(_MULTIPLE, self.seq_len // _FEWEST_CUTS))
        return -(-least // _MULTIPLE) * _MULTIPLE


def sequence_seconds(costs: StageCosts, length: int, layers: Stage) -> float:
    """Returns the time of a whole sequence, forward and backward."""
    return sum(float(costs.seconds(layers, op, length, 0)) for op in (Op.F, Op.I, Op.W))
