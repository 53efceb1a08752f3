"""What is measured how often: a length is warmed up once, and a point is repeated until its samples agree."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.parallel import Ranks
from slipstream.planner.costs import OPS, ActionBytes, AttentionWindow, SlicePoint
from slipstream.profiler import measurement_run
from slipstream.profiler.measurement_grid import MeasurementGrid, make_short_grid
from slipstream.profiler.measurement_run import MeasurementRun, TimeBudget
from slipstream.profiler.measuring_teams import MeasuringTeams
from slipstream.schedule import Op

SEQ_LEN = 2048


@dataclass
class CountingBench:
    """Says seconds by the tokens, and remembers what ran; samples of `noisy` points differ by a tenth."""

    noisy: tuple[SlicePoint, ...] = ()
    seq_len: int = SEQ_LEN
    ran: list[SlicePoint] = field(default_factory=list)
    stage: Any = field(default_factory=lambda: type("Stage", (), {"named_parameters": lambda self: []})())

    def run(self, length: int, context: int) -> dict[Op, float]:
        self.ran.append((length, context))
        differs = (length, context) in self.noisy and self.ran.count((length, context)) % 2
        return dict.fromkeys(OPS, 1e-6 * (1000 + length) * (1.1 if differs else 1.0))

    def windows(self) -> tuple[AttentionWindow, ...]:
        return (AttentionWindow(),)

    def context_bytes(self) -> tuple[int, int]:
        return 1, 2

    def activation_bytes(self, length: int) -> int:
        return length

    def action_bytes(self, length: int) -> ActionBytes:
        return ActionBytes(length, 0, {})


def measured(bench: CountingBench, grid: MeasurementGrid, repeats: int = 3, budget: float = 1e6) -> MeasurementRun:
    run = MeasurementRun(
        [bench],  # type: ignore[list-item]
        [range(1)],
        grid,
        TimeBudget(budget, Ranks.of(), lambda share: None),
        MeasuringTeams.of(Ranks.of()),
        repeats,
        doubt=0.01,
    )
    run.run()
    return run


def test_a_length_is_warmed_up_once_after_its_longest_context() -> None:
    bench, grid = CountingBench(), make_short_grid(SEQ_LEN, SEQ_LEN // 2, 64)
    lengths = {length for length, _ in grid.points}
    measured(bench, grid)
    warm = bench.ran[: len(lengths)]
    assert dict(warm) == {length: max(c for n, c in grid.points if n == length) for length in lengths}


def test_what_agrees_is_measured_twice_and_what_differs_as_often_as_is_wanted() -> None:
    grid = make_short_grid(SEQ_LEN, SEQ_LEN // 2, 64)
    noisy = grid.points[-1]
    bench = CountingBench(noisy=(noisy,))
    run = measured(bench, grid, repeats=9)
    samples = Counter({point: len(run.samples[0, point][Op.F]) for point in grid.points})
    assert {samples[point] for point in grid.points if point != noisy} == {2}
    assert samples[noisy] >= 9


def test_the_grid_ends_where_a_round_of_it_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A length is warmed up once, but each of its points takes its time in every round."""
    points = [(64, 64 * context) for context in range(20)]
    bench = CountingBench()
    monkeypatch.setattr(measurement_run, "time", SimpleNamespace(perf_counter=lambda: len(bench.ran)))
    monkeypatch.setattr(measurement_run, "_WARM_UP_SHARE", 0.115)  # of 100 seconds, one for each run
    grid = MeasurementGrid(list(points))
    measured(bench, grid, budget=100.0)
    assert grid.points == points[:12]
