"""The groups and slices among which the plan of a step is chosen, and how short each can be."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import numpy as np

from slipstream.array_types import Floats, Ints
from slipstream.planner.steps.packed_rows import PackedRows
from slipstream.planner.steps.sequence_groups import Groups, balanced, filled, sequences_of
from slipstream.planner.steps.sliced_step import SlicedStep
from slipstream.planner.steps.step_problem import StepProblem
from slipstream.schedule import Op

_SLICES = (1.0, 2.0, 4.0)  # times the slice that balances fill and fixed costs
_GROUPS = (1.0, 2.0, 4.0)  # slices of a group of short sequences


def candidates(problem: StepProblem) -> Iterator[SlicedStep]:
    """Yields groups in slices of equal planned time that fit the ranks' memory, each once."""
    seen = set()
    for groups, slice_work in _groupings(problem):
        rows = PackedRows(groups, problem.lengths, problem.rates, problem.granularity)
        step = SlicedStep(rows, rows.cut(_slice_counts(problem, rows.work, slice_work)))
        if (groups, step.slices) not in seen and fits(problem, step):
            seen.add((groups, step.slices))
            yield step


def _groupings(problem: StepProblem) -> Iterator[tuple[Groups, float]]:
    """Yields groups of sequences with the work of a slice of them."""
    work = problem.work.tolist()
    for times in _SLICES if problem.room is None else (*_SLICES, inf):
        slice_work = times * problem.best_slice
        for groups in _groups(problem, work, slice_work):
            yield from ((each, slice_work) for each in sequences_of(groups, work))


def _groups(problem: StepProblem, work: list[float], slice_work: float) -> Iterator[list[list[int]]]:
    if not problem.packs:
        yield [[number] for number in range(len(work))]
    elif problem.num_microbatches is not None:
        yield balanced(work, problem.num_microbatches)
    else:
        for size in (*(times * slice_work for times in _GROUPS), max(work)):
            yield filled(work, size, problem.lengths, problem.most_tokens)


def _slice_counts(problem: StepProblem, work: Floats, slice_work: float) -> Ints:
    """Returns the number of slices of each microbatch."""
    wanted = problem.num_slices * work / work.max() if problem.num_slices else work / slice_work
    counts: Ints = np.maximum(np.round(wanted), 1).astype(np.int64)
    return counts


def fits(problem: StepProblem, step: SlicedStep) -> bool:
    """Returns whether every rank can hold all slices of each microbatch: what any order needs."""
    if problem.room is None:
        return True
    held = np.zeros((problem.num_ranks, len(step.counts)))
    np.add.at(held, problem.ranks, np.add.reduceat(step.held, step.firsts, axis=1))
    return bool((held <= problem.limits[:, None]).all())


def lower_bound(problem: StepProblem, step: SlicedStep) -> float:
    """Returns seconds that no order of these slices beats.

    A rank begins once the first slice of some microbatch has reached it, does all its work, and its last input gradient
    has yet to travel through the stages before, while weight gradients may follow at the very end.
    """
    forward, whole, inputs, weights = (step.seconds[op] for op in (Op.F, Op.B, Op.I, Op.W))
    back, both = (
        (np.minimum(whole, inputs), np.minimum(whole, inputs + weights)) if problem.may_split else (whole, whole)
    )
    ranks, number = problem.ranks, problem.num_ranks
    crosses = np.diff(ranks, prepend=ranks[0]) != 0
    link = step.links[0][step.firsts] * crosses[:, None]
    ahead, behind = forward[:, step.firsts], back[:, step.firsts]
    head, tail = np.full(number, np.inf), np.full(number, np.inf)
    np.minimum.at(head, ranks, (np.cumsum(ahead + link, axis=0) - ahead).min(axis=1))
    np.minimum.at(tail, ranks, (np.cumsum(behind + link, axis=0) - behind).min(axis=1))
    until_sent = np.bincount(ranks, (forward + back).sum(axis=1), minlength=number) + tail
    work = np.bincount(ranks, (forward + both).sum(axis=1), minlength=number)
    return float((head + np.maximum(work, until_sent)).max())
