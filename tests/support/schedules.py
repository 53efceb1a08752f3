"""Schedules drawn at random: any with a name, and any order that can run by a second statement of the rules; and those
of PyTorch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from slipstream.schedule import SCHEDULES, Action, Op, Schedule, make_schedule
from support.random_orders import by_rank


@st.composite
def named_schedules(
    draw: st.DrawFn, most_ranks: int = 4, most: int = 4, most_stages: int = 4, ragged: bool = False
) -> Schedule:
    """Any schedule by its name, of up to `most` microbatches and slices; of a ragged one each may have its own."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    stages = [number for number in range(1, most_stages + 1) if number in SCHEDULES[name].stages_per_rank]
    count = st.integers(1, most)
    unequal, equal = st.lists(count, min_size=1, max_size=most), st.builds(lambda m, s: [s] * m, count, count)
    counts = draw(unequal | equal if ragged else equal)
    return make_schedule(name, draw(st.integers(1, most_ranks)), len(counts), counts, draw(st.sampled_from(stages)))


@dataclass(frozen=True)
class Problem:
    """What must run; `split[unit]` tells whether the unit's backward is I and W."""

    placement: tuple[int, ...]
    num_ranks: int
    num_microbatches: int
    slice_counts: tuple[int, ...]
    reach: tuple[tuple[int, ...], ...] | None
    split: frozenset[tuple[int, int, int]]

    def attends(self, m: int, later: int, earlier: int) -> bool:
        return earlier <= later and (self.reach is None or self.reach[m][later] <= earlier)

    def edges(self) -> dict[Action, set[Action]]:
        """All actions and everything each must follow: the rules of order, spelt out pair by pair."""
        units = [
            (g, m, i)
            for g in range(len(self.placement))
            for m in range(self.num_microbatches)
            for i in range(self.slice_counts[m])
        ]
        down = {unit: Action(Op.I if unit in self.split else Op.B, *unit) for unit in units}
        edges: dict[Action, set[Action]] = {}
        for g, m, i in units:
            later = [j for j in range(i + 1, self.slice_counts[m]) if self.attends(m, j, i)]
            earlier = [j for j in range(i) if self.attends(m, i, j)]
            edges[Action(Op.F, g, m, i)] = {Action(Op.F, g, m, j) for j in earlier}
            edges[down[g, m, i]] = {Action(Op.F, g, m, i), *(down[g, m, j] for j in later)}
            if g > 0:
                edges[Action(Op.F, g, m, i)].add(Action(Op.F, g - 1, m, i))
            if g + 1 < len(self.placement):
                edges[down[g, m, i]].add(down[g + 1, m, i])
            if (g, m, i) in self.split:
                edges[Action(Op.W, g, m, i)] = {down[g, m, i]}
        return edges

    def schedule(self, order: list[Action]) -> Schedule:
        actions, counts = by_rank(order, self.placement, self.num_ranks), self.slice_counts
        return Schedule("random", actions, self.placement, self.num_microbatches, max(counts), self.reach, counts)


@st.composite
def random_schedules(draw: st.DrawFn, plain: bool = False) -> tuple[Problem, Schedule]:
    """A random topological order of everything, cut into ranks: it can run by construction.

    In a plain one microbatches have equally many slices, of which each attends to all before it.
    """
    num_stages, num_ranks = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    loop = tuple(g % num_ranks for g in range(num_stages))
    v = tuple(min(g % (2 * num_ranks), 2 * num_ranks - 1 - g % (2 * num_ranks)) for g in range(num_stages))
    anywhere = st.tuples(*[st.integers(0, num_ranks - 1)] * num_stages)
    placement = draw(st.sampled_from([loop, v]) | anywhere)
    m, s = draw(st.integers(1, 3)), st.integers(1, 4)
    counts = (draw(s),) * m if plain or draw(st.booleans()) else draw(st.tuples(*[s] * m))
    rows = st.tuples(*(st.tuples(*(st.integers(0, i) for i in range(count))) for count in counts))
    reach = None if plain else draw(st.none() | rows)
    unit = st.tuples(st.integers(0, num_stages - 1), st.integers(0, m - 1), st.integers(0, max(counts) - 1))
    problem = Problem(placement, num_ranks, m, counts, reach, draw(st.frozensets(unit)))
    edges, shuffle = problem.edges(), random.Random(draw(st.integers(0, 2**32)))
    order: list[Action] = []
    done: set[Action] = set()
    while len(order) < len(edges):
        action = shuffle.choice([a for a, before in edges.items() if a not in done and before <= done])
        order.append(action)
        done.add(action)
    return problem, problem.schedule(order)


def torch_orders(name: str, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> tuple[Any, list[int]]:
    """The order that PyTorch's multi-stage schedule makes for every rank, and the rank of every stage; its stages only
    know their numbers."""
    stages = [
        SimpleNamespace(
            stage_index=local * num_ranks,
            num_stages=num_ranks * stages_per_rank,
            group_size=num_ranks,
            group_rank=0,
            is_first=local == 0,
            is_last=local == stages_per_rank - 1,
            submod=None,
        )
        for local in range(stages_per_rank)
    ]
    theirs = getattr(torch_schedules, name)(stages, num_microbatches)
    orders = [[str(action) for action in theirs.pipeline_order[rank] if action] for rank in range(num_ranks)]
    return orders, [theirs.stage_index_to_group_rank[g] for g in range(num_ranks * stages_per_rank)]
