"""Which sequences share a microbatch: short ones together, long ones alone."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

Groups = tuple[tuple[int, ...], ...]  # the numbers of the sequences in each microbatch


def filled(work: Sequence[float], size: float, lengths: Sequence[int], most_tokens: float) -> list[list[int]]:
    """Returns groups of at most so much work and so many tokens, as few as best fit finds; what is larger is alone.

    Args:
        work: of each sequence.
        size: of a group, in work.
        lengths: tokens of each sequence.
        most_tokens: of a group.
    """
    groups: list[list[int]] = []
    left: list[tuple[float, float]] = []  # work and tokens
    for number in _largest_first(work):
        least = work[number], lengths[number]
        fitting = [index for index, (room, tokens) in enumerate(left) if room >= least[0] and tokens >= least[1]]
        if fitting:
            best = min(fitting, key=left.__getitem__)
        else:
            best = len(groups)
            groups.append([])
            left.append((size, most_tokens))
        groups[best].append(number)
        left[best] = left[best][0] - least[0], left[best][1] - least[1]
    return groups


def balanced(work: Sequence[float], number: int) -> list[list[int]]:
    """Returns so many groups of nearly equal work: the largest sequence first, each to the least group (Graham 1969).

    Args:
        work: of each sequence.
        number: of groups, at most that of the sequences.
    """
    least = [(0.0, 0, index) for index in range(number)]
    heapify(least)
    groups: list[list[int]] = [[] for _ in range(number)]
    for each in _largest_first(work):
        total, size, index = least[0]
        groups[index].append(each)
        heapreplace(least, (total + work[each], size + 1, index))
    return groups


def sequences_of(groups: Sequence[Sequence[int]], work: Sequence[float]) -> list[Groups]:
    """Returns the groups in the orders in which they are tried: largest first, largest last, and largest in the middle.

    A small first group reaches the last rank soon, and a small last one leaves the first rank little to wait for.
    """
    listed = (tuple(sorted(group)) for group in groups)
    falling = sorted(listed, key=lambda group: (-sum(work[number] for number in group), group))
    return [tuple(falling), tuple(falling[::-1]), (*falling[1::2][::-1], *falling[::2])]


def _largest_first(work: Sequence[float]) -> list[int]:
    return sorted(range(len(work)), key=lambda number: (-work[number], number))
