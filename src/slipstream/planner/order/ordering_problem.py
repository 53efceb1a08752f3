"""An ordering problem as arrays for compiled code, and its conversion from and to a Schedule.

Units are counted stage by stage, in each by microbatch and slice. The forward of unit u is number u, its backward or
input gradient U + u, and its weight gradient 2U + u, where U is the number of units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from slipstream.array_types import Flags, Floats, Ints
from slipstream.errors import SlipstreamError
from slipstream.schedule import Action, Channel, Op, Schedule, SliceCounts, channel, predecessors, sending
from slipstream.simulator import CostModel

ROUNDING = 1e-9  # bytes and times are sums of floats


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


class OrderingProblem:
    """All actions, their costs, and the memory of each rank; see `find_order` for the arguments and errors."""

    def __init__(
        self,
        placement: Sequence[int],
        num_microbatches: int,
        num_slices: SliceCounts,
        cost: CostModel,
        memory_limit: Sequence[float] | None = None,
        reach: Sequence[Sequence[int]] | None = None,
        split: bool = True,
    ) -> None:
        self.placement, self.num_ranks = tuple(placement), max(placement, default=-1) + 1
        self.num_microbatches, self.cost, self.split = num_microbatches, cost, split
        counts = (num_slices,) * num_microbatches if isinstance(num_slices, int) else tuple(num_slices)
        self.slice_counts = counts
        self.firsts = tuple(accumulate(counts, initial=0))  # of each microbatch's slices among a stage's
        self.reach = tuple(map(tuple, reach)) if reach is not None else None
        self.num_units = len(placement) * self.firsts[-1]
        if set(placement) != set(range(self.num_ranks)) or not placement:
            raise SlipstreamError(
                f"placement={list(placement)} must give the rank of every stage, and use every "
                "rank from 0 on, such as [0, 1, 0, 1]."
            )
        given = (np.inf,) * self.num_ranks if memory_limit is None else memory_limit
        if len(given) != self.num_ranks:
            raise SlipstreamError(
                f"memory_limit has {len(given)} entries; give one for each of {self.num_ranks} ranks."
            )
        self.schedule_of(((),) * self.num_ranks)  # checks the counts
        self.limits = tuple(limit * (1 + ROUNDING) for limit in given)
        for rank, (limit, least) in enumerate(zip(self.limits, self.least_memory.tolist(), strict=True)):
            if not least <= limit:
                raise SlipstreamError(
                    f"memory_limit is {given[rank]:g} bytes on rank {rank}, and no order fits: the rank holds all "
                    f"slices of a microbatch that attend to each other at the same time, {least:g} bytes. Give it at "
                    "least that, or use more ranks, smaller microbatches or recomputation."
                )

    def number(self, action: Action) -> int:
        """Returns the number of an action."""
        part = 0 if action.op is Op.F else 2 if action.op is Op.W else 1
        unit = action.stage * self.firsts[-1] + self.firsts[action.microbatch] + action.slice
        return part * self.num_units + unit

    def action(self, op: Op, unit: int) -> Action:
        """Returns the action of an op on a unit."""
        stage, rest = divmod(unit, self.firsts[-1])
        return Action(op, stage, *self._slices[rest])

    @cached_property
    def _slices(self) -> list[tuple[int, int]]:
        """The microbatch and the slice of each of a stage's units."""
        return [(m, i) for m, count in enumerate(self.slice_counts) for i in range(count)]

    @cached_property
    def whole(self) -> Schedule:
        """The order that needs the least memory on every rank: chain after chain, with whole backwards.

        The backward of a chain's last slice on the last stage follows all forwards of the chain on all stages,
        and precedes all other backwards of the chain. So with any order every rank holds a whole chain at that
        moment, and with this one never more.
        """
        rows: list[list[Action]] = [[] for _ in range(self.num_ranks)]
        for microbatch, slices in self.chains:
            for op, step in ((Op.F, 1), (Op.B, -1)):
                for stage in range(len(self.placement))[::step]:
                    rows[self.placement[stage]] += [Action(op, stage, microbatch, index) for index in slices[::step]]
        return self.schedule_of(rows)

    def schedule_of(self, rows: Sequence[Sequence[Action]]) -> Schedule:
        """Returns the Schedule of each rank's actions."""
        actions = tuple(map(tuple, rows))
        counts = self.slice_counts
        most = max(counts, default=0)
        return Schedule("auto", actions, self.placement, self.num_microbatches, most, self.reach, counts)

    @cached_property
    def chains(self) -> list[tuple[int, range]]:
        """The (microbatch, slices) of each chain: the runs of slices that attend only to each other."""
        chains = []
        for microbatch, count in enumerate(self.slice_counts):
            row = self.reach[microbatch] if self.reach else (0,) * count
            ends = [i for i in range(1, count) if min(row[i:]) == i] + [count]
            chains += [(microbatch, range(*pair)) for pair in zip([0, *ends], ends, strict=False)]
        return chains

    @cached_property
    def seconds(self) -> dict[Op, Floats]:
        """The seconds of each op, one per unit. Without `split`, I and W together count as long as B."""
        ops = (Op.F, Op.B, Op.I, Op.W) if self.split else (Op.F, Op.B)
        times = {op: self._per_unit(self.cost.seconds, op) for op in ops}
        return times if self.split else times | {Op.I: times[Op.B], Op.W: np.zeros(self.num_units)}

    @cached_property
    def activations(self) -> Floats:
        """The bytes of activations of each unit."""
        return self._per_unit(self.cost.activation_bytes, Op.F)

    def _per_unit(self, value: Callable[[Action], float], op: Op) -> Floats:
        return np.array([value(self.action(op, unit)) for unit in range(self.num_units)], float)

    @cached_property
    def ranks(self) -> Ints:
        """The rank of each unit."""
        return np.repeat(np.array(self.placement, np.int64), self.firsts[-1])

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
        chains = np.repeat(np.arange(len(self.chains)), [len(slices) for _, slices in self.chains])
        return np.tile(chains, len(self.placement))

    @cached_property
    def _before(self) -> tuple[Ints, Ints]:
        """The actions that precede each action, from the rules of order."""
        forwards = (self.action(Op.F, unit) for unit in range(self.num_units))
        backwards = (self.action(Op.B, unit) for unit in range(self.num_units))
        lists = [[self.number(b) for b in predecessors(a, self.whole)] for part in (forwards, backwards) for a in part]
        lists += [[self.num_units + unit] for unit in range(self.num_units)]
        first = np.cumsum([0, *map(len, lists)])
        return first, np.fromiter(chain.from_iterable(lists), np.int64, first[-1])

    @cached_property
    def _after(self) -> tuple[Ints, Ints]:
        first, before = self._before
        consumers = np.repeat(np.arange(len(first) - 1), np.diff(first))
        order = np.argsort(before, kind="stable")
        counts = np.bincount(before, minlength=len(first) - 1)
        return np.cumsum([0, *counts]), consumers[order]

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
        split = np.zeros(3 * self.num_units, np.bool_)
        split[[number for row in rows for number in row]] = True
        return ActionOrder.of(rows, self.longest_row), split[2 * self.num_units :]

    def schedule(self, order: ActionOrder, split: Flags) -> Schedule:
        """Returns the Schedule of an order."""

        def action(number: int) -> Action:
            part, unit = divmod(number, self.num_units)
            return self.action((Op.F, Op.I if split[unit] else Op.B, Op.W)[part], unit)

        return self.schedule_of([[action(number) for number in row.tolist()] for row in order.by_rank()])
