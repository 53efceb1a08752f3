"""The transport's buffers on a rank, counted from the order of its sends, receives and computing."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping

from slipstream.schedule import RECEIVES, SENDS, Action, Channel, Op, Schedule, channel, send_windows
from slipstream.simulator.memory_table import MemoryTables, table_of
from slipstream.simulator.vocabulary_buffers import VocabularyBuffers

Windows = Mapping[Channel, int]  # see `send_windows`


def pool_bytes(schedule: Schedule, rank: int, tables: MemoryTables, windows: Windows | None = None) -> float:
    """Returns the bytes of the transport's buffers on a rank: of each size as many as are ever in use at the same time.

    One for every receive from when it is posted until the backward of its slice is done (W's where it is split, since
    a forward's input and an output's gradient belong to a weight gradient's factors; F's where the input is moved to
    the host or no backward comes), and one for every send until as many later ones have gone out on its channel as its
    window is wide. Those of a spread head's messages come from the same pool (`VocabularyBuffers`).
    """
    windows = windows or send_windows(schedule)
    used: Counter[float] = Counter()  # buffers by size, which are reused and never freed
    most: Counter[float] = Counter()
    sent: defaultdict[Channel, deque[float]] = defaultdict(deque)
    posted: set[Action] = set()
    spread = VocabularyBuffers(schedule, rank, tables) if schedule.spreads_vocabulary else None
    for action in schedule.actions[rank]:
        table = table_of(tables, action.microbatch)
        size = table.payload(action.slice) + table.header_bytes
        if action.op in SENDS:
            on_their_way = sent[line := channel(action, schedule)]
            if len(on_their_way) >= windows[line]:
                used[on_their_way.popleft()] -= 1
            on_their_way.append(size)
        elif action.op in RECEIVES:
            posted.add(action)
        else:
            released = _released(action, schedule) & posted
            posted -= released
            returned = [(size, -len(released))]
            sent_here = [*spread.changes(action)] if spread else []
            # a backward returns what it received once its result is sent, others before they compute
            for own, change in sent_here + returned if action.op is Op.B else returned + sent_here:
                used[own] += change
                most[own] = max(most[own], used[own])
            continue
        used[size] += 1
        most[size] = max(most[size], used[size])
    return sum(size * number for size, number in most.items())


def _released(action: Action, schedule: Schedule) -> set[Action]:
    """Returns the receives whose buffers are free after an action."""
    if action.op in (Op.B, Op.W):
        return {action.with_op(Op.RECV_F), action.with_op(Op.RECV_B)}
    if action.op is not Op.F:
        return set()
    is_done = action.stage < schedule.num_frozen_stages or action.with_op(Op.OFFLOAD) in schedule.positions
    return {action.with_op(Op.RECV_F)} if is_done else set()
