"""The candidates of a local search: a cut with slices, and what is one change from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from operator import itemgetter
from typing import Any, TypeVar

from slipstream.planner.joint.problem import JointProblem

_MANY_CUTS = 32
_MOVED_GRANULES = (4, 1)  # granules moved from one slice to another
Choice = TypeVar("Choice")
Value = TypeVar("Value", bound=Any)


@dataclass(frozen=True)
class Candidate:
    """A cut, given by the first unit of each stage and the number of units, and slices."""

    bounds: tuple[int, ...]
    slices: tuple[int, ...]

    def cuts(self) -> Iterator[Candidate]:
        """Yields the candidate with one to three neighbouring cuts moved by one or two units."""
        yield from (Candidate(bounds, self.slices) for bounds in moved_cuts(self.bounds))

    def slicings(self, problem: JointProblem) -> Iterator[Candidate]:
        """Yields the candidate with tokens moved between slices, a slice halved, or two joined."""
        cuts = problem.cuts
        slices = self.slices
        count = len(self.slices)
        pairs = [
            (giver, taker)
            for giver in range(count)
            for taker in {giver - 1, giver + 1, 0, count - 1} - {giver}
            if 0 <= taker < count
        ]
        changes = [cuts.moved(slices, granules, pairs) for granules in _MOVED_GRANULES]
        for changed in chain(*changes, cuts.halved(slices), cuts.joined(slices)):
            if len(changed) in problem.slice_counts:
                yield replace(self, slices=changed)


def steepest_descent(
    start: Choice,
    values: Callable[[list[Choice]], Iterable[Value]],
    changes: Callable[[Choice], Iterable[Choice]],
    most: float = inf,
) -> tuple[Choice, Value]:
    """Returns the end of taking the best change again and again while the value falls, and its value.

    It ends once `most` changes were tried.
    """
    best = start
    (least,) = values([start])
    while most > 0 and (changed := [*dict.fromkeys(changes(best))]):
        most -= len(changed)
        step = min(zip(values(changed), changed, strict=True), key=itemgetter(0))
        if step[0] >= least:
            break
        least, best = step
    return best, least


def one_move(bounds: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields the bounds with one unit moved over one cut, or over several neighbouring ones."""
    return _moved(bounds, (-1, 1))


def moved_cuts(bounds: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields the bounds with one to three neighbouring cuts moved by one or two units; of many, single ones by one."""
    return _moved(bounds, (-1, 1, -2, 2), most=3) if len(bounds) <= _MANY_CUTS else _moved(bounds, (-1, 1), most=1)


def _moved(bounds: tuple[int, ...], steps: Sequence[int], most: float = inf) -> Iterator[tuple[int, ...]]:
    """Yields the bounds with one of them, or some neighbours together, moved; no stage becomes empty."""
    inner = range(1, len(bounds) - 1)
    for first in inner:
        for last in range(first, int(min(first + most, len(bounds) - 1))):
            for step in steps:
                if bounds[first - 1] < bounds[first] + step and bounds[last] + step < bounds[last + 1]:
                    yield (*bounds[:first], *(b + step for b in bounds[first : last + 1]), *bounds[last + 1 :])
