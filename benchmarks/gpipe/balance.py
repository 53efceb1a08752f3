"""Ways to spread layers over stages, to compare with `slipstream.partition_layers`, and its use for a flush."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf

from slipstream import partition_layers

Balance = Callable[[Sequence[float], int], list[int]]  # (costs of the layers, stages) -> layers of every stage
Split = Callable[[Sequence[float], Sequence[float], int], list[int]]  # by forward and backward seconds


def stage_sums(costs: Sequence[float], counts: Sequence[int]) -> list[float]:
    return [sum(costs[a:b]) for a, b in pairwise(accumulate(counts, initial=0))]


def imbalance(costs: Sequence[float], counts: Sequence[int]) -> float:
    """Returns the slowest stage's cost over the mean; 1.0 where all are alike."""
    sums = stage_sums(costs, counts)
    return max(sums) * len(sums) / sum(sums)


def by_count(costs: Sequence[float], num_stages: int) -> list[int]:
    """Puts equally many layers on every stage, one more on the first ones where they don't divide."""
    each, more = divmod(len(costs), num_stages)
    return [each + (stage < more) for stage in range(num_stages)]


def variance_greedy(costs: Sequence[float], num_stages: int) -> list[int]:
    """Starts with equal counts and moves the border that lowers the variance of the stages' costs most, by one layer.

    GPipe's section 2.2 minimises the variance by a heuristic that it doesn't give; this is the plainest one.
    """
    counts = by_count(costs, num_stages)
    while True:
        best = min(_moves(counts), key=lambda moved: _squares(costs, moved), default=counts)
        if _squares(costs, best) >= _squares(costs, counts):
            return counts
        counts = best


def _moves(counts: list[int]) -> list[list[int]]:
    """Yields all partitions that differ by one layer across one border and leave no stage empty."""
    found = []
    for border in range(len(counts) - 1):
        for step in (1, -1):
            moved = [*counts]
            moved[border] += step
            moved[border + 1] -= step
            if min(moved) >= 1:
                found.append(moved)
    return found


def _squares(costs: Sequence[float], counts: Sequence[int]) -> float:
    return sum(cost**2 for cost in stage_sums(costs, counts))


def block_partition(costs: Sequence[float], num_stages: int) -> list[int]:
    """Balances as torchgpipe does, after Barany and Grinberg 2015.

    Of the emptiest blocks, the one nearest to the fullest gets a layer from its neighbour, until no two blocks differ
    by more than the most expensive layer.
    """
    scale = max(costs)
    bounds = [*range(num_stages), len(costs)]
    while True:
        sizes = [sum(costs[a:b]) / scale for a, b in pairwise(bounds)]
        fullest = sizes.index(max(sizes))
        while True:
            sizes = [sum(costs[a:b]) / scale for a, b in pairwise(bounds)]
            smallest = min(sizes)
            if max(sizes) <= smallest + 1:
                return [b - a for a, b in pairwise(bounds)]
            emptiest = min((i for i, size in enumerate(sizes) if size == smallest), key=lambda i: abs(i - fullest))
            if emptiest < fullest:
                bounds[emptiest + 1] += 1
                neighbour = emptiest + 1
            else:
                bounds[emptiest] -= 1
                neighbour = emptiest - 1
            if neighbour == fullest:
                break


def for_flush(forward: Sequence[float], backward: Sequence[float], num_stages: int) -> list[int]:
    """Minimises the longest forward plus the longest backward of a stage.

    That is what a microbatch adds to a step in which all forwards run before all backwards.

    The longest backward is minimised under a cap on the forwards, which is then lowered below what that took, as long
    as the sum can still get less.
    """
    least = max(stage_sums(forward, partition_layers(forward, num_stages)))
    best, cap = by_count(forward, num_stages), inf
    while True:
        counts = partition_layers(backward, num_stages, memory=forward, memory_limit=cap)
        best = min(best, counts, key=lambda each: flush_seconds(forward, backward, each))
        longest = max(stage_sums(forward, counts))
        bound = least + max(stage_sums(backward, counts))  # of all that follow
        if longest <= least * (1 + 1e-9) or bound >= flush_seconds(forward, backward, best):
            return best
        cap = longest * (1 - 1e-12)


def flush_seconds(forward: Sequence[float], backward: Sequence[float], counts: Sequence[int]) -> float:
    """Returns what a microbatch adds to a step with a flush, in the limit of many."""
    return max(stage_sums(forward, counts)) + max(stage_sums(backward, counts))


def of_sum(balance: Balance) -> Split:
    """Balances the sums of forward and backward."""
    return lambda forward, backward, num_stages: balance(
        [f + b for f, b in zip(forward, backward, strict=True)], num_stages
    )


def between_cells(cell_of: Sequence[str]) -> Balance:
    """Returns `partition_layers` for whole cells: the layers of a cell, which are neighbours, stay on one stage."""
    starts = [i for i, cell in enumerate(cell_of) if i == 0 or cell != cell_of[i - 1]]
    sizes = [b - a for a, b in pairwise([*starts, len(cell_of)])]

    def split(costs: Sequence[float], num_stages: int) -> list[int]:
        cells = partition_layers(stage_sums(costs, sizes), num_stages)
        return [sum(sizes[a:b]) for a, b in pairwise(accumulate(cells, initial=0))]

    return split


SPLITS: dict[str, Split] = {
    "exact, for a flush": for_flush,
    "exact": of_sum(partition_layers),
    "variance, greedy": of_sum(variance_greedy),
    "torchgpipe": of_sum(block_partition),
    "by count": of_sum(by_count),
}
