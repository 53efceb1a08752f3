"""The buffers of a spread head's messages on a rank, counted from the order of its actions."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from slipstream.schedule import Action, Op, Schedule, gradients_before


class _Line(NamedTuple):
    """The channel of one kind of message between an end of the model and a rank's rows: the last stage's output, V's
    part, L's sums, E's embeddings, or the gradient of the first stage's input."""

    op: Op  # of a backward B, also where it is split
    stage: int  # next to which the rows are


class VocabularyBuffers:
    """Follows these messages through one rank's actions, as `slipstream.comm.VocabularyMessages` sends them.

    A receive is posted one ahead of the need. A send is kept until its answer has come; L's have none, and are kept
    until the end of the step.
    """

    def __init__(self, schedule: Schedule, rank: int, sizes: Mapping[Op, Sequence[float]]) -> None:
        """`sizes` are the bytes of each buffer, header included, of every slice of all microbatches: of the message of
        V, of L, and of E; of F, the head's input."""
        self._schedule, self._sizes = schedule, sizes
        self._firsts = [*accumulate(schedule.slice_counts, initial=0)]
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
        if self._to_first:  # the embeddings of this slice have gone through all stages
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
        while any(sent_action[2:] == action[2:] for sent_action in sent):
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
        # A gradient of embeddings is as large as they are.
        return self._sizes[Op.E if op is Op.B else op][self._firsts[action.microbatch] + action.slice]
