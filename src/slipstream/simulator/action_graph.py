"""The actions of a step with their costs, as arrays for compiled code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from slipstream.array_types import Flags, Floats, Ints
from slipstream.schedule import Action, Op
from slipstream.schedule.action_arrays import ActionArrays
from slipstream.simulator.costs import CostModel


class ActionGraph(NamedTuple):
    """The arrays that compiled functions read; most have one entry per action number."""

    seconds: Floats
    exists: Flags  # False for the weight gradients of whole backwards
    rank: Ints
    chain: Ints  # the slices of a microbatch that attend to each other, in the order of admission
    channel: Ints  # the channel that carries the result; -1 where it stays on its rank; after these the ranks' copies
    link_seconds: Floats
    link_occupied: Floats
    acquired: Floats  # bytes allocated at the action's start
    released: Floats  # bytes freed at its end
    first_before: Ints  # the actions before number n are before[first_before[n] : first_before[n + 1]]
    before: Ints
    first_after: Ints
    after: Ints
    limits: Floats  # bytes per rank
    counts: Ints  # of ranks, channels, chains, and actions of the busiest rank with all backwards split


class ActionOrder(NamedTuple):
    """The order of each rank's action numbers: rank r runs rows[r, : lengths[r]]."""

    rows: Ints
    lengths: Ints

    @classmethod
    def of(cls, rows: Sequence[Sequence[int] | Ints], longest: int) -> ActionOrder:
        """Returns the order of these rows, with room for `longest` actions on each rank."""
        numbers = np.zeros((len(rows), longest), np.int64)
        for rank, row in enumerate(rows):
            numbers[rank, : len(row)] = row
        return cls(numbers, np.array([len(row) for row in rows]))

    def by_rank(self) -> list[Ints]:
        """Returns the action numbers of each rank, in order."""
        return [row[:length] for row, length in zip(self.rows, self.lengths, strict=True)]


def timed(arrays: ActionArrays, cost: CostModel) -> tuple[ActionGraph, ActionOrder]:
    """Returns the arrays for compiled code, without bytes, and the schedule's order."""
    (different, like), user = arrays.kinds, np.flatnonzero(arrays.producer >= 0)
    sender = arrays.producer[user]
    # Where the message of a kind of action goes, and the channels: a direction, a source and a destination.
    ranks, kinds = np.zeros((2, len(different)), np.int64), np.unique(like[sender])
    ranks[:, like[sender]] = arrays.rank[sender], arrays.rank[user]
    sends = [different[kind].with_op(Op.SEND_F if different[kind].op is Op.F else Op.SEND_B) for kind in kinds]
    lines, of_kind = np.unique([*ranks[:, kinds], [s.op is Op.SEND_F for s in sends]], axis=1, return_inverse=True)

    def link(value: Callable[[Action, int, int], float]) -> Floats:
        seconds = np.zeros(len(different))
        seconds[kinds] = [*map(value, sends, *ranks[:, kinds].tolist())]
        return seconds[like]

    line, copies = np.full(len(different), -1), arrays.is_one_of(Op.OFFLOAD, Op.RELOAD)
    line[kinds] = of_kind
    line = np.where(copies, len(lines[0]) + arrays.rank, line[like])
    copied = arrays.each(cost.copy_seconds, among=copies)
    size, rows = len(line), [range(*pair) for pair in pairwise(arrays.firsts.tolist())]
    longest = max(map(len, rows))
    graph = ActionGraph(
        seconds=arrays.each(cost.seconds),
        exists=np.ones(size, np.bool_),
        rank=arrays.rank,
        chain=arrays.microbatch,
        channel=line,
        link_seconds=link(cost.link_seconds) + copied,
        link_occupied=link(cost.link_occupied) + copied,
        acquired=np.zeros(size),
        released=np.zeros(size),
        **arrays.precedence._asdict(),
        limits=np.full(len(rows), np.inf),
        counts=np.array([len(rows), len(lines[0]), arrays.schedule.num_microbatches, longest]),
    )
    return graph, ActionOrder.of(rows, longest)
