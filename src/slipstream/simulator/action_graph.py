"""The actions of a step with their costs, as arrays for compiled code."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from slipstream.array_types import Floats
from slipstream.schedule import Action, Lane, Op, operations_on
from slipstream.schedule.action_arrays import ActionArrays
from slipstream.schedule.sweep import ActionGraph, ActionOrder
from slipstream.simulator.costs import CostModel, result_seconds


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

    line, copies = np.full(len(different), -1), arrays.is_one_of(*operations_on(Lane.COPIES))
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


def result_delays(arrays: ActionArrays, graph: ActionGraph, cost: CostModel) -> Floats:
    """Returns of each entry of `graph.after` the seconds after which a result of a spread head is on the other rank; -1
    where it isn't one."""
    (different, like), size = arrays.kinds, len(arrays.op)
    senders, users = np.repeat(np.arange(size), np.diff(graph.first_after)), graph.after
    among = np.flatnonzero((arrays.rank[senders] != arrays.rank[users]) & (arrays.producer[users] != senders))
    ends = np.stack([like[senders[among]], arrays.rank[senders[among]], arrays.rank[users[among]]])
    kinds, of_kind = np.unique(ends, axis=1, return_inverse=True)
    seconds = np.array([result_seconds(cost, different[kind], *ranks) for kind, *ranks in kinds.T.tolist()], float)
    delays = np.full(len(users), -1.0)
    delays[among] = seconds[of_kind]
    return delays
