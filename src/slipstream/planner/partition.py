"""Layers to stages: the slowest stage as fast as possible, then all stages as even as possible."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from slipstream.errors import SlipstreamError


def partition_layers(costs: Sequence[float], num_stages: int) -> list[int]:
    """How many consecutive layers each stage takes, none of them empty.

    The largest stage cost is minimal, and among the partitions that reach it the variance of the stage costs is
    (GPipe section 2.2 minimises the variance alone, which can leave a slower slowest stage).

    Args:
        costs: one per layer, in any unit.
        num_stages: at most as many as layers.
    """
    if not 1 <= num_stages <= len(costs):
        raise SlipstreamError(
            f"{num_stages} stages for {len(costs)} layers: every stage needs a layer. Use 1 to {len(costs)} stages."
        )
    total = list(accumulate(costs, initial=0.0))
    num_layers = len(costs)

    @cache
    def slowest(first: int, stages: int) -> float:
        """The least possible largest cost of layers first.. on that many stages."""
        if stages == 1:
            return total[num_layers] - total[first]
        cuts = range(first + 1, num_layers - stages + 2)
        return min(max(total[cut] - total[first], slowest(cut, stages - 1)) for cut in cuts)

    limit = slowest(0, num_stages) * (1 + 1e-12)  # sums in another order may round differently

    @cache
    def evenest(first: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """The least sum of squared costs within the limit, and its counts: the mean is fixed, so this is variance."""
        if stages == 1:
            cost = total[num_layers] - total[first]
            return (cost**2 if cost <= limit else float("inf")), (num_layers - first,)
        best: tuple[float, tuple[int, ...]] = (float("inf"), ())
        for cut in range(first + 1, num_layers - stages + 2):
            cost = total[cut] - total[first]
            if cost <= limit:
                rest, counts = evenest(cut, stages - 1)
                best = min(best, (cost**2 + rest, (cut - first, *counts)))
        return best

    return list(evenest(0, num_stages)[1])
