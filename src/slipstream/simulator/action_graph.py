"""The actions of a step as arrays for compiled code: the predecessors, rank and message of each.

The rules of order are asked for the actions of one microbatch (`slipstream.schedule.predecessors`), and hold for all
microbatches that have the same actions: none but REDUCE_GRAD, which follows its rank's order, needs one of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from slipstream.array_types import Flags, Floats, Ints
from slipstream.schedule import VOCABULARY, Action, Channel, Op, Schedule, channel, predecessors, sending
from slipstream.simulator.costs import CostModel

OPS = (Op.F, Op.B, Op.I, Op.W, Op.R, Op.OFFLOAD, Op.RELOAD, Op.REDUCE_GRAD, *sorted(VOCABULARY))
NUMBERS = {op: index for index, op in enumerate(OPS)}
_SENT = [NUMBERS[op] for op in (Op.F, Op.B, Op.I)]  # the ops whose results pass between stages
_PLACES = 2**20  # slices of a stage that are told apart


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


class Precedence(NamedTuple):
    """Which actions come before and after each, as an ActionGraph has them."""

    first_before: Ints
    before: Ints
    first_after: Ints
    after: Ints

    @classmethod
    def of(cls, op: Ints, stage: Ints, microbatch: Ints, index: Ints, shape: Schedule) -> Precedence:
        """Returns the precedence of numbered actions by the rules.

        Args:
            op: of each action, its place in OPS.
            stage: of each.
            microbatch: of each.
            index: the slice of each.
            shape: a schedule with the placement, reach, slice counts and frozen stages; its order doesn't count.
        """
        place = (op * shape.num_stages + stage) * _PLACES + index
        order = np.lexsort((place, microbatch))
        firsts = np.searchsorted(microbatch[order], np.arange(shape.num_microbatches + 1))
        alike: dict[tuple[int, tuple[int, ...] | None, bytes], list[int]] = {}
        for microbatch_index in range(shape.num_microbatches):
            reach = None if shape.reach is None else shape.reach[microbatch_index]
            places = place[order[firsts[microbatch_index] : firsts[microbatch_index + 1]]].tobytes()
            alike.setdefault((shape.slice_counts[microbatch_index], reach, places), []).append(microbatch_index)
        pairs = []
        for key, members in alike.items():
            before, after = _within_microbatch(shape.placement, shape.num_frozen_stages, *key)
            numbers = order[firsts[members][:, None] + np.arange(len(key[2]) // place.itemsize)]
            pairs.append((numbers[:, before].ravel(), numbers[:, after].ravel()))
        before, after = (np.concatenate(side) for side in zip(*pairs, strict=True))
        sizes = (np.bincount(side, minlength=len(op)) for side in (after, before))
        first_before, first_after = (np.concatenate([[0], np.cumsum(size)]) for size in sizes)
        in_order = np.argsort(after, kind="stable")
        before, after = before[in_order], after[in_order]
        return cls(first_before, before, first_after, after[np.argsort(before, kind="stable")])


@lru_cache(maxsize=1024)
def _within_microbatch(
    placement: tuple[int, ...], num_frozen: int, num_slices: int, reach: tuple[int, ...] | None, places: bytes
) -> tuple[Ints, Ints]:
    """Returns the pairs of actions of one microbatch of which the one comes before the other, by their places."""
    actions = []
    for place in np.frombuffer(places, np.int64).tolist():
        op_and_stage, index = divmod(place, _PLACES)
        op, stage = divmod(op_and_stage, len(placement))
        actions.append(Action(OPS[op], stage, 0, index))
    rows: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    for action in actions:
        rows[placement[action.stage]].append(action)
    reaches = None if reach is None else (reach,)
    schedule = Schedule("rules", tuple(map(tuple, rows)), placement, 1, num_slices, reaches, (), num_frozen)
    numbers = {action: index for index, action in enumerate(actions)}
    pairs = [(numbers[before], numbers[action]) for action in actions for before in predecessors(action, schedule)]
    before, after = np.array(pairs, np.int64).reshape(-1, 2).T
    return before, after


class ContextMarks(NamedTuple):
    """The actions at which a microbatch's keys, values and their gradients on a stage come and go."""

    opens: Flags  # its first forward
    begins: Flags  # its first B or I
    closes: Flags  # its last B or I, or the last F of a stage without backwards


def first_of(key: Ints, among: Flags) -> Flags:
    """Marks the first entry of every key, of the entries in `among`."""
    places = np.flatnonzero(among)
    first = np.zeros(len(key), np.bool_)
    first[places[np.unique(key[places], return_index=True)[1]]] = True
    return first


@dataclass(frozen=True, eq=False)
class ActionArrays:
    """A valid schedule of compute actions as arrays; rank r's, in order, are `firsts[r]` up to `firsts[r + 1]`."""

    schedule: Schedule
    firsts: Ints
    op: Ints  # place in OPS
    stage: Ints
    microbatch: Ints
    slice: Ints
    alike: bool  # whether all microbatches take the same times

    @classmethod
    def of(cls, schedule: Schedule, alike: bool = True) -> ActionArrays:
        """Returns the arrays of a compute-only schedule; microbatches with different numbers of slices aren't alike."""
        ops, *columns = zip(*(action for row in schedule.actions for action in row), strict=True)
        op = np.array([NUMBERS[name] for name in ops])
        firsts = np.cumsum([0, *map(len, schedule.actions)])
        stage, microbatch, index = (np.array(column) for column in columns)
        return cls(schedule, firsts, op, stage, microbatch, index, alike and not schedule.is_ragged)

    @cached_property
    def _kinds(self) -> tuple[list[Action], Ints]:
        """The actions that take different times, and the index of the one that each action is like.

        Where microbatches are alike, their actions are like those of the first.
        """
        schedule = self.schedule
        microbatch = np.zeros_like(self.microbatch) if self.alike else self.microbatch
        shape = len(OPS), schedule.num_stages, schedule.num_microbatches, schedule.num_slices
        numbers = np.ravel_multi_index((self.op, self.stage, microbatch, self.slice), shape)
        different, like = np.unique(numbers, return_inverse=True)
        places = np.transpose(np.unravel_index(different, shape)).tolist()
        return [Action(OPS[op], *place) for op, *place in places], like

    def each(self, value: Callable[[Action], float]) -> Floats:
        """Returns the value of every action, computed once for those that only differ in a microbatch like others."""
        different, like = self._kinds
        return np.array([value(action) for action in different], float)[like]

    @cached_property
    def rank(self) -> Ints:
        """The rank of every action."""
        return np.repeat(np.arange(len(self.firsts) - 1), np.diff(self.firsts))

    @cached_property
    def precedence(self) -> Precedence:
        """The predecessors and successors of every action."""
        return Precedence.of(self.op, self.stage, self.microbatch, self.slice, self.schedule)

    @cached_property
    def slices(self) -> Ints:
        """The number of each action's slice among those of all microbatches."""
        counts = np.array(self.schedule.slice_counts)
        numbers: Ints = (np.cumsum(counts) - counts)[self.microbatch] + self.slice
        return numbers

    def places(self, *ops: Op) -> Ints:
        """Returns which action has one of these ops, (stages, slices of all microbatches); -1 for none."""
        table = np.full((self.schedule.num_stages, sum(self.schedule.slice_counts)), -1)
        mine = np.flatnonzero(np.logical_or.reduce([self.op == NUMBERS[op] for op in ops]))
        table[self.stage[mine], self.slices[mine]] = mine
        return table

    def has(self, op: Op) -> Flags:
        """Marks the actions whose slice has such an op on their stage."""
        marks: Flags = self.places(op)[self.stage, self.slices] >= 0
        return marks

    @cached_property
    def producer(self) -> Ints:
        """The action of the stage before or after, on another rank, whose result each action needs, or -1."""
        first_before, before, *_ = self.precedence
        after = np.repeat(np.arange(len(self.op)), np.diff(first_before))
        sent = np.isin(self.op, _SENT)
        crosses = (self.rank[before] != self.rank[after]) & sent[before] & sent[after]
        producer = np.full(len(self.op), -1)
        producer[after[crosses]] = before[crosses]
        return producer

    @cached_property
    def _sends(self) -> list[tuple[Action, Channel] | None]:
        """The message that each of the different actions sends, and its channel."""
        sends = [sending(action, self.schedule) for action in self._kinds[0]]
        return [None if send is None else (send, channel(send, self.schedule)) for send in sends]

    @property
    def context_marks(self) -> ContextMarks:
        """When the context of each microbatch comes and goes."""
        chain = self.stage * self.schedule.num_microbatches + self.microbatch
        forward = self.op == NUMBERS[Op.F]
        backward = (self.op == NUMBERS[Op.B]) | (self.op == NUMBERS[Op.I])
        last = np.where(self.stage < self.schedule.num_frozen_stages, forward, backward)
        closes = first_of(chain[::-1], last[::-1])[::-1]
        return ContextMarks(first_of(chain, forward), first_of(chain, backward), closes)

    def timed(self, cost: CostModel) -> tuple[ActionGraph, ActionOrder]:
        """Returns the arrays for compiled code, with the costs of actions and messages, and the schedule's order."""

        def link(value: Callable[[Action, int, int], float]) -> Floats:
            sent = (send and value(send[0], send[1].source, send[1].destination) for send in self._sends)
            return np.array([seconds or 0.0 for seconds in sent], float)[self._kinds[1]]

        lines = dict.fromkeys(send[1] for send in self._sends if send)
        numbers = {line: index for index, line in enumerate(lines)}
        line = np.array([numbers[send[1]] if send else -1 for send in self._sends])[self._kinds[1]]
        arrives, occupied = link(cost.link_seconds), link(cost.link_occupied)
        copies = np.isin(self.op, [NUMBERS[Op.OFFLOAD], NUMBERS[Op.RELOAD]])
        if copies.any():
            line = np.where(copies, len(lines) + self.rank, line)
            copied = np.where(copies, self.each(cost.copy_seconds), 0.0)
            arrives, occupied = arrives + copied, occupied + copied
        return self.graph(self.each(cost.seconds), line, len(lines), arrives, occupied)

    def graph(
        self,
        seconds: Floats,
        channel: Ints | None = None,
        num_channels: int = 0,
        link_seconds: Floats | None = None,
        link_occupied: Floats | None = None,
    ) -> tuple[ActionGraph, ActionOrder]:
        """Returns the arrays for compiled code, without bytes, and the schedule's order; by default messages take no
        time."""
        size, rows = len(self.op), [range(*self.firsts[rank : rank + 2]) for rank in range(len(self.firsts) - 1)]
        nothing, longest = np.zeros(size), max(map(len, rows))
        graph = ActionGraph(
            seconds=seconds,
            exists=np.ones(size, np.bool_),
            rank=self.rank,
            chain=self.microbatch,
            channel=np.full(size, -1) if channel is None else channel,
            link_seconds=nothing if link_seconds is None else link_seconds,
            link_occupied=nothing if link_occupied is None else link_occupied,
            acquired=nothing,
            released=nothing,
            **self.precedence._asdict(),
            limits=np.full(len(rows), np.inf),
            counts=np.array([len(rows), num_channels, self.schedule.num_microbatches, longest]),
        )
        return graph, ActionOrder.of(rows, longest)
