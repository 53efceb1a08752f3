"""The exact minimum of a sum plus weighted maxima: TeraPipe's Eq. 6 without trying every maximum."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Generic, Protocol, TypeVar


class Solution(Protocol):
    """The best solution under some limits on its maxima."""

    @property
    def total(self) -> float:
        """The least sum; infinite if nothing keeps to the limits."""

    @property
    def maxima(self) -> tuple[float, ...]:
        """The maxima of this solution, at most the limits."""

    @property
    def above(self) -> tuple[float, ...]:
        """The smallest values over the limits: limits below these allow no other solution."""


S = TypeVar("S", bound=Solution)


@dataclass(order=True)
class _Box(Generic[S]):
    """All solutions whose maxima are at least `lower` and at most `limits`; none costs less than `bound`."""

    bound: float
    number: int
    lower: tuple[float, ...] = field(compare=False)
    limits: tuple[float, ...] = field(compare=False)
    solution: S = field(compare=False)  # the one with the least total


def minimize(solve: Callable[[tuple[float, ...]], S], lower: tuple[float, ...], weight: float) -> S:
    """Returns the solution with the least total + weight · (sum of its maxima).

    A box of solutions, with maxima of at least `lower` and at most `limits`, costs solve(limits).total + weight ·
    sum(lower) or more. The solution found there costs more than that only by the gap between `lower` and its own
    maxima. So the box with the least bound is cut in two inside its widest gap: the lower part is solved again, the
    upper part keeps its solution and its `lower` rises to the next value there is. It ends when no bound is below the
    best cost. No maximum is skipped, so there is no ε (TeraPipe, section 3.3).

    Args:
        solve: limits -> the solution with the least total that keeps to them.
        lower: no solution has maxima below these.
        weight: K-1 for K stages.
    """
    numbers = count()
    limits = (inf,) * len(lower)
    best = solve(limits)
    best_cost = inf
    boxes: list[_Box[S]] = []

    def add(lower: tuple[float, ...], limits: tuple[float, ...], solution: S) -> None:
        nonlocal best, best_cost
        cost = solution.total + weight * sum(solution.maxima)
        if cost < best_cost:
            best, best_cost = solution, cost
        bound = solution.total + weight * sum(lower)
        if bound < best_cost and any(low < high for low, high in zip(lower, solution.maxima, strict=True)):
            heapq.heappush(boxes, _Box(bound, next(numbers), lower, limits, solution))

    add(lower, limits, best)
    while boxes and boxes[0].bound < best_cost:
        box = heapq.heappop(boxes)
        slack = (best_cost - box.bound) / weight  # maxima further over `lower` cost too much
        gaps = [min(slack, high - low) for low, high in zip(box.lower, box.solution.maxima, strict=True)]
        axis = max(range(len(gaps)), key=gaps.__getitem__)
        share = 0.8 if gaps[axis] >= slack else 0.6  # halves take a quarter more solves
        middle = box.lower[axis] + share * gaps[axis]
        if middle >= box.solution.maxima[axis]:  # neighbouring numbers
            middle = box.lower[axis]
        limits = tuple(middle if i == axis else limit for i, limit in enumerate(box.limits))
        found = solve(limits)
        add(box.lower, limits, found)
        raised = tuple(found.above[i] if i == axis else low for i, low in enumerate(box.lower))
        add(raised, box.limits, box.solution)
    return best
