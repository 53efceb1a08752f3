"""The transport's buffers on a rank, counted from the order of its sends, receives and computing."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from slipstream.schedule import RECEIVES, SENDS, Action, Channel, Op, Schedule, channel, gradients_before, send_windows
from slipstream.simulator.memory_table import MemoryTables, table_of


class _Line(NamedTuple):
    """The channel of one kind of message between an end of the model and a rank's rows: the last stage's output, V's
    part, L's sums, what E looks up, or the gradient of the first stage's input."""

    op: Op  # of a backward B, also where it is split
    stage: int  # next to which the rows are


class VocabularyBuffers:
    """Follows these messages through one rank's actions, as `slipstream.comm.VocabularyMessages` sends them.

    A receive is posted one ahead of what is needed. A send is kept until its answer has come; L's have none, and are
    kept until the end of the step.
    """

    def __init__(self, schedule: Schedule, rank: int, tables: MemoryTables) -> None:
        self._schedule, self._tables = schedule, tables
        self._last = schedule.num_stages - 1
        has_first, has_last = (schedule.placement[end] == rank for end in (0, self._last))
        others = [g for g in schedule.vocabulary_stages if schedule.placement[g] != rank]
        embeds = schedule.spreads_embedding
        self._of_last, self._of_first = others if has_last else [], others if has_first and embeds else []
        self._to_last, self._to_first = not has_last, embeds and not has_first
        self._due: dict[_Line, deque[Action]] = {}
        self._posted: defaultdict[_Line, set[tuple[int, int]]] = defaultdict(set)
        self._sent: defaultdict[_Line, deque[Action]] = defaultdict(deque)

    def changes(self, action: Action) -> Iterator[tuple[float, int]]:
        """Yields, in order, the bytes of each buffer that the action takes, with 1, or returns, with -1."""
        op, stage = action.op, action.stage
        if op is Op.F and stage == self._last:
            yield from self._sends(Op.F, self._of_last, action)
        elif op is Op.F and stage == 0:
            yield from self._lookups(action)
        elif op is Op.L:
            yield from self._sums(action)
        elif op in (Op.B, Op.I) and stage == 0:
            yield from self._sends(Op.B, self._of_first, action)
        elif op is Op.V:
            yield from self._logits(action)
        elif op is Op.VW and self._to_last:
            yield from self._receives(_Line(Op.L, stage), action, ahead=1)
            yield from self._settled(_Line(Op.V, stage), action)
            yield self._size(Op.F, action), -1
            yield self._size(Op.L, action), -1
        elif op is Op.E and self._to_first:
            yield from self._send(_Line(Op.E, stage), action)
        elif op is Op.EW and self._to_first:
            yield from self._receives(_Line(Op.B, stage), action, ahead=1)
            yield self._size(Op.B, action), -1

    def _logits(self, action: Action) -> Iterator[tuple[float, int]]:
        if self._to_last:
            yield from self._receives(_Line(Op.F, action.stage), action, ahead=1)
        if self._to_first:  # what was looked up for this slice has gone through all stages
            yield from self._settled(_Line(Op.E, action.stage), action)
        if self._to_last:
            yield from self._send(_Line(Op.V, action.stage), action)

    def _lookups(self, action: Action) -> Iterator[tuple[float, int]]:
        for stage in self._of_first:
            yield from self._receives(_Line(Op.E, stage), action, ahead=0)
        for stage in self._of_first:
            yield from self._receives(_Line(Op.E, stage), action, ahead=1)
            if (before := self._gradients_before.get(action.with_op(Op.E)._replace(stage=stage))) is not None:
                yield from self._settled(_Line(Op.B, stage), before)
            yield self._size(Op.E, action), -1

    def _sums(self, action: Action) -> Iterator[tuple[float, int]]:
        for stage in self._of_last:
            yield from self._receives(_Line(Op.V, stage), action, ahead=0)
        for stage in self._of_last:
            yield from self._receives(_Line(Op.V, stage), action, ahead=1)
            yield from self._settled(_Line(Op.F, stage), action)
        for _ in self._of_last:
            yield self._size(Op.V, action), -1
        yield from self._sends(Op.L, self._of_last, action)

    def _sends(self, op: Op, stages: Sequence[int], action: Action) -> Iterator[tuple[float, int]]:
        for stage in stages:
            yield from self._send(_Line(op, stage), action)

    def _send(self, line: _Line, action: Action) -> Iterator[tuple[float, int]]:
        self._sent[line].append(action)
        yield self._size(line.op, action), 1

    def _settled(self, line: _Line, action: Action) -> Iterator[tuple[float, int]]:
        """Returns the sends on a line up to that of the action's slice."""
        sent = self._sent[line]
        while any(each[2:] == action[2:] for each in sent):
            yield self._size(line.op, sent.popleft()), -1

    def _receives(self, line: _Line, action: Action, ahead: int) -> Iterator[tuple[float, int]]:
        """Posts the receives on a line up to that of the action's slice, and as many more."""
        due = self._due.setdefault(line, deque(self._sent_on(line)))
        posted = self._posted[line]
        while action[2:] not in posted:
            yield from self._post(line, due.popleft())
        for _ in range(min(ahead, len(due))):
            yield from self._post(line, due.popleft())

    def _post(self, line: _Line, sent: Action) -> Iterator[tuple[float, int]]:
        self._posted[line].add((sent.microbatch, sent.slice))
        yield self._size(line.op, sent), 1

    def _sent_on(self, line: _Line) -> list[Action]:
        """Returns the actions that send on a line, in their order."""
        ends = {Op.V: line.stage, Op.E: line.stage, Op.B: 0}
        source, ops = ends.get(line.op, self._last), (Op.B, Op.I) if line.op is Op.B else (line.op,)
        row = self._schedule.actions[self._schedule.placement[source]]
        return [action for action in row if action.op in ops and action.stage == source]

    @cached_property
    def _gradients_before(self) -> dict[Action, Action]:
        return gradients_before(self._schedule)

    def _size(self, op: Op, action: Action) -> float:
        """Returns the bytes of the buffer, header included; a gradient of what was looked up is as large as that."""
        return table_of(self._tables, action.microbatch).buffer(Op.E if op is Op.B else op, action.slice)


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
