"""Optimal orders of small problems by constraint programming, with the rules of order written out once more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ortools.sat.python import cp_model

from slipstream.schedule import Op
from slipstream.simulator import TableCost


@dataclass
class Instance:
    """Times, bytes and latency are ints; messages take their latency only."""

    placement: tuple[int, ...]
    num_microbatches: int
    num_slices: int
    cost: TableCost
    reach: tuple[tuple[int, ...], ...] | None = None
    split: bool = True

    @property
    def num_ranks(self) -> int:
        return max(self.placement) + 1

    @property
    def units(self) -> list[tuple[int, int, int]]:
        stages, microbatches, slices = map(range, (len(self.placement), self.num_microbatches, self.num_slices))
        return [(g, m, i) for g in stages for m in microbatches for i in slices]

    def attends(self, m: int, later: int, earlier: int) -> bool:
        return self.reach is None or self.reach[m][later] <= earlier


class _Model:
    """Start and end of every pass, no two at once on a rank, memory held from F to the end of B or W."""

    def __init__(self, instance: Instance) -> None:
        self.instance, self.model = instance, cp_model.CpModel()
        self.horizon = 2 * int(sum(instance.cost.times.values())) * instance.num_microbatches
        self.horizon += 4 * len(instance.units) * int(instance.cost.latency)
        self.busy: list[list[cp_model.IntervalVar]] = [[] for _ in range(instance.num_ranks)]
        self.held: list[list[tuple[cp_model.IntervalVar, int]]] = [[] for _ in range(instance.num_ranks)]
        self.start: dict[tuple[str, tuple[int, int, int]], cp_model.IntVar] = {}
        self.end: dict[tuple[str, tuple[int, int, int]], cp_model.IntVar] = {}
        for unit in instance.units:
            self._passes(unit)
        for before, after, latency in self._edges():
            self.model.add(self.start[after] >= self.end[before] + latency)
        for busy in self.busy:
            self.model.add_no_overlap(busy)

    def _time(self) -> cp_model.IntVar:
        return self.model.new_int_var(0, self.horizon, "")

    def _passes(self, unit: tuple[int, int, int]) -> None:
        instance, model = self.instance, self.model
        g, _, i = unit
        rank = instance.placement[g]
        seconds = {op: int(instance.cost.times.get((g, i, op), 0)) for op in (Op.F, Op.B, Op.I, Op.W)}
        split = model.new_bool_var("")
        if not instance.split:
            model.add(split == 0)
        for name in ("F", "D", "W"):  # D is B or I
            self.start[name, unit], self.end[name, unit] = self._time(), self._time()
        self.busy[rank].append(model.new_interval_var(self.start["F", unit], seconds[Op.F], self.end["F", unit], ""))
        for name, op, there in (("D", Op.B, ~split), ("D", Op.I, split), ("W", Op.W, split)):
            start, end = self.start[name, unit], self.end[name, unit]
            self.busy[rank].append(model.new_optional_interval_var(start, seconds[op], end, there, ""))
        model.add(self.start["W", unit] >= self.end["D", unit])
        model.add(self.end["W", unit] == self.end["D", unit]).only_enforce_if(~split)
        held = model.new_interval_var(self.start["F", unit], self._time(), self.end["W", unit], "")
        self.held[rank].append((held, int(instance.cost.activations[g, i])))

    def _edges(self) -> Iterator[tuple[tuple[str, tuple[int, int, int]], tuple[str, tuple[int, int, int]], int]]:
        instance, latency = self.instance, int(self.instance.cost.latency)
        for g, m, i in instance.units:
            yield ("F", (g, m, i)), ("D", (g, m, i)), 0
            for j in range(i):
                if instance.attends(m, i, j):
                    yield ("F", (g, m, j)), ("F", (g, m, i)), 0
                    yield ("D", (g, m, i)), ("D", (g, m, j)), 0
            if g + 1 < len(instance.placement):
                link = latency if instance.placement[g] != instance.placement[g + 1] else 0
                yield ("F", (g, m, i)), ("F", (g + 1, m, i)), link
                yield ("D", (g + 1, m, i)), ("D", (g, m, i)), link

    def solve(self, objective: cp_model.IntVar) -> int | None:
        """The least value, or None where it takes too long to prove."""
        self.model.minimize(objective)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.max_deterministic_time = 5
        status = solver.solve(self.model)
        return round(solver.objective_value) if status == cp_model.OPTIMAL else None


def shortest(instance: Instance, limits: Sequence[float]) -> int | None:
    """The least makespan within the limits."""
    problem = _Model(instance)
    for held, limit in zip(problem.held, limits, strict=True):
        intervals, sizes = zip(*held, strict=True)
        problem.model.add_cumulative(intervals, sizes, int(limit))
    last = problem._time()
    problem.model.add_max_equality(last, [problem.end["W", unit] for unit in instance.units])
    return problem.solve(last)
