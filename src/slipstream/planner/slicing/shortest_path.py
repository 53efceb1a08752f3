"""The least sum of slice times if no slice may be slower than a limit: TeraPipe's Eq. 7, with and without Numba."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.planner.slicing.branch_and_bound import Limits, Solution
from slipstream.planner.slicing.time_table import TimeTable

NUMBA_PAYS_FROM = 200  # cuts; with fewer, NumPy is done before Numba is imported

CutPath = Solution[tuple[int, ...]]  # the cuts 0, ..., n; none where the limits allow none
# (times, floors, weight, limits) -> least sum and previous cut of each cut, and `above`
PathSearch = Callable[[Floats, Floats, Floats, Floats], tuple[Floats, Ints, Floats]]


def shortest_path(table: TimeTable, limits: Limits, search: PathSearch | None = None) -> CutPath:
    """Returns the cuts with the least sum of times whose slices keep to the limits, one for each time.

    Among equal sums, each cut takes the longest slice before it, so that both searches give the same cuts.
    """
    if search is None and len(table.bounds) > NUMBA_PAYS_FROM:
        from slipstream.planner.slicing.shortest_path_compiled import search
    best, previous, above = (search or search_numpy)(table.times, table.floors, table.weight, np.array(limits, float))
    cuts = [len(best) - 1] if best[-1] < inf else []
    while cuts and cuts[-1] > 0:
        cuts.append(int(previous[cuts[-1]]))
    maxima = table.times[:, cuts[:-1], cuts[1:]].max(axis=1, initial=0)
    return CutPath(float(best[-1]), tuple(maxima.tolist()), tuple(above.tolist()), tuple(cuts[::-1]))


def search_numpy(times: Floats, floors: Floats, weight: Floats, limits: Floats) -> tuple[Floats, Ints, Floats]:
    """Searches with NumPy, for every cut over all earlier ones together: the inner line of the paper's Algorithm 1."""
    over = times > limits[:, None, None]
    above = np.where(over, times, inf).min(axis=(1, 2))
    allowed = np.where(over.any(axis=0), inf, weight)
    best = np.full(len(weight), inf)
    best[0] = 0
    previous = np.zeros(len(weight), np.int64)
    for end in range(1, len(weight)):
        sums = best[:end] + allowed[end, :end]
        previous[end] = start = sums.argmin()
        best[end] = sums[start]
    return best, previous, above
