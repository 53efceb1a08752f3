"""A step's microbatches in slices, and what these cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.planner.costs import OPS
from slipstream.planner.steps.packed_rows import PackedRows
from slipstream.planner.steps.sequence_groups import Groups
from slipstream.planner.steps.step_problem import StepProblem
from slipstream.schedule import Op
from slipstream.simulator import CostModel, MicrobatchCost, TableCost

_LEAST = 1e-12  # seconds of any action


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
        rows = PackedRows(groups, problem.lengths, problem.rates, problem.granularity)
        return cls(rows, np.cumsum([0, *(tokens for each in slices for tokens in each)]))

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
        return {op: np.maximum(self.rows.rates.stage_seconds(op, self.tokens, scores), _LEAST) for op in OPS}

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
        return MicrobatchCost([self._table(mine) for mine in self._microbatches])

    def _table(self, mine: slice) -> TableCost:
        rates = self.rows.rates
        seconds = {
            (stage, index, op): float(each)
            for op in OPS
            for (stage, index), each in np.ndenumerate(self.seconds[op][:, mine])
        }
        held = {key: float(each) for key, each in np.ndenumerate(self.held[:, mine])}
        sent = [float(rates.message_bytes * each) for each in self.tokens[mine]]
        return TableCost(seconds, sent, rates.latency, rates.bandwidth, held)
