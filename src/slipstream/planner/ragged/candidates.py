"""A step's sequences in microbatches, packed and cut into slices of equal time, and their costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import pairwise

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.planner.cuts import Cuts
from slipstream.planner.ragged.stage_rates import StageRates
from slipstream.planner.ragged.step_problem import StepProblem
from slipstream.schedule import Op
from slipstream.simulator import CostModel, MicrobatchCost

Groups = tuple[tuple[int, ...], ...]  # the numbers of the sequences in each microbatch


def filled(work: Sequence[float], size: float, lengths: Sequence[int], most_tokens: float) -> list[list[int]]:
    """Returns groups of at most so much work and so many tokens, as few as best fit finds; a larger sequence is alone.

    Args:
        work: of each sequence.
        size: of a group, in work.
        lengths: tokens of each sequence.
        most_tokens: of a group.
    """
    groups: list[list[int]] = []
    left: list[tuple[float, float]] = []  # work and tokens
    for sequence in _largest_first(work):
        least = work[sequence], lengths[sequence]
        fitting = [index for index, (room, tokens) in enumerate(left) if room >= least[0] and tokens >= least[1]]
        if fitting:
            best = min(fitting, key=left.__getitem__)
        else:
            best = len(groups)
            groups.append([])
            left.append((size, most_tokens))
        groups[best].append(sequence)
        left[best] = left[best][0] - least[0], left[best][1] - least[1]
    return groups


def balanced(work: Sequence[float], number: int) -> list[list[int]]:
    """Returns so many groups of nearly equal work: the largest sequence first, each to the least group (Graham 1969).

    Args:
        work: of each sequence.
        number: of groups, at most that of the sequences.
    """
    least = [(0.0, 0, index) for index in range(number)]
    heapify(least)
    groups: list[list[int]] = [[] for _ in range(number)]
    for sequence in _largest_first(work):
        total, size, index = least[0]
        groups[index].append(sequence)
        heapreplace(least, (total + work[sequence], size + 1, index))
    return groups


def sequences_of(groups: Sequence[Sequence[int]], work: Sequence[float]) -> list[Groups]:
    """Returns the groups in the orders in which they are tried: largest first, largest last, and largest in the middle.

    A small first group reaches the last rank soon, and a small last one leaves the first rank little to wait for.
    """
    listed = (tuple(sorted(group)) for group in groups)
    falling = sorted(listed, key=lambda group: (-sum(work[sequence] for sequence in group), group))
    return [tuple(falling), tuple(falling[::-1]), (*falling[1::2][::-1], *falling[::2])]


def _largest_first(work: Sequence[float]) -> list[int]:
    return sorted(range(len(work)), key=lambda sequence: (-work[sequence], sequence))


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
        places, firsts, work = self._grid
        counts = np.clip(counts, 1, np.diff(firsts))
        row = np.repeat(np.arange(len(counts)), counts)
        index = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        wanted = work[firsts[row]] + index / counts[row] * self.work[row]
        nearest = np.clip(np.searchsorted(work, wanted), 1, len(work) - 1)
        nearest -= wanted - work[nearest - 1] < work[nearest] - wanted
        # At least one place for each slice before and after a cut.
        latest = np.minimum(nearest, firsts[row + 1] - counts[row] + index)
        strict = np.maximum.accumulate(np.maximum(latest, firsts[row] + index) - np.arange(len(row)))
        return np.append(places[strict + np.arange(len(row))], self.ends[-1])


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
