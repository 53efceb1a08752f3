"""The transport's buffers of a spread head's messages: what the actions of a rank take from the pool and return."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import NamedTuple

from slipstream.schedule import Action, Op, Schedule
from slipstream.simulator.memory_table import MemoryTables, table_of


class _Line(NamedTuple):
    """The channel of one kind of message between the last stage and a rank's rows: F's input, V's part or L's sums."""

    op: Op
    stage: int  # next to which the rows are


class VocabularyBuffers:
    """Follows these messages through one rank's actions, as `slipstream.messages.VocabularyMessages` sends them.

    A receive is posted one ahead of what is needed. A send is kept until its answer has come; L's have none, and are
    kept until the end of the step.
    """

    def __init__(self, schedule: Schedule, rank: int, tables: MemoryTables) -> None:
        self._schedule, self._tables = schedule, tables
        self._last = schedule.num_stages - 1
        has_last = schedule.placement[self._last] == rank
        stages = [g for g in schedule.vocabulary_stages if (schedule.placement[g] == rank) != has_last]
        self._remote = stages if has_last else []  # rows on other ranks, if the last stage is here
        self._rows = {*([] if has_last else stages)}  # rows here, if it isn't
        self._due: dict[_Line, deque[Action]] = {}
        self._posted: defaultdict[_Line, set[tuple[int, int]]] = defaultdict(set)
        self._sent: defaultdict[_Line, deque[Action]] = defaultdict(deque)

    def changes(self, action: Action) -> Iterator[tuple[float, int]]:
        """Yields, in order, the bytes of each buffer that the action takes, with 1, or returns, with -1."""
        if action.op is Op.F and action.stage == self._last:
            yield from self._sends(Op.F, action)
        elif action.op is Op.L:
            yield from self._sums(action)
        elif action.op is Op.V and action.stage in self._rows:
            yield from self._receives(_Line(Op.F, action.stage), action, ahead=1)
            yield from self._send(_Line(Op.V, action.stage), action)
        elif action.op is Op.VW and action.stage in self._rows:
            yield from self._receives(_Line(Op.L, action.stage), action, ahead=1)
            yield from self._settled(_Line(Op.V, action.stage), action)
            yield self._size(Op.F, action), -1
            yield self._size(Op.L, action), -1

    def _sums(self, action: Action) -> Iterator[tuple[float, int]]:
        for stage in self._remote:
            yield from self._receives(_Line(Op.V, stage), action, ahead=0)
        for stage in self._remote:
            yield from self._receives(_Line(Op.V, stage), action, ahead=1)
            yield from self._settled(_Line(Op.F, stage), action)
        for _ in self._remote:
            yield self._size(Op.V, action), -1
        yield from self._sends(Op.L, action)

    def _sends(self, op: Op, action: Action) -> Iterator[tuple[float, int]]:
        for stage in self._remote:
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
        source = line.stage if line.op is Op.V else self._last
        row = self._schedule.actions[self._schedule.placement[source]]
        return [action for action in row if action.op is line.op and action.stage == source]

    def _size(self, op: Op, action: Action) -> float:
        """Returns the bytes of the buffer, header included."""
        table = table_of(self._tables, action.microbatch)
        if op is Op.F:
            return table.payload(action.slice) + table.header_bytes
        return table.vocabulary_bytes.get((op, action.slice), 0)
