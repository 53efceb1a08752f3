"""An ordering problem as arrays for compiled code, and its conversion from and to a Schedule.

Unit u = (stage · microbatches + microbatch) · slices + slice. Its forward is number u, its backward or input
gradient U + u, and its weight gradient 2U + u, where U is the number of units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from slipstream.array_types import Flags, Floats, Ints
from slipstream.schedule import Action, Channel, Op, Schedule, channel, predecessors, sending
from slipstream.simulator import CostModel


class ActionGraph(NamedTuple):
    """The arrays that compiled functions read; most have one entry per action number."""

    seconds: Floats
    exists: Flags  # False for the weight gradients of whole backwards
    rank: Ints
    chain: Ints  # the slices of a microbatch that attend to each other, in the order of admission
    channel: Ints  # the channel that carries the result; -1 where it stays on its rank
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


@dataclass(frozen=True)
class OrderingProblem:
    """All actions, their costs, and the memory of each rank; see `find_order` for the arguments."""

    placement: tuple[int, ...]
    num_ranks: int
    num_microbatches: int
    num_slices: int
    cost: CostModel
    limits: tuple[float, ...]
    reach: tuple[tuple[int, ...], ...] | None = None
    split: bool = True

    @property
    def num_units(self) -> int:
        return len(self.placement) * self.num_microbatches * self.num_slices

    def number(self, action: Action) -> int:
        """Returns the number of an action."""
        part = 0 if action.op is Op.F else 2 if action.op is Op.W else 1
        unit = (action.stage * self.num_microbatches + action.microbatch) * self.num_slices + action.slice
        return part * self.num_units + unit

    def action(self, op: Op, unit: int) -> Action:
        """Returns the action of an op on a unit."""
        rest, index = divmod(unit, self.num_slices)
        return Action(op, *divmod(rest, self.num_microbatches), index)

    @cached_property
    def whole(self) -> Schedule:
        """The order that needs the least memory on every rank: chain after chain, with whole backwards.

        The backward of a chain's last slice on the last stage follows all forwards of the chain on all stages,
        and precedes all other backwards of the chain. So with any order every rank holds a whole chain at that
        moment, and with this one never more.
        """
        rows: list[list[Action]] = [[] for _ in range(self.num_ranks)]
        stages = range(len(self.placement))
        for microbatch, slices in self.chains:
            for op, order in ((Op.F, stages), (Op.B, reversed(stages))):
                for stage in order:
                    for index in slices if op is Op.F else reversed(slices):
                        rows[self.placement[stage]].append(Action(op, stage, microbatch, index))
        return self.schedule_of(rows)

    def schedule_of(self, rows: Sequence[Sequence[Action]]) -> Schedule:
        """Returns the Schedule of each rank's actions."""
        actions = tuple(map(tuple, rows))
        return Schedule("auto", actions, self.placement, self.num_microbatches, self.num_slices, self.reach)

    @cached_property
    def chains(self) -> list[tuple[int, range]]:
        """The (microbatch, slices) of each chain: the runs of slices that attend only to each other."""
        chains = []
        for microbatch in range(self.num_microbatches):
            row = self.reach[microbatch] if self.reach else (0,) * self.num_slices
            ends = [i for i in range(1, self.num_slices) if min(row[i:]) == i] + [self.num_slices]
            chains += [(microbatch, range(*pair)) for pair in zip([0, *ends], ends, strict=False)]
        return chains

    @cached_property
    def seconds(self) -> dict[Op, Floats]:
        """The seconds of each op, one per unit. Without `split`, I and W together count as long as B."""
        ops = (Op.F, Op.B, Op.I, Op.W) if self.split else (Op.F, Op.B)
        times = {
            op: np.array([self.cost.seconds(self.action(op, unit)) for unit in range(self.num_units)], float)
            for op in ops
        }
        return times if self.split else times | {Op.I: times[Op.B], Op.W: np.zeros(self.num_units)}

    @cached_property
    def activations(self) -> Floats:
        """The bytes of activations of each unit."""
        sizes = [self.cost.activation_bytes(self.action(Op.F, unit)) for unit in range(self.num_units)]
        return np.array(sizes, float)

    @cached_property
    def ranks(self) -> Ints:
        """The rank of each unit."""
        return np.repeat(np.array(self.placement, np.int64), self.num_microbatches * self.num_slices)

    @cached_property
    def longest_row(self) -> int:
        """The number of actions of the busiest rank with every backward split."""
        return 3 * int(np.bincount(self.ranks).max())

    @cached_property
    def least_memory(self) -> Floats:
        """The bytes that each rank needs so that an order exists: its largest chain (see `whole`)."""
        held = np.zeros((self.num_ranks, len(self.chains)))
        np.add.at(held, (self.ranks, self._unit_chains), self.activations)
        return np.asarray(held.max(axis=1))

    @cached_property
    def _unit_chains(self) -> Ints:
        chains = np.empty((self.num_microbatches, self.num_slices), np.int64)
        for number, (microbatch, slices) in enumerate(self.chains):
            chains[microbatch, slices.start : slices.stop] = number
        return np.tile(chains.ravel(), len(self.placement))

    @cached_property
    def _before(self) -> tuple[Ints, Ints]:
        """The actions that precede each action, from the rules of order."""
        forwards = (self.action(Op.F, unit) for unit in range(self.num_units))
        backwards = (self.action(Op.B, unit) for unit in range(self.num_units))
        lists = [[self.number(b) for b in predecessors(a, self.whole)] for part in (forwards, backwards) for a in part]
        lists += [[self.num_units + unit] for unit in range(self.num_units)]
        return _rows([np.array(row, np.int64) for row in lists])

    @cached_property
    def _after(self) -> tuple[Ints, Ints]:
        first, before = self._before
        consumers = np.repeat(np.arange(len(first) - 1), np.diff(first))
        order = np.argsort(before, kind="stable")
        counts = np.bincount(before, minlength=len(first) - 1)
        return np.concatenate([[0], np.cumsum(counts)]), consumers[order]

    @cached_property
    def _links(self) -> tuple[Ints, Floats, Floats, int]:
        """The channel, link seconds and occupied seconds of each action, and the number of channels."""
        channels = np.full(3 * self.num_units, -1, np.int64)
        seconds, occupied = np.zeros(3 * self.num_units), np.zeros(3 * self.num_units)
        numbers: dict[Channel, int] = {}
        for op in (Op.F, Op.B):
            for unit in range(self.num_units):
                send = sending(self.action(op, unit), self.whole)
                if send is None:
                    continue
                line, number = channel(send, self.whole), self.number(self.action(op, unit))
                channels[number] = numbers.setdefault(line, len(numbers))
                seconds[number] = self.cost.link_seconds(send, line.source, line.destination)
                occupied[number] = self.cost.link_occupied(send, line.source, line.destination)
        return channels, seconds, occupied, len(numbers)

    def graph(self, split: Flags) -> ActionGraph:
        """Returns the arrays of the problem where the backwards of the units in `split` are I and W."""
        nothing, times, sizes = np.zeros(self.num_units), self.seconds, self.activations
        channels, link_seconds, link_occupied, num_channels = self._links
        units = np.ones(self.num_units, np.bool_)
        backward, weight = np.where(split, times[Op.I], times[Op.B]), np.where(split, times[Op.W], 0)
        return ActionGraph(
            seconds=np.concatenate([times[Op.F], backward, weight]),
            exists=np.concatenate([units, units, split]),
            rank=np.tile(self.ranks, 3),
            chain=np.tile(self._unit_chains, 3),
            channel=channels,
            link_seconds=link_seconds,
            link_occupied=link_occupied,
            acquired=np.concatenate([sizes, nothing, nothing]),
            released=np.concatenate([nothing, np.where(split, 0, sizes), np.where(split, sizes, 0)]),
            first_before=self._before[0],
            before=self._before[1],
            first_after=self._after[0],
            after=self._after[1],
            limits=np.array(self.limits, float),
            counts=np.array([self.num_ranks, num_channels, len(self.chains), self.longest_row], np.int64),
        )

    def order(self, schedule: Schedule) -> tuple[ActionOrder, Flags]:
        """Returns a compute-only schedule as action numbers, and the units whose backwards it splits."""
        rows = [[self.number(action) for action in row] for row in schedule.actions]
        order = ActionOrder(
            np.zeros((self.num_ranks, self.longest_row), np.int64), np.array([len(row) for row in rows])
        )
        split = np.zeros(self.num_units, np.bool_)
        for rank, row in enumerate(rows):
            order.rows[rank, : len(row)] = row
            split[[number - 2 * self.num_units for number in row if number >= 2 * self.num_units]] = True
        return order, split

    def schedule(self, order: ActionOrder, split: Flags) -> Schedule:
        """Returns the Schedule of an order."""

        def action(number: int) -> Action:
            part, unit = divmod(number, self.num_units)
            return self.action((Op.F, Op.I if split[unit] else Op.B, Op.W)[part], unit)

        rows = [row[:length].tolist() for row, length in zip(order.rows, order.lengths, strict=True)]
        return self.schedule_of([[action(number) for number in row] for row in rows])


def _rows(rows: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Concatenates rows to (first, values): row n is values[first[n] : first[n + 1]]."""
    first = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return first, np.concatenate([*rows, np.empty(0, np.int64)]).astype(np.int64)
