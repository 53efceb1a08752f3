"""The exact minimum of a sum plus weighted maxima: TeraPipe's Eq. 6 without trying every maximum."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from math import inf
from typing import Generic, NamedTuple, TypeVar

Choice = TypeVar("Choice")
Limits = tuple[float, ...]


class Solution(NamedTuple, Generic[Choice]):
    """The best solution under some limits on its maxima."""

    total: float  # the least sum; infinite if nothing keeps to the limits
    maxima: Limits  # of this solution, at most the limits
    above: Limits  # the smallest values over the limits: limits below these allow no other solution
    choice: Choice


def minimize(solve: Callable[[Limits], Solution[Choice]], lower: Limits, weight: float) -> Solution[Choice]:
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
    numbers = count()  # boxes with equal bounds are cut in the order in which they were added
    best, best_cost = solve((inf,) * len(lower)), inf
    boxes: list[tuple[float, int, Limits, Limits, Solution[Choice]]] = []  # (bound, number, lower, limits, solution)

    def add(lower: Limits, limits: Limits, solution: Solution[Choice]) -> None:
        nonlocal best, best_cost
        cost = solution.total + weight * sum(solution.maxima)
        if cost < best_cost:
            best, best_cost = solution, cost
        bound = solution.total + weight * sum(lower)
        if bound < best_cost and any(low < high for low, high in zip(lower, solution.maxima, strict=True)):
            heapq.heappush(boxes, (bound, next(numbers), lower, limits, solution))

    add(lower, (inf,) * len(lower), best)
    while boxes and boxes[0][0] < best_cost:
        bound, _, lower, limits, solution = heapq.heappop(boxes)
        slack = (best_cost - bound) / weight  # maxima further over `lower` cost too much
        gaps = [min(slack, high - low) for low, high in zip(lower, solution.maxima, strict=True)]
        axis = max(range(len(gaps)), key=gaps.__getitem__)
        share = 0.8 if gaps[axis] >= slack else 0.6  # halves take a quarter more solves
        middle = lower[axis] + share * gaps[axis]
        if middle >= solution.maxima[axis]:  # neighbouring numbers
            middle = lower[axis]
        below = tuple(middle if i == axis else limit for i, limit in enumerate(limits))
        found = solve(below)
        add(lower, below, found)
        add(tuple(found.above[i] if i == axis else low for i, low in enumerate(lower)), limits, solution)
    return best
