"""The simulator over arrays, compiled: the ends of a schedule's actions, in a hundredth of the time.

It states a second time what `simulation` states, because the search of plans simulates thousands of schedules; a
property test shows that both agree. `planner.order.local_search` has a third form, for orders that change and may get
stuck: compiled code in numba's cache must lie in the file that calls it (see `numba_jit`).

Within a rank the order of a valid schedule has every action after those it needs there, so a rank only ever waits for
what others send it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from slipstream.array_types import Floats, Ints
from slipstream.schedule import Action, Channel, Op, Schedule, channel, sending
from slipstream.simulator.costs import CostModel
from slipstream.simulator.numba_jit import compiled

OPS = (Op.F, Op.B, Op.I, Op.W, Op.R, Op.OFFLOAD, Op.RELOAD)
_NUMBERS = {op: number for number, op in enumerate(OPS)}


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
        op = np.array([_NUMBERS[each] for each in ops])
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
        found = np.transpose(np.unravel_index(different, shape)).tolist()
        return [Action(OPS[op], *place) for op, *place in found], like

    def each(self, value: Callable[[Action], float]) -> Floats:
        """Returns the value of every action, computed once for those that only differ in a microbatch like others."""
        different, like = self._kinds
        return np.array([value(action) for action in different])[like]

    @cached_property
    def messages(self) -> tuple[Ints, Ints, int]:
        """Per action the one whose message it awaits and its own channel, or -1; and the number of channels."""
        lines = [sent and sent[1] for sent in self._sends]
        numbers = {line: number for number, line in enumerate(dict.fromkeys(filter(None, lines)))}
        own = np.array([-1 if line is None else numbers[line] for line in lines])[self._kinds[1]]
        return self._awaited(own >= 0), own, len(numbers)

    @cached_property
    def _sends(self) -> list[tuple[Action, Channel] | None]:
        """The message that each of the different actions sends, and its channel."""
        sends = [sending(action, self.schedule) for action in self._kinds[0]]
        return [None if send is None else (send, channel(send, self.schedule)) for send in sends]

    def _awaited(self, sends: NDArray[np.bool_]) -> Ints:
        """Returns for every action the one whose message it awaits, or -1.

        This is `schedule.dependencies.awaited_send` for all actions at the same time, as arrays.
        """
        shape = self.schedule.num_stages, self.schedule.num_microbatches, self.schedule.num_slices
        awaited = np.full(len(self.op), -1)
        forward = self.op == _NUMBERS[Op.F]
        backward = (self.op == _NUMBERS[Op.B]) | (self.op == _NUMBERS[Op.I])
        for runs, step in ((forward, 1), (backward, -1)):
            made = np.full(shape, -1)
            sent = np.flatnonzero(runs & sends)
            made[self.stage[sent] + step, self.microbatch[sent], self.slice[sent]] = sent
            awaited[runs] = made[self.stage[runs], self.microbatch[runs], self.slice[runs]]
        return awaited

    def ends(self, cost: CostModel) -> tuple[Floats, Floats]:
        """Returns when every action ends, as `slipstream.simulate` has it, and how long it takes."""
        awaited, line, num_lines = self.messages

        def link(value: Callable[[Action, int, int], float]) -> Floats:
            each = [
                0.0 if sent is None else value(sent[0], sent[1].source, sent[1].destination) for sent in self._sends
            ]
            return np.array(each)[self._kinds[1]]

        seconds = self.each(cost.seconds)
        travels, occupied = link(cost.link_seconds), link(cost.link_occupied)
        return _ends(self.firsts, seconds, awaited, line, num_lines, travels, occupied), seconds


@compiled
def _ends(
    firsts: Ints, seconds: Floats, awaited: Ints, line: Ints, num_lines: int, travels: Floats, occupied: Floats
) -> Floats:
    num_ranks = len(firsts) - 1
    ends, arrival = np.zeros(len(seconds)), np.full(len(seconds), -1.0)
    free, line_free = np.zeros(num_ranks), np.zeros(num_lines)
    reached = firsts[:-1].copy()
    waits = np.full(len(seconds), -1)  # for an action's message, a rank
    ready, num_ready = np.arange(num_ranks), num_ranks
    while num_ready:
        num_ready -= 1
        rank = ready[num_ready]
        while reached[rank] < firsts[rank + 1]:
            number = reached[rank]
            source = awaited[number]
            if source >= 0 and arrival[source] < 0:
                waits[source] = rank
                break
            start = free[rank] if source < 0 else max(free[rank], arrival[source])
            end = free[rank] = ends[number] = start + seconds[number]
            reached[rank] += 1
            if line[number] >= 0:
                leaves = max(end, line_free[line[number]])
                line_free[line[number]] = leaves + occupied[number]
                arrival[number] = leaves + travels[number]
                if waits[number] >= 0:
                    ready[num_ready] = waits[number]
                    num_ready += 1
    return ends
