"""An ordering problem as arrays for compiled code, and its conversion from and to a Schedule.

Units are counted stage by stage, in each by microbatch and slice. The forward of unit u is number u, its backward or
input gradient U + u, and its weight gradient 2U + u, where U is the number of units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from slipstream.array_types import Flags, Floats, Ints
from slipstream.errors import SlipstreamError
from slipstream.schedule import Action, Op, Schedule, SliceCounts, channel, sending
from slipstream.schedule.action import NUMBERS
from slipstream.schedule.action_arrays import ActionArrays
from slipstream.schedule.schedule import ActionRows
from slipstream.schedule.sweep import ActionGraph, ActionOrder
from slipstream.simulator import CostModel, TableCost, UnitCost

ROUNDING = 1e-9  # relative; bytes and times are sums of floats
_OPS = Op.F, Op.B, Op.I, Op.W
_PARTS = tuple(NUMBERS[op] for op in (Op.F, Op.I, Op.W))


class UnitTimes(NamedTuple):
    """The costs of all units' actions, in seconds and bytes."""

    seconds: Mapping[Op, Floats]  # op (F, B, I or W) -> seconds per unit
    link_seconds: Floats  # (3 units,), seconds for which each action's result travels
    link_occupied: Floats  # (3 units,), seconds for which it occupies its channel
    held: Floats  # bytes kept by each unit's F

    @classmethod
    def of_slices(
        cls, seconds: Mapping[Op, Floats], links: tuple[Floats, Floats], held: Floats, sends_back: Flags
    ) -> UnitTimes:
        """Returns the costs of slices that are given stage by stage.

        Args:
            seconds: of F, B, I and W, (stages, slices), the slices of one microbatch after the other.
            links: the seconds that each slice's messages travel, and for which they occupy their channel, (slices,).
            held: the bytes that F keeps, (stages, slices).
            sends_back: whether a gradient goes from a stage to the one before, (stages,).
        """
        shape = 3, *held.shape
        sent = np.ones(shape)
        sent[1] = sends_back[:, None]
        travels, occupied = ((sent * per_slice).ravel() for per_slice in links)
        return cls({op: of_op.ravel() for op, of_op in seconds.items()}, travels, occupied, held.ravel())


class StepActions:
    """All actions of a step, as numbers, and their precedence by the rules of order.

    Args:
        placement: the rank of each stage.
        slice_counts: the token slices of each microbatch.
        reach: the first slice to which each slice of each microbatch attends. None: slice 0.
    """

    def __init__(
        self, placement: Sequence[int], slice_counts: Sequence[int], reach: Sequence[Sequence[int]] | None = None
    ) -> None:
        self.placement = tuple(placement)
        self.num_ranks = max(placement, default=-1) + 1
        self.slice_counts = tuple(slice_counts)
        self.num_microbatches = len(slice_counts)
        self.firsts = tuple(accumulate(self.slice_counts, initial=0))  # each microbatch's first slice, among a stage's
        self.reach = tuple(map(tuple, reach)) if reach is not None else None
        self.num_units = len(placement) * self.firsts[-1]

    def rows_of(self, op: Ints, unit: Ints, firsts: Ints) -> ActionRows:
        """Returns the actions of these ops, by their places in OPS, on these units, in rows that begin at `firsts`."""
        stage, place = np.divmod(unit, self.firsts[-1])
        microbatch = np.repeat(np.arange(self.num_microbatches), self.slice_counts)[place]
        return ActionRows(firsts, op, stage, microbatch, place - np.array(self.firsts)[microbatch])

    @cached_property
    def whole(self) -> Schedule:
        """The order that needs the least memory on every rank: chain after chain, with whole backwards.

        The backward of a chain's last slice on the last stage follows all forwards of the chain on all stages,
        and precedes all other backwards of the chain. So with any order every rank holds a whole chain at that
        moment, and with this one never more.
        """
        units = np.arange(self.num_units).reshape(len(self.placement), -1)
        chains = [
            units[:, first + slices.start : first + slices.stop].ravel()
            for first, slices in ((self.firsts[microbatch], slices) for microbatch, slices in self.chains)
        ]
        numbers = np.concatenate([part for chain in chains for part in (chain, chain[::-1] + self.num_units)])
        rank = self.ranks[numbers % self.num_units]
        rows = [numbers[rank == here] for here in range(self.num_ranks)]
        return self.schedule(ActionOrder.of(rows, self.longest_row), np.zeros(self.num_units, np.bool_))

    @cached_property
    def shape(self) -> Schedule:
        """The counts, the placement and the reach, with no actions."""
        return self.schedule_of(((),) * self.num_ranks)

    def schedule_of(self, rows: Sequence[Sequence[Action]]) -> Schedule:
        """Returns the Schedule of each rank's actions."""
        actions = rows if isinstance(rows, ActionRows) else tuple(map(tuple, rows))
        counts = self.slice_counts
        most = max(self.slice_counts, default=0)
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
    def ranks(self) -> Ints:
        """The rank of each unit."""
        return np.repeat(np.array(self.placement, np.int64), self.firsts[-1])

    @cached_property
    def longest_row(self) -> int:
        """The number of actions of the busiest rank with every backward split."""
        return 3 * int(np.bincount(self.ranks).max())

    @cached_property
    def unit_chains(self) -> Ints:
        """The number of each unit's chain."""
        chains = np.repeat(np.arange(len(self.chains)), [len(slices) for _, slices in self.chains])
        return np.tile(chains, len(self.placement))

    @cached_property
    def arrays(self) -> ActionArrays:
        """All actions, by their numbers; whole backwards are as their I."""
        return self.arrays_of((Op.F, Op.I, Op.W))

    def arrays_of(self, ops: Sequence[Op], alike: bool = False) -> ActionArrays:
        """Returns the actions of these ops on all units, op by op; `alike` is whether all microbatches take the same
        times."""
        part, unit = np.divmod(np.arange(len(ops) * self.num_units), self.num_units)
        rows = self.rows_of(np.array([NUMBERS[op] for op in ops])[part], unit, np.zeros(1, np.int64))
        return ActionArrays(rows.firsts, *rows.columns, self.shape, alike)

    @cached_property
    def channels(self) -> tuple[Ints, int]:
        """The channel of each action's result, -1 where it stays on its rank, and the number of channels."""
        places = np.full((3, len(self.placement)), -1)
        lines = dict[object, int]()
        for op, stage in np.ndindex(2, len(self.placement)):
            if send := sending(Action((Op.F, Op.B)[op], stage), self.shape):
                places[op, stage] = lines.setdefault(channel(send, self.shape), len(lines))
        return np.repeat(places.ravel(), self.firsts[-1]), len(lines)

    def splittings(self, split: bool) -> dict[str, Flags]:
        """Returns the choices of which backwards list scheduling splits: none, or all, or those that are sent."""
        none = np.zeros(self.num_units, np.bool_)
        sent = self.channels[0][self.num_units : 2 * self.num_units] >= 0
        return {"all": ~none, "sent": sent, "none": none} if split else {"none": none}

    def graph_of(self, times: UnitTimes, limits: Floats | Sequence[float], split: Flags) -> ActionGraph:
        """Returns the arrays of these actions where the backwards of the units in `split` are I and W.

        `limits` are the bytes of each rank; one where everything fits has none.
        """
        seconds = times.seconds
        nothing = np.zeros(self.num_units)
        units = np.ones(self.num_units, np.bool_)
        backward = np.where(split, seconds[Op.I], seconds[Op.B])
        weight = np.where(split, seconds[Op.W], 0)
        channels, num_channels = self.channels
        return ActionGraph(
            seconds=np.concatenate([seconds[Op.F], backward, weight]),
            exists=np.concatenate([units, units, split]),
            rank=np.tile(self.ranks, 3),
            chain=np.tile(self.unit_chains, 3),
            channel=channels,
            link_seconds=times.link_seconds * (channels >= 0),
            link_occupied=times.link_occupied * (channels >= 0),
            acquired=np.concatenate([times.held, nothing, nothing]),
            released=np.concatenate([nothing, np.where(split, 0, times.held), np.where(split, times.held, 0)]),
            **self.arrays.precedence._asdict(),
            limits=np.where(np.bincount(self.ranks, times.held) <= limits, np.inf, limits),
            counts=np.array([self.num_ranks, num_channels, len(self.chains), self.longest_row], np.int64),
        )

    def order(self, schedule: Schedule) -> tuple[ActionOrder, Flags]:
        """Returns a compute-only schedule as action numbers, and the units whose backwards it splits."""
        arrays = ActionArrays.of(schedule)
        part = np.where(arrays.is_one_of(Op.F), 0, np.where(arrays.is_one_of(Op.W), 2, 1))
        numbers = part * self.num_units + arrays.stage * self.firsts[-1] + arrays.slices
        split = np.bincount(numbers, minlength=3 * self.num_units)[2 * self.num_units :] > 0
        return ActionOrder.of(np.split(numbers, arrays.firsts[1:-1]), self.longest_row), split

    def schedule(self, order: ActionOrder, split: Flags) -> Schedule:
        """Returns the Schedule, named "auto", of an order."""
        part, unit = np.divmod(np.concatenate(order.by_rank()), self.num_units)
        op = np.where((part == 1) & ~split[unit], NUMBERS[Op.B], np.array(_PARTS)[part])
        return self.schedule_of(self.rows_of(op, unit, np.cumsum([0, *order.lengths])))


class OrderingProblem(StepActions):
    """All actions of a step, their costs, and each rank's memory; see `find_order` for the arguments and errors."""

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
        counts = (num_slices,) * num_microbatches if isinstance(num_slices, int) else tuple(num_slices)
        super().__init__(placement, counts, reach)
        self.num_microbatches = num_microbatches
        self.cost = cost
        self.split = split
        if set(placement) != set(range(self.num_ranks)) or not placement:
            raise SlipstreamError(
                f"placement={list(placement)} must give the rank of every stage, and use every "
                "rank from 0 on, such as [0, 1, 0, 1]."
            )
        limits = (np.inf,) * self.num_ranks if memory_limit is None else memory_limit
        if len(limits) != self.num_ranks:
            raise SlipstreamError(
                f"memory_limit has {len(limits)} entries; give one for each of {self.num_ranks} ranks."
            )
        # Making the shape checks the counts.
        _ = self.shape
        # Where microbatches take the same times, the costs of each action are asked for once.
        self._every = self.arrays_of(_OPS, alike=isinstance(cost, (TableCost, UnitCost)))
        self._held = self._every.each(cost.activation_bytes, among=slice(self.num_units))[: self.num_units]
        self.limits: Floats = np.array(limits, float) * (1 + ROUNDING)
        for rank, (limit, least) in enumerate(zip(self.limits, self.least_memory.tolist(), strict=True)):
            if not least <= limit:
                raise SlipstreamError(
                    f"memory_limit is {limits[rank]:g} bytes on rank {rank}, and no order fits: the rank holds all "
                    f"slices of a microbatch that attend to each other at the same time, {least:g} bytes. Give it at "
                    "least that, or use more ranks, smaller microbatches or recomputation."
                )

    @cached_property
    def times(self) -> UnitTimes:
        """The cost model's times of every action. Without `split`, I and W together count as long as B."""
        every = self._every
        channels = self.channels[0]
        num_units = self.num_units
        parts = every.each(self.cost.seconds, among=slice(None if self.split else 2 * num_units)).reshape(4, -1)
        seconds = dict(zip(_OPS, parts, strict=True))
        if not self.split:
            seconds[Op.I] = seconds[Op.B]

        def links(value: Callable[[Action, int, int], float]) -> Floats:
            def of(action: Action) -> float:
                send = action.with_op(Op.SEND_F if action.op is Op.F else Op.SEND_B)
                return value(send, *channel(send, self.shape)[1:3])

            return every.each(of, among=np.flatnonzero(channels >= 0))[: 3 * num_units] * (channels >= 0)

        return UnitTimes(seconds, links(self.cost.link_seconds), links(self.cost.link_occupied), self._held)

    @cached_property
    def least_memory(self) -> Floats:
        """The bytes that each rank needs so that an order exists: its largest chain (see `whole`)."""
        held = np.zeros((self.num_ranks, len(self.chains)))
        np.add.at(held, (self.ranks, self.unit_chains), self._held)
        return np.asarray(held.max(axis=1))

    def graph(self, split: Flags) -> ActionGraph:
        """Returns the arrays of the problem where the backwards of the units in `split` are I and W."""
        return self.graph_of(self.times, self.limits, split)
