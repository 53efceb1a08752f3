"""The slicings among which a search of plans chooses: of equal time in several numbers, and the exact one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property, lru_cache

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.cost import Costs, CostSource, Degrees, Stage
from slipstream.errors import SlipstreamError
from slipstream.planner.cuts import Cuts
from slipstream.planner.joint import Tabulated
from slipstream.planner.search.placed_partition import sequence_seconds
from slipstream.planner.search.plan_options import PlanOptions
from slipstream.planner.slicing import equal_time_slices
from slipstream.planner.slicing.equal_stage_slicing import TimeTable, best_slicing, between_cuts
from slipstream.schedule import Op

_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_COUNTS_OF_ONE = (1, 2, 4, 8, 16, 32)  # on a single rank, where slices save memory alone
# For sequences whose slices then still have `_LONG_SLICE` tokens.
_COUNTS_OF_LONG = (64, 128, 256, 512)
_LONG_SLICE = 2048
_SHORTEST = 128  # tokens of a slice; the described devices have no times for shorter ones
_MULTIPLE = 64  # tokens; slices of so many suit matrix products
_FEWEST_CUTS, _MOST_CUTS = 64, 256  # places where an exact slicing may cut
_TOLERANCE = 5e-4  # of its step's time, by which an exact slicing may miss the best
# Of up to three megabytes each: the same stages are part of many pipelines, and the same parts of many stages.
_KEPT_TABLES = 16
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
        shortest, longest = source.slice_range(seq_len)
        self.known = Cuts(1, longest, shortest, most_slices=None)
        """The slices whose times are known."""
        self.longest = self.known.longest(seq_len)
        self.equal_time, self.exact = cache(self._compute_equal_time), cache(self._compute_exact)
        self._attention_share = cache(self._compute_attention_share)
        self._table = lru_cache(_KEPT_TABLES)(self._compute_table)
        self._tabulated = lru_cache(_KEPT_TABLES)(self._tabulate)

    def counts(self, pipeline: int, num_parts: int = 1) -> list[int]:
        """Returns the numbers of slices that take equal time, each of whose `num_parts` parts is long enough."""
        most = self.seq_len // (num_parts * self.least_tokens)
        usual = _COUNTS if pipeline > 1 else _COUNTS_OF_ONE
        more = (n for n in _COUNTS_OF_LONG if n > usual[-1] and self.seq_len // n >= _LONG_SLICE)
        counts = self.options.values("num_slices", (*usual, *more))
        fewest = self.known.counts(self.seq_len)[0]
        possible = [n for n in counts if fewest <= n <= most]
        return possible if possible or "num_slices" in self.options.allowed else [fewest]

    @property
    def finest(self) -> int:
        """The slices of a sequence for little memory: at least 8, and more where they are long."""
        return max(n for n in (8, 16, 32, *_COUNTS_OF_LONG) if n == 8 or self.seq_len // n >= _LONG_SLICE)

    @property
    def least_tokens(self) -> int:
        """The tokens that a rank has at least of a slice."""
        return max(self.known.shortest_slice, min(_SHORTEST, max(1, self.seq_len // 8)))

    def _compute_equal_time(self, degrees: Degrees, size: int, count: int) -> tuple[int, ...]:
        """Returns slice lengths that take equal time, in multiples that suit matrix products."""
        cuts = replace(self.known, granularity=max(1, min(_MULTIPLE, self.seq_len // (4 * count))))
        slices = equal_time_slices(self.seq_len, count, self._attention_share(degrees, size), cuts)
        return slices if self.known.allows(slices) else self.known.even(self.seq_len, count)

    def _compute_attention_share(self, degrees: Degrees, size: int) -> float:
        """Returns A of t(x T) = t(T) ((1-A) x + A x²), from a layer's times of T and T/2 tokens."""
        costs, length = self._costs(degrees, size), self.longest
        middle = range(self._num_layers // 2, self._num_layers // 2 + 1)
        whole, half = (sequence_seconds(costs, tokens, middle) for tokens in (length, length // 2))
        return min(1.0, max(0.0, 2 * (1 - 2 * half / whole)))

    def exact_cuts(self, degrees: Degrees) -> Cuts:
        """Returns where exact slicings may cut. Of slices that take equal time the last ones may also be half as long
        as the mean."""
        half = degrees.token_ranks * self.least_tokens // 2
        shortest = max(self.known.shortest_slice, half, self.seq_len // _MOST_EXACT)
        return replace(self.cuts, shortest_slice=shortest)

    def least_first(self, degrees: Degrees) -> int:
        """Returns the tokens of the shortest first slice of an exact slicing."""
        cuts = self.exact_cuts(degrees)
        return min(self.longest, max(cuts.shortest_slice, cuts.granularity))

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
        costs = self._tabulated(degrees, size)
        cuts = self.exact_cuts(degrees)

        def seconds(lengths: Ints, contexts: Ints) -> Floats:
            return np.stack([costs.seconds(stage, op, lengths, contexts) for op in (Op.F, Op.B)])

        return TimeTable(cuts.places(self.seq_len), between_cuts(self.seq_len, cuts, seconds))

    def _tabulate(self, degrees: Degrees, size: int) -> Costs:
        return Tabulated(self._costs(degrees, size), self.seq_len, self.exact_cuts(degrees))

    @cached_property
    def cuts(self) -> Cuts:
        """Where sequences may be cut: at multiples that suit matrix products, unless the sequence is short."""
        granularity = -(-self.seq_len // _MOST_CUTS)
        if granularity <= _MULTIPLE:
            granularity = max(granularity, min(_MULTIPLE, self.seq_len // _FEWEST_CUTS))
        else:
            granularity = -(-granularity // _MULTIPLE) * _MULTIPLE
        return replace(self.known, granularity=granularity)
