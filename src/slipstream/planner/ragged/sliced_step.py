"""A step's sequences in microbatches, cut into slices of equal time, and their costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.planner.cuts import Cuts
from slipstream.planner.ragged.packing import Groups
from slipstream.planner.ragged.stage_rates import StageRates
from slipstream.planner.ragged.step_problem import StepProblem
from slipstream.planner.slicing.equal_work_slicing import equal_work_cuts
from slipstream.schedule import Op
from slipstream.simulator import CostModel, MicrobatchCost


@dataclass(frozen=True, eq=False)
class PackedRows:
    """The rows of the microbatches, laid one after the other: a place is a number of tokens from the first one on.

    Args:
        groups: the sequences of each microbatch.
        lengths: tokens of each sequence.
        rates: of the stages.
        cuts: where each row may be cut.
    """

    groups: Groups
    lengths: Sequence[int]
    rates: StageRates
    cuts: Cuts

    @cached_property
    def _documents(self) -> tuple[Ints, Floats]:
        """The place of each document, and the scores of all before it, with the sums of all as the last entries."""
        lengths = np.array([self.lengths[sequence] for group in self.groups for sequence in group], np.int64)
        scores = np.cumsum(self.rates.scores(lengths), axis=0)
        return np.cumsum([0, *lengths]), np.concatenate([np.zeros((1, scores.shape[1])), scores])

    @cached_property
    def ends(self) -> Ints:
        """The place of each row, and the end of the last one."""
        ends: Ints = self._documents[0][np.cumsum([0, *map(len, self.groups)])]
        return ends

    def scores(self, places: Ints) -> Floats:
        """Returns the scores that attention computes up to some places, under each window, (n, windows)."""
        begins, before = self._documents
        document = np.searchsorted(begins, places, side="right") - 1
        return before[document] + self.rates.scores(places - begins[document])

    @cached_property
    def _grid(self) -> tuple[Ints, Ints, Floats]:
        """The places where rows may be cut, with their ends; the first of each row, and all; the work up to them."""
        within, firsts = self.cuts.places_of_rows(np.diff(self.ends))
        places = np.append(np.repeat(self.ends[:-1], np.diff(firsts)) + within, self.ends[-1])
        return places, firsts, self.rates.work(places, self.scores(places))

    @cached_property
    def work(self) -> Floats:
        """The seconds of each row's forwards and backwards on all stages, without its slices' fixed parts."""
        _, firsts, work = self._grid
        return np.diff(work[firsts])

    def cut(self, counts: Ints) -> Ints:
        """Returns the places of slices that take equal time, and the last one's end.

        Args:
            counts: the slices of each row; fewer where it has fewer places.
        """
        return equal_work_cuts(*self._grid, counts)


@dataclass(frozen=True, eq=False)
class SlicedStep:
    """The slices of all microbatches of a step.

    Args:
        rows: the sequences of each microbatch.
        cuts: the places where slices begin, and the last one's end.
    """

    rows: PackedRows
    cuts: Ints

    @classmethod
    def of(cls, problem: StepProblem, groups: Groups, slices: Sequence[Sequence[int]]) -> SlicedStep:
        """Returns the step of these groups of sequences in these slices."""
        rows = PackedRows(groups, problem.lengths, problem.rates, problem.cuts)
        return cls(rows, np.cumsum([0, *(tokens for lengths in slices for tokens in lengths)]))

    @cached_property
    def tokens(self) -> Ints:
        """The tokens of each slice, one microbatch after the other."""
        return np.diff(self.cuts)

    @cached_property
    def counts(self) -> Ints:
        """The number of slices of each microbatch."""
        return np.diff(np.searchsorted(self.cuts, self.rows.ends))

    @cached_property
    def firsts(self) -> Ints:
        """The number of each microbatch's first slice."""
        return np.cumsum(self.counts) - self.counts

    @property
    def slices(self) -> tuple[tuple[int, ...], ...]:
        """The tokens of the slices of each microbatch."""
        tokens = self.tokens.tolist()
        return tuple(tuple(tokens[mine]) for mine in self._microbatches)

    @property
    def _microbatches(self) -> list[slice]:
        """The range of each microbatch's slices."""
        ends = np.cumsum([0, *self.counts]).tolist()
        return [slice(a, b) for a, b in pairwise(ends)]

    @cached_property
    def seconds(self) -> dict[Op, Floats]:
        """The seconds of F, B, I and W of each slice, (stages, slices)."""
        scores = np.diff(self.rows.scores(self.cuts), axis=0)
        return self.rows.rates.action_seconds(self.tokens, scores)

    @cached_property
    def held(self) -> Floats:
        """The bytes that F of each slice keeps, (stages, slices)."""
        return self.rows.rates.held_bytes(self.tokens)

    @cached_property
    def links(self) -> tuple[Floats, Floats]:
        """The seconds that each slice's message travels, and for which it occupies its channel, (slices,)."""
        return self.rows.rates.link_seconds(self.tokens)

    def costs(self) -> CostModel:
        """Returns the simulator's costs."""
        return MicrobatchCost(
            [
                self.rows.rates.table(self.tokens[mine], {op: part[:, mine] for op, part in self.seconds.items()})
                for mine in self._microbatches
            ]
        )
