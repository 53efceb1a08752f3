"""What is measured how often, in which order and by whom."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.cost import OPS, ActionBytes, AttentionWindow, SlicePoint
from slipstream.parallel import RankGroup, Ranks
from slipstream.profile import measurement_run
from slipstream.profile.measurement_run import (
    MeasurementGrid,
    MeasurementRun,
    MeasuringTeams,
    TimeBudget,
    TooLittleTimeError,
    make_grid,
    make_short_grid,
)
from slipstream.schedule import Op
from support.forked import launch
from support.paths import WORKERS

SEQ_LEN = 2048


@dataclass
class CountingBench:
    """Says seconds by the tokens, and remembers what ran; every other sample of `noisy` points is a tenth longer."""

    noisy: tuple[SlicePoint, ...] = ()
    noisy_op: Op | None = None  # None: all
    seconds_of_noisy: float = 1.0  # of `noisy_op`, over those of other ops
    seq_len: int = SEQ_LEN
    ran: list[SlicePoint] = field(default_factory=list)
    warm: list[SlicePoint] = field(default_factory=list)
    sized: list[int] = field(default_factory=list)

    def warm_up(self, length: int, context: int) -> None:
        self.warm.append((length, context))

    def run(self, length: int, context: int) -> dict[Op, float]:
        self.ran.append((length, context))
        differs = (length, context) in self.noisy and self.ran.count((length, context)) % 2
        seconds = 1e-6 * (100 + length)
        longer = seconds * (1.1 if differs else 1.0)
        if self.noisy_op is None:
            return dict.fromkeys(OPS, longer)
        return dict.fromkeys(OPS, seconds) | {self.noisy_op: longer * self.seconds_of_noisy}

    def num_parameters(self, of_experts: bool = False) -> int:
        return 0

    def windows(self) -> tuple[AttentionWindow, ...]:
        return (AttentionWindow(),)

    def context_bytes(self) -> tuple[int, int]:
        return 1, 2

    def activation_bytes(self, length: int) -> int:
        return length

    def action_bytes(self, *lengths: int) -> list[ActionBytes]:
        self.sized += lengths
        return [ActionBytes(length, 0, {}) for length in lengths]


def measured(
    bench: CountingBench,
    grid: MeasurementGrid,
    repeats: int = 3,
    budget: float = 1e6,
    doubt: float = 0.01,
    on_growth: Callable[[float], None] | None = None,
) -> MeasurementRun:
    run = MeasurementRun(
        [bench],  # type: ignore[list-item]
        [range(1)],
        grid,
        TimeBudget(budget, Ranks.of(), lambda share: None, on_growth),
        MeasuringTeams.of(Ranks.of()),
        repeats,
        doubt=doubt,
    )
    run.run()
    return run


def test_a_length_is_warmed_up_once_after_its_longest_context() -> None:
    bench, grid = CountingBench(), make_short_grid(SEQ_LEN, SEQ_LEN // 2, 64)
    lengths = {length for length, _ in grid.points}
    measured(bench, grid)
    assert len(bench.warm) == len(lengths)
    assert dict(bench.warm) == {length: max(c for n, c in grid.points if n == length) for length in lengths}


def samples(run: MeasurementRun) -> Counter[SlicePoint]:
    return Counter({point: len(run.samples[0, point][Op.F]) for point in run.grid.points})


def test_with_points_held_out_each_is_repeated_until_its_samples_agree() -> None:
    grid = make_grid(SEQ_LEN, SEQ_LEN // 2, 256)
    noisy = grid.points[-1]
    found = samples(measured(CountingBench(noisy=(noisy,)), grid, repeats=9))
    assert {found[point] for point in grid.points if point != noisy} == {2}
    assert found[noisy] >= 9


@pytest.mark.parametrize(
    ("noisy_op", "seconds_of_noisy", "repeated"), [(None, 1.0, 4), (Op.W, 0.5, 4), (Op.W, 0.05, 2)]
)
def test_without_them_a_point_is_repeated_until_two_samples_of_every_op_agree(
    noisy_op: Op | None, seconds_of_noisy: float, repeated: int
) -> None:
    """One that is disturbed takes longer, so the two shortest count; the median is that of the steady ones then.
    Operations that take next to nothing may differ."""
    grid, noisy = make_short_grid(SEQ_LEN, SEQ_LEN // 2, 64), ((1, 0), (256, 512))
    bench = CountingBench(noisy=noisy, noisy_op=noisy_op, seconds_of_noisy=seconds_of_noisy)
    run = measured(bench, grid, repeats=6, doubt=0.04)
    assert samples(run) == Counter(dict.fromkeys(grid.points, 2) | dict.fromkeys(noisy, repeated))


def test_the_bytes_of_few_lengths_are_counted_where_a_few_points_are_enough() -> None:
    bench = CountingBench()
    measured(bench, make_short_grid(SEQ_LEN, SEQ_LEN // 2, 64))
    assert bench.sized == [1, 64, 1024]
    everything, grid = CountingBench(), make_grid(SEQ_LEN, SEQ_LEN // 2, 256)
    measured(everything, grid)
    assert everything.sized == sorted({length for length, _ in grid.fitted})


@pytest.mark.parametrize(("share", "num_held_out"), [("_ROUND_SHARE", 3), ("_ROUND_SHARE_OF_FEW", 0)])
def test_the_grid_ends_where_a_round_of_it_would_take_too_long(
    monkeypatch: pytest.MonkeyPatch, share: str, num_held_out: int
) -> None:
    """A length is warmed up once, but each of its points takes its time in every round."""
    points = [(64, 64 * context) for context in range(20)]
    bench = CountingBench()
    monkeypatch.setattr(measurement_run, "time", SimpleNamespace(perf_counter=lambda: len(bench.warm)))
    monkeypatch.setattr(measurement_run, share, 0.125)  # of 100 seconds, one for each point
    grid = MeasurementGrid(points[: 20 - num_held_out], points[20 - num_held_out :])
    expected = grid.points[:12]
    measured(bench, grid, budget=100.0)
    assert grid.points == expected


def test_rounds_end_with_the_budget_however_little_the_samples_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds are the fewest, where a machine has become busy after the warming up."""
    points = [(64, 64 * context) for context in range(8)]
    bench = CountingBench(noisy=tuple(points))
    monkeypatch.setattr(measurement_run, "time", SimpleNamespace(perf_counter=lambda: 10 * len(bench.ran)))
    assert measured(bench, MeasurementGrid(points), budget=100.0, repeats=6).rounds == 2


@pytest.mark.parametrize("num_held_out", [0, 4])
def test_a_round_ends_with_the_budget_and_what_it_measured_is_fitted(
    monkeypatch: pytest.MonkeyPatch, num_held_out: int
) -> None:
    """Load that rises after the warming up makes one round longer than the budget. Points that need a first sample
    come before those that need a second, and where too few have one the budget grows, or the run ends."""
    points = [(64, 64 * context) for context in range(20)]
    fitted, held_out = points[: 20 - num_held_out], points[20 - num_held_out :]
    order = MeasurementGrid(fitted, held_out).points
    bench = CountingBench()
    monkeypatch.setattr(measurement_run, "time", SimpleNamespace(perf_counter=lambda: 10 * len(bench.ran)))
    for budget, num_ran in ((125.0, 13), (250.0, 25)):
        bench.ran.clear()
        run = measured(bench, MeasurementGrid([*fitted], [*held_out]), budget=budget, repeats=6)
        assert bench.ran == [*order, *order][:num_ran]
        assert run.grid.points == order[:num_ran]
        assert samples(run) == Counter(bench.ran)
    bench.ran.clear()
    with pytest.raises(TooLittleTimeError, match="spent after 5 of 20 points"):
        measured(bench, MeasurementGrid([*fitted], [*held_out]), budget=45.0, repeats=6)
    bench.ran.clear()
    run = measured(bench, MeasurementGrid([*fitted], [*held_out]), budget=45.0, on_growth=lambda seconds: None)
    assert run.grid.points == order[: len(run.grid.points)]
    assert 8 <= len(run.grid.points) < 20


def test_a_length_whose_warming_up_is_not_over_in_time_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [*((64, 64 * context) for context in range(8)), (128, 0)]
    benches = [CountingBench(), CountingBench()]
    monkeypatch.setattr(measurement_run, "time", SimpleNamespace(perf_counter=lambda: 60 * (len(benches[0].warm) > 1)))
    run = MeasurementRun(
        benches,  # type: ignore[arg-type]
        [range(1), range(1, 2)],
        MeasurementGrid(points),
        TimeBudget(50.0, Ranks.of(), lambda share: None),
        MeasuringTeams.of(Ranks.of()),
        3,
        doubt=0.01,
    )
    with pytest.raises(TooLittleTimeError, match="spent after 0 of 8 points"):
        run.run()
    assert [len(bench.warm) for bench in benches] == [2, 1]


def test_a_budget_that_is_too_small_ends_the_run_or_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it may grow nothing is thrown away: what a fit needs is known once a length has run."""
    points = [(64 * number, 0) for number in range(1, 20)]
    bench = CountingBench()
    monkeypatch.setattr(measurement_run, "time", SimpleNamespace(perf_counter=lambda: 5 * len(bench.warm)))
    with pytest.raises(TooLittleTimeError, match="spent after 4 of 19 points"):
        measured(bench, MeasurementGrid(points), budget=20.0)
    for budget, num_warmed in ((20.0, 4), (1e-6, 1)):
        bench.warm.clear()
        told: list[tuple[float, int]] = []
        run = measured(
            bench,
            MeasurementGrid(points),
            budget=budget,
            on_growth=lambda seconds: told.append((seconds, len(bench.warm))),  # noqa: B023
        )
        assert len(run.grid.points) >= 8
        assert run.rounds > 0
        assert told[0][1] == num_warmed
        assert told[-1][0] >= 5 * 8


def test_a_length_that_would_take_too_long_is_not_even_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [(64, 64 * context) for context in range(8)]
    bench = CountingBench()
    monkeypatch.setattr(measurement_run, "time", SimpleNamespace(perf_counter=lambda: len(bench.warm)))
    measured(bench, grid := MeasurementGrid([*points, (4096, 0)]), budget=200.0)
    assert grid.points == points
    assert len(bench.warm) == 1


@pytest.mark.parametrize(("seq_len", "granularity"), [(100, 6), (1000, 62), (2048, 64), (131072, 64)])
def test_what_is_measured_first_has_short_slices_and_late_ones(seq_len: int, granularity: int) -> None:
    points = make_short_grid(seq_len, seq_len // 2, granularity).points
    assert len(points) == len({*points})
    assert (seq_len // 2, 0) in points
    assert all(length + context <= seq_len for length, context in points)
    first = points[:8]
    assert min(length for length, _ in first) == 1
    assert len({length for length, context in first if context == 0}) >= 4
    assert len({context for _, context in first}) >= 4


SECONDS = {"a": 8.0, "b": 5.0, "c": 4.0, "d": 2.0, "e": 1.0}


@pytest.mark.parametrize("num_teams", [1, 2, 3, 8])
def test_everything_is_measured_by_some_team_and_none_rests_while_another_has_much_to_do(num_teams: int) -> None:
    """Each fills its time, until what it doesn't have would take longer than the others; nothing gets longer by it."""
    ranks = tuple((rank,) for rank in range(num_teams))
    teams = [MeasuringTeams(RankGroup(), ranks, mine) for mine in range(num_teams)]
    for turn in (0, 1, 5):
        shares = [team.share(SECONDS, turn, fills=False) for team in teams]
        assert Counter(item for share in shares for item in share) == Counter([*SECONDS])
    longest = max(sum(SECONDS[item] for item in team.share(SECONDS, fills=False)) for team in teams)
    for team in teams:
        share = team.share(SECONDS)
        load = sum(SECONDS[item] for item in share)
        assert load <= longest
        assert all(load + SECONDS[item] > longest for item in {*SECONDS} - {*share})


class _World(RankGroup):
    """The ranks of several hosts, as rank 0 sees them."""

    def __init__(self, everyone: list[Any]) -> None:
        super().__init__()
        self.global_ranks, self._everyone = [*range(len(everyone))], everyone

    def gather(self, value: Any) -> list[Any]:
        return self._everyone


def test_only_teams_of_one_host_deal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 are a host's; 2 and 3 another's, and 4 and 5 share layers across both."""
    monkeypatch.setattr(measurement_run.socket, "gethostname", lambda: "here")
    places = [((0,), "here"), ((1,), "here"), ((2,), "there"), ((3,), "there"), ((4, 5), "here"), ((4, 5), "there")]
    world = _World(places)
    ranks = replace(measurement_run.Ranks.of(), world=world)
    assert MeasuringTeams.of(ranks).teams == ((0,), (1,))
    assert MeasuringTeams.of(ranks, deals=False).teams == ((0,),)


def told(pipelines: int, shared: int, *budget: str) -> dict[str, Any]:
    ended = launch(pipelines * shared, WORKERS / "profiler/measuring.py", str(pipelines), str(shared), *budget)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_two_ranks_measure_half_each_and_plan_from_the_samples_of_both() -> None:
    """Every point has samples of both ranks, of which one is 1% slower here. Replicas alone measure sums and no
    messages: a pipeline of as many processes measures its own."""
    found = told(2, 1)
    assert found["equal"]
    (alone, sums), (messages, _), again = found["links"]
    assert alone == 0 < sums
    assert 0 < messages == again[0]
    assert min(found["spreads"]) > 0
    stages, points, lengths = found["stages"], found["points"], found["lengths"]
    warm, bytes_of_all = stages * lengths, stages * (lengths + 1)
    alone = warm + 2 * stages * points + bytes_of_all
    assert max(found["counts"]) <= warm + (alone - warm) * 0.75  # a share, and what fills the time of the other's


@pytest.mark.more
def test_ranks_that_share_layers_measure_in_step() -> None:
    found = told(1, 2)
    assert found["equal"]
    assert len({*found["counts"]}) == 1


@pytest.mark.parametrize(
    ("pipelines", "shared", "budget"),
    [pytest.param(2, 1, "500", marks=pytest.mark.more), (1, 2, "1000")],
    ids=["dealt", "in step"],
)
def test_ranks_whose_clocks_differ_end_a_round_alike(pipelines: int, shared: int, budget: str) -> None:
    """Ranks that share layers would wait for one that has stopped; those that deal know what each has measured."""
    found = told(pipelines, shared, budget)
    assert found["equal"]
    assert 8 <= found["points"] < 10
    if shared > 1:
        assert len({*found["counts"]}) == 1
        assert max(found["counts"]) < 10 * found["stages"]
