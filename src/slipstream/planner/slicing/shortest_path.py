"""The least sum of slice times if no slice may be slower than a limit: TeraPipe's Eq. 7, with and without Numba."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import inf
from typing import NamedTuple

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.planner.slicing.time_table import TimeTable

NUMBA_PAYS_FROM = 200  # cuts; with fewer, NumPy is done before Numba is imported

# (times, floors, weight, limits) -> least sum and previous cut of each cut; `above` and `maxima` of each time
PathSearch = Callable[[Floats, Floats, Floats, Floats], tuple[Floats, Ints, Floats, Floats]]


class CutPath(NamedTuple):
    """The best cuts under the limits; `total` is infinite where there are none."""

    total: float
    maxima: tuple[float, ...]  # the slowest slice in each of the limited times
    above: tuple[float, ...]  # of each time the smallest entry over its limit: the next limit that allows more
    previous: Ints  # the cut before each cut

    @property
    def cuts(self) -> tuple[int, ...]:
        """The cuts 0, ..., n; empty where the limits allow none."""
        return tuple(_backwards(self.previous))[::-1] if self.total < inf else ()


def shortest_path(table: TimeTable, limits: tuple[float, ...], search: PathSearch | None = None) -> CutPath:
    """Returns the cuts with the least sum of times whose slices keep to the limits, one for each time.

    Among equal sums, each cut takes the longest slice before it, so that both searches give the same cuts.
    """
    if search is None:
        search = search_compiled() if len(table.bounds) > NUMBA_PAYS_FROM else search_numpy
    best, previous, above, maxima = search(table.times, table.floors, table.weight, np.array(limits, float))
    return CutPath(float(best[-1]), tuple(maxima.tolist()), tuple(above.tolist()), previous)


def _backwards(previous: Ints) -> list[int]:
    """The cuts of the path from the last to the first."""
    before = previous.tolist()
    cuts = [len(before) - 1]
    while cuts[-1] > 0:
        cuts.append(before[cuts[-1]])
    return cuts


def search_numpy(times: Floats, floors: Floats, weight: Floats, limits: Floats) -> tuple[Floats, Ints, Floats, Floats]:
    """Searches with NumPy, for every cut over all earlier ones together: the inner line of the paper's Algorithm 1."""
    over = times > limits[:, None, None]
    above = np.where(over, times, inf).min(axis=(1, 2))
    allowed = np.where(over.any(axis=0), inf, weight)
    n = len(weight) - 1
    best = np.full(n + 1, inf)
    best[0] = 0
    previous = np.zeros(n + 1, np.int64)
    for end in range(1, n + 1):
        sums = best[:end] + allowed[end, :end]
        previous[end] = start = sums.argmin()
        best[end] = sums[start]
    if best[n] == inf:
        return best, previous, above, np.zeros(len(times))
    cuts = np.array(_backwards(previous))
    return best, previous, above, times[:, cuts[:-1], cuts[1:]].max(axis=1)


@cache
def search_compiled() -> PathSearch:
    """Returns the search compiled by Numba, or `search_numpy` where Numba can't be imported."""
    try:
        from slipstream.planner.slicing.shortest_path_compiled import search
    except ImportError:
        return search_numpy
    return search
