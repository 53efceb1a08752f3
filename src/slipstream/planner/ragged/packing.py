"""Which sequences of a step form a microbatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from math import inf

from slipstream.planner.ragged.step_problem import StepProblem

Groups = tuple[tuple[int, ...], ...]  # the numbers of the sequences in each microbatch

_SLICES = (1.0, 2.0, 4.0)  # multiples of the slice that balances fill and fixed costs
_GROUPS = (1.0, 2.0, 4.0)  # slices of a group of short sequences


def groupings(problem: StepProblem) -> Iterator[tuple[Groups, float]]:
    """Yields groups of sequences, each in one microbatch, with the work of a slice of them."""
    work = problem.work.tolist()
    for times in _SLICES if problem.room is None else (*_SLICES, inf):
        slice_work = times * problem.best_slice
        for groups in _groups(problem, work, slice_work):
            yield from ((packed, slice_work) for packed in sequences_of(groups, work))


def _groups(problem: StepProblem, work: list[float], slice_work: float) -> Iterator[list[list[int]]]:
    if not problem.packs:
        yield [[sequence] for sequence in range(len(work))]
    elif not problem.given.is_open("num_microbatches"):
        yield balanced(work, problem.given.num_microbatches)
    else:
        for size in (*(times * slice_work for times in _GROUPS), max(work)):
            yield filled(work, size, problem.lengths, problem.most_tokens)


def filled(work: Sequence[float], size: float, lengths: Sequence[int], most_tokens: float) -> list[list[int]]:
    """Returns the groups found by best fit, limited in work and tokens; a larger sequence is alone.

    Args:
        work: of each sequence.
        size: of a group, in work.
        lengths: tokens of each sequence.
        most_tokens: of a group.
    """
    groups: list[list[int]] = []
    left: list[tuple[float, float]] = []  # (work, tokens) left in each group
    for sequence in _largest_first(work):
        least = work[sequence], lengths[sequence]
        fitting = [index for index, (room, tokens) in enumerate(left) if room >= least[0] and tokens >= least[1]]
        if fitting:
            best = min(fitting, key=left.__getitem__)
        else:
            best = len(groups)
            groups.append([])
            left.append((size, most_tokens))
        groups[best].append(sequence)
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
    for sequence in _largest_first(work):
        total, size, index = least[0]
        groups[index].append(sequence)
        heapreplace(least, (total + work[sequence], size + 1, index))
    return groups


def sequences_of(groups: Sequence[Sequence[int]], work: Sequence[float]) -> list[Groups]:
    """Returns the groups in the orders in which they are tried: largest first, largest last, and largest in the middle.

    A small first group reaches the last rank soon, and a small last one leaves the first rank little to wait for.
    """
    listed = (tuple(sorted(group)) for group in groups)
    falling = sorted(listed, key=lambda group: (-sum(work[sequence] for sequence in group), group))
    return [tuple(falling), tuple(falling[::-1]), (*falling[1::2][::-1], *falling[::2])]


def _largest_first(work: Sequence[float]) -> list[int]:
    return sorted(range(len(work)), key=lambda sequence: (-work[sequence], sequence))
