"""The search of `shortest_path` compiled by Numba, whose import takes a while: loaded only where it pays."""

from __future__ import annotations

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.simulator.numba_jit import compiled


@compiled
def search(times: Floats, floors: Floats, weight: Floats, limits: Floats) -> tuple[Floats, Ints, Floats]:
    """Searches as `search_numpy` does, but only slices that start late enough to keep to the limits."""
    n = len(weight) - 1
    best = np.full(n + 1, np.inf)
    best[0] = 0
    previous = np.zeros(n + 1, np.int64)
    above = np.full(len(times), np.inf)
    within = np.zeros(len(times), np.int64)  # the first start that keeps to each limit
    for end in range(1, n + 1):
        first = 0  # all slices that start before it are over a limit
        for d in range(len(times)):
            own = within[d]  # usually near the previous one; `floors` falls, so a step or two finds it
            while own < end and floors[d, end, own] > limits[d]:
                own += 1
            while own > 0 and floors[d, end, own - 1] <= limits[d]:
                own -= 1
            within[d] = own
            if own > 0:
                above[d] = min(above[d], floors[d, end, own - 1])
            for start in range(own, end):
                if times[d, end, start] > limits[d]:
                    above[d] = min(above[d], times[d, end, start])
            first = max(first, own)
        for start in range(first, end):
            total = best[start] + weight[end, start]
            if total < best[end]:
                for d in range(len(times)):
                    if times[d, end, start] > limits[d]:
                        break
                else:
                    best[end], previous[end] = total, start
    return best, previous, above
