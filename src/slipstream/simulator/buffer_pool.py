"""The transport's buffers on a rank, counted from the order of its sends, receives and computing."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping

from slipstream.schedule import RECEIVES, SENDS, Action, Channel, Op, Schedule, channel, send_windows
from slipstream.simulator.memory_table import MemoryTable


def pool_bytes(
    schedule: Schedule, rank: int, table: MemoryTable, windows: Mapping[Channel, int] | None = None
) -> float:
    """Returns the bytes of the transport's buffers on a rank: of each size as many as are ever in use at the same time.

    One for every receive from when it is posted until the backward of its slice is done (W's where it is split, since
    a forward's input and an output's gradient belong to a weight gradient's factors; F's where the input is moved to
    the host), and one for every send until as many later ones have gone out on its channel as its window is wide.
    """
    pool, windows = _Pool(), windows or send_windows(schedule)
    sent: defaultdict[Channel, deque[float]] = defaultdict(deque)
    posted: set[Action] = set()
    for action in schedule.actions[rank]:
        size = table.payload(action.slice) + table.header_bytes
        if action.op in SENDS:
            line = sent[channel(action, schedule)]
            if len(line) >= windows[channel(action, schedule)]:
                pool.give_back(line.popleft())
            line.append(size)
            pool.take(size)
        elif action.op in RECEIVES:
            posted.add(action)
            pool.take(size)
        else:
            for receive in _released(action, schedule) & posted:
                posted.remove(receive)
                pool.give_back(size)
    return pool.num_bytes


def _released(action: Action, schedule: Schedule) -> set[Action]:
    """Returns the receives whose buffers are free after an action."""
    forward, backward = action.with_op(Op.RECV_F), action.with_op(Op.RECV_B)
    offloaded = action.with_op(Op.OFFLOAD) in schedule.positions
    if action.op is Op.F and offloaded:
        return {forward}
    return {forward, backward} if action.op in (Op.B, Op.W) else set()


class _Pool:
    """Buffers by size, which are reused and never freed."""

    def __init__(self) -> None:
        self._used: Counter[float] = Counter()
        self._most: Counter[float] = Counter()

    def take(self, size: float) -> None:
        self._used[size] += 1
        self._most[size] = max(self._most[size], self._used[size])

    def give_back(self, size: float) -> None:
        self._used[size] -= 1

    @property
    def num_bytes(self) -> float:
        return sum(size * number for size, number in self._most.items())
