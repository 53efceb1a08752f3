"""The actions of a sliced step as arrays for list scheduling.

It is the graph of `slipstream.planner.order.ordering_problem`, which asks the rules of order for each action; this one
states them for whole arrays, since a step's plan has no time for more. A property test shows that both agree.
"""

from __future__ import annotations

import numpy as np

from slipstream.array_types import Flags, Floats, Ints
from slipstream.planner.order.ordering_problem import ROUNDING, ActionGraph, ActionOrder
from slipstream.planner.steps.sliced_step import SlicedStep
from slipstream.schedule import Action, Op, Schedule


class StepGraph:
    """The graph of a step with whole and with split backwards.

    Args:
        step: the microbatches and slices.
        placement: the rank of each stage.
        room: bytes of activations of each rank.
    """

    def __init__(self, step: SlicedStep, placement: Ints, room: Floats) -> None:
        self._step, self._placement, self._limits = step, placement, room * (1 + ROUNDING)
        self.num_slices, self.num_stages = len(step.tokens), len(placement)
        self.num_units = self.num_stages * self.num_slices
        self._most_units = int(np.bincount(placement).max()) * self.num_slices  # of a rank
        self.microbatch = np.repeat(np.arange(len(step.counts)), step.counts)
        self._edges = self._pairs()
        self._lines = self._channels()

    def _pairs(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Returns which actions come before and after each, as the graph has them."""
        units = np.arange(self.num_units).reshape(self.num_stages, self.num_slices)
        later = np.flatnonzero(np.diff(self.microbatch) == 0)  # slices that another one of the microbatch follows
        forward, backward, weight = units, units + self.num_units, units + 2 * self.num_units
        pairs = [
            (forward[:, later], forward[:, later + 1]),
            (forward[:-1], forward[1:]),
            (forward, backward),
            (backward[:, later + 1], backward[:, later]),
            (backward[1:], backward[:-1]),
            (backward, weight),
        ]
        before, after = (np.concatenate([pair[side].ravel() for pair in pairs]) for side in (0, 1))
        size = 3 * self.num_units
        first_before, first_after = (
            np.concatenate([[0], np.cumsum(np.bincount(each, minlength=size))]) for each in (after, before)
        )
        in_order, onward = np.argsort(after, kind="stable"), np.argsort(before, kind="stable")
        return first_before, before[in_order], first_after, after[onward]

    def _channels(self) -> tuple[Ints, int]:
        """Returns the channel of each action's result, -1 where it stays on its rank, and their number."""
        lines = np.full((3, self.num_stages), -1, np.int64)
        here, there = self._placement[:-1], self._placement[1:]
        num_ranks = len(self._limits)
        forward = np.where(here != there, here * num_ranks + there, -1)
        lines[0, :-1] = forward
        lines[1, 1:] = np.where(here != there, num_ranks**2 + there * num_ranks + here, -1)
        used = np.unique(lines[lines >= 0])
        numbered = np.where(lines >= 0, np.searchsorted(used, lines), -1)
        return np.repeat(numbered.ravel(), self.num_slices), len(used)

    def with_split(self, split: Flags) -> ActionGraph:
        """Returns the graph where the backwards of the units in `split` are I and W."""
        seconds, held = self._step.seconds, self._step.held.ravel()
        times = {op: each.ravel() for op, each in seconds.items()}
        nothing, units = np.zeros(self.num_units), np.ones(self.num_units, np.bool_)
        backward, weight = np.where(split, times[Op.I], times[Op.B]), np.where(split, times[Op.W], 0)
        channel, num_channels = self._lines
        travels, occupied = (np.tile(each, 3 * self.num_stages) * (channel >= 0) for each in self._step.links)
        ranks = np.repeat(self._placement, self.num_slices)
        first_before, before, first_after, after = self._edges
        return ActionGraph(
            seconds=np.concatenate([times[Op.F], backward, weight]),
            exists=np.concatenate([units, units, split]),
            rank=np.tile(ranks, 3),
            chain=np.tile(self.microbatch, 3 * self.num_stages),
            channel=channel,
            link_seconds=travels,
            link_occupied=occupied,
            acquired=np.concatenate([held, nothing, nothing]),
            released=np.concatenate([nothing, np.where(split, 0, held), np.where(split, held, 0)]),
            first_before=first_before,
            before=before,
            first_after=first_after,
            after=after,
            limits=self._limits,
            counts=np.array([len(self._limits), num_channels, len(self._step.counts), 3 * self._most_units], np.int64),
        )

    def splittings(self, split: bool) -> dict[str, Flags]:
        """Returns the choices of which backwards are split: none, and with `split` all, or those that are sent."""
        none = np.zeros(self.num_units, np.bool_)
        sent = self._lines[0][self.num_units : 2 * self.num_units] >= 0
        return {"none": none, "sent": sent, "all": ~none} if split else {"none": none}

    def order(self, schedule: Schedule) -> tuple[ActionOrder, Flags]:
        """Returns a compute-only schedule as action numbers, and the units whose backwards it splits."""
        first = (np.cumsum(self._step.counts) - self._step.counts).tolist()
        part = {Op.F: 0, Op.B: self.num_units, Op.I: self.num_units, Op.W: 2 * self.num_units}
        rows = [
            [part[op] + stage * self.num_slices + first[microbatch] + index for op, stage, microbatch, index in row]
            for row in schedule.actions
        ]
        split = np.zeros(3 * self.num_units, np.bool_)
        split[[number for row in rows for number in row]] = True
        return ActionOrder.of(rows, 3 * self._most_units), split[2 * self.num_units :]

    def schedule(self, order: ActionOrder, split: Flags) -> Schedule:
        """Returns the Schedule, named "auto", of an order."""
        slices = [(m, i) for m, count in enumerate(self._step.counts.tolist()) for i in range(count)]
        splits = split.tolist()
        backward = [Op.I if each else Op.B for each in splits]

        def action(number: int) -> Action:
            part, unit = divmod(number, self.num_units)
            stage, index = divmod(unit, self.num_slices)
            return Action((Op.F, backward[unit], Op.W)[part], stage, *slices[index])

        rows = tuple(tuple(map(action, row.tolist())) for row in order.by_rank())
        counts = tuple(self._step.counts.tolist())
        placement = tuple(self._placement.tolist())
        return Schedule("auto", rows, placement, len(counts), max(counts), slice_counts=counts)
