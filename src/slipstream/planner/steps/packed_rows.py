"""Sequences packed one after the other into a row for each microbatch, and where these are cut into equal times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.planner.steps.sequence_groups import Groups
from slipstream.planner.steps.stage_rates import StageRates


@dataclass(frozen=True, eq=False)
class PackedRows:
    """The rows of the microbatches, laid one after the other: a place is a number of tokens from the first one on.

    Args:
        groups: the sequences of each microbatch.
        lengths: tokens of each sequence.
        rates: what the stages cost.
        granularity: rows are cut at multiples of this many tokens.
    """

    groups: Groups
    lengths: Sequence[int]
    rates: StageRates
    granularity: int = 1

    @cached_property
    def _documents(self) -> tuple[Ints, Floats]:
        """The place of each document, and the scores of all before it, with the sums of all as the last entries."""
        lengths = np.array([self.lengths[number] for group in self.groups for number in group], np.int64)
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
        steps = -(-np.diff(self.ends) // self.granularity)
        firsts = np.cumsum([0, *steps])
        within = (np.arange(firsts[-1]) - np.repeat(firsts[:-1], steps)) * self.granularity
        places = np.append(np.repeat(self.ends[:-1], steps) + within, self.ends[-1])
        return places, firsts, self.rates.work(places, self.scores(places))

    @cached_property
    def work(self) -> Floats:
        """The seconds of each row's forwards and backwards on all stages, without what its slices cost besides."""
        _, firsts, work = self._grid
        return np.diff(work[firsts])

    def cut(self, counts: Ints) -> Ints:
        """Returns the places of slices that take equal time, and the last one's end.

        Args:
            counts: the slices of each row; fewer where it has fewer places.
        """
        places, firsts, work = self._grid
        counts = np.clip(counts, 1, np.diff(firsts))
        row = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        wanted = work[firsts[row]] + number / counts[row] * self.work[row]
        nearest = np.clip(np.searchsorted(work, wanted), 1, len(work) - 1)
        nearest -= wanted - work[nearest - 1] < work[nearest] - wanted
        # At least one step of the grid for each slice before and after a cut.
        latest = np.minimum(nearest, firsts[row + 1] - counts[row] + number)
        strict = np.maximum.accumulate(np.maximum(latest, firsts[row] + number) - np.arange(len(row)))
        return np.append(places[strict + np.arange(len(row))], self.ends[-1])
