"""Good orders in about a millisecond: list scheduling by a few rules, for many costs of one placement."""

from __future__ import annotations

from itertools import product

import numpy as np

from slipstream.array_types import Flags, Floats
from slipstream.planner.joint.unit_costs import SlicedUnits
from slipstream.planner.order.list_scheduling import place
from slipstream.planner.order.order_search import PriorityRule, splittings
from slipstream.planner.order.ordering_problem import ActionGraph, OrderingProblem
from slipstream.schedule import Op
from slipstream.simulator import UnitCost


class QuickOrder:
    """The orders of one placement with one number of microbatches and slices, whatever the actions cost."""

    def __init__(self, placement: tuple[int, ...], num_microbatches: int, num_slices: int, split: bool) -> None:
        problem = OrderingProblem(placement, num_microbatches, num_slices, UnitCost(), split=split)
        self._ranks = np.array(placement)
        self._shape = (len(placement), num_microbatches, num_slices)
        self._split = splittings(problem)
        self._graphs = {name: problem.graph(flags) for name, flags in self._split.items()}
        one = OrderingProblem(placement, 1, num_slices, UnitCost(), split=split)
        self._one = one.graph(np.full(one.num_units, split))
        lags = (0.0, 0.5, 1.0, 2.0) if num_microbatches > 1 else (0.0,)
        grid = product(self._graphs, lags, (-1.0, 0.0, 0.25, 0.5, 1.0, 2.0), (0.0, 0.5, 1.0))
        self.rules = tuple(PriorityRule(*rule) for rule in grid if rule[0] != "none" or rule[3] == 0)
        self._microbatch = np.tile(np.broadcast_to(np.arange(num_microbatches)[:, None], self._shape).ravel(), 3)

    def seconds(
        self,
        units: SlicedUnits,
        bounds: tuple[int, ...],
        room: Floats | None = None,
        rules: tuple[PriorityRule, ...] = (),
    ) -> dict[PriorityRule, float]:
        """Returns the seconds of a step by each of the rules, by default all; infinite where nothing fits.

        Args:
            units: the costs of the slices.
            bounds: the first unit of each stage, and the number of units.
            room: bytes that each rank has for activations. None: any number.
            rules: the rules to try.
        """
        held = units.stage_activations(bounds)
        if room is not None and (np.bincount(self._ranks, held.sum(axis=1)) > room).any():
            return dict.fromkeys(rules or self.rules, np.inf)
        times = {op: units.stage_seconds(op, bounds) for op in (Op.F, Op.B, Op.I, Op.W)}
        needless = units.frozen_stages(bounds)  # stages to which no gradient is sent
        one = _with_times(self._one, times, units.message_seconds, 1, None, needless)
        _, alone = place(one, np.arange(float(len(one.seconds))), 0.0, 0.0)
        stages, microbatches, slices = self._shape
        starts = np.broadcast_to(alone.reshape(3, stages, 1, slices), (3, *self._shape)).ravel()
        backward = np.arange(len(starts)) >= len(starts) // 3
        period = float((times[Op.F] + times[Op.B]).sum(axis=1).max())
        graphs: dict[str, ActionGraph] = {}
        found: dict[PriorityRule, float] = {}
        for rule in rules or self.rules:
            if rule.splitting not in graphs:
                flags = self._split[rule.splitting]
                whole = self._graphs[rule.splitting]
                own = _with_times(whole, times, units.message_seconds, microbatches, flags, needless)
                graphs[rule.splitting] = own if room is None else _with_memory(own, held, microbatches, flags, room)
            graph = graphs[rule.splitting]
            priority = starts + rule.lag * period * self._microbatch - rule.hurry * alone.max() * backward
            _, start = place(graph, priority, 0.0, rule.patience)
            found[rule] = float((start + graph.seconds)[graph.exists].max())
        return found


def _with_times(
    graph: ActionGraph,
    times: dict[Op, Floats],
    messages: Floats,
    num_microbatches: int,
    split: Flags | None,
    num_frozen: int,
) -> ActionGraph:
    """Returns the graph with the seconds of each stage's ops on each slice, and of each slice's message, of which those
    to frozen stages aren't sent."""
    forward, whole, inputs, weights = (
        np.repeat(times[op][:, None], num_microbatches, axis=1).ravel() for op in (Op.F, Op.B, Op.I, Op.W)
    )
    flags = np.ones(len(forward), np.bool_) if split is None else split
    seconds = np.concatenate([forward, np.where(flags, inputs, whole), np.where(flags, weights, 0)])
    carried = np.tile(messages, len(seconds) // len(messages)) * (graph.channel >= 0)
    if num_frozen:
        first, of_stage = len(forward), len(forward) // len(times[Op.F])
        carried[first : first + (num_frozen + 1) * of_stage] = 0.0
    return graph._replace(seconds=seconds, link_seconds=carried, link_occupied=carried * 0)


def _with_memory(graph: ActionGraph, held: Floats, num_microbatches: int, split: Flags, room: Floats) -> ActionGraph:
    """Returns the graph with the bytes that each stage's forward of each slice keeps, and the bytes of each rank."""
    sizes = np.repeat(held[:, None], num_microbatches, axis=1).ravel()
    nothing = np.zeros(len(sizes))
    released = np.concatenate([nothing, np.where(split, 0, sizes), np.where(split, sizes, 0)])
    return graph._replace(acquired=np.concatenate([sizes, nothing, nothing]), released=released, limits=room)
