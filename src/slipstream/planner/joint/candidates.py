"""The candidates of the joint search, cut and slices together, and how they change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from slipstream.planner.joint.joint_problem import JointProblem


@dataclass(frozen=True)
class Candidate:
    """A cut, given by the first unit of each stage and the number of units, and slices."""

    bounds: tuple[int, ...]
    slices: tuple[int, ...]

    def cuts(self) -> Iterator[Candidate]:
        """Yields the candidate with one or two neighbouring cuts moved by one or two units."""
        bounds = self.bounds
        inner = range(1, len(bounds) - 1)
        for first in inner:
            for last in range(first, min(first + 3, len(bounds) - 1)):
                for step in (-1, 1, -2, 2):
                    moved = tuple(b + step * (first <= i <= last) for i, b in enumerate(bounds))
                    if all(a < b for a, b in pairwise(moved)):
                        yield replace(self, bounds=moved)

    def slicings(self, problem: JointProblem) -> Iterator[Candidate]:
        """Yields the candidate with tokens moved between slices, a slice halved, or two joined."""
        slices, step = self.slices, problem.granularity
        count = len(slices)
        for portion in (4 * step, step):
            for giver in range(count):
                for taker in {giver - 1, giver + 1, 0, count - 1} - {giver}:
                    if 0 <= taker < count and slices[giver] > portion:
                        changed = list(slices)
                        changed[giver] -= portion
                        changed[taker] += portion
                        yield replace(self, slices=tuple(changed))
        for i, tokens in enumerate(slices):
            half = tokens // 2 // step * step
            if half and count + 1 in problem.slice_counts:
                yield replace(self, slices=(*slices[:i], half, tokens - half, *slices[i + 1 :]))
        for i in range(count - 1):
            yield replace(self, slices=(*slices[:i], slices[i] + slices[i + 1], *slices[i + 2 :]))
