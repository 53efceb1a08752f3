"""Measures stages at the points of a grid, fits their times, and refines where the fit is off."""

from __future__ import annotations

import socket
import statistics
import time
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise, product, zip_longest
from math import sqrt
from typing import Any, TypeVar

from slipstream.cost import (
    OPS,
    ActionBytes,
    AttentionWindow,
    MeasuredStage,
    Measurement,
    SlicePoint,
    TimeFit,
    fit_times,
)
from slipstream.errors import SlipstreamError
from slipstream.parallel import RankGroup, Ranks
from slipstream.profile.stage_bench import StageBench
from slipstream.schedule import Op

_DENSE = 8  # first multiples of the granularity, all of them in the grid
_RATIO = 2**0.5  # ratio between longer lengths; times in between are interpolated
_SHORT_RATIO = 4  # ratio between lengths if a few points are enough


@dataclass
class MeasurementGrid:
    """The points (slice length, context) to measure: `fitted` make the fit, `held_out` judge it; the extremes come
    first."""

    fitted: list[SlicePoint]
    held_out: list[SlicePoint] = field(default_factory=list)

    @property
    def points(self) -> list[SlicePoint]:
        """All points, one held out after every three fitted."""
        held_out = iter(self.held_out)
        mixed: list[SlicePoint] = []
        for place, point in enumerate(self.fitted, 1):
            mixed.append(point)
            mixed += [next(held_out, point)] if place % 3 == 0 else []
        return list(dict.fromkeys([*mixed, *held_out]))

    @property
    def sized(self) -> list[int]:
        """The slice lengths whose bytes are counted. In between these grow in proportion, or are below that."""
        lengths = sorted({length for length, _ in self.fitted})
        return lengths if self.held_out else sorted({*lengths[:2], lengths[-1]})

    def refine(self, off: Sequence[SlicePoint], seq_len: int) -> list[SlicePoint]:
        """Fits the points that were off, and holds out one near each instead. Returns the points to measure."""
        again: dict[SlicePoint, None] = {}
        for length, context in off:
            again |= {(length, 0): None, (length, context): None}
            nearby = (length, context // 2) if context > 1 else (max(1, length * 7 // 8), seq_len // 3)
            nearby = (min(nearby[0], seq_len - nearby[1]), nearby[1])
            if nearby not in self.points and nearby not in again:
                self.held_out.append(nearby)
                again[nearby] = None
            for point in ((length, 0), (length, context)):
                if point in self.held_out:
                    self.held_out.remove(point)
                if point not in self.fitted:
                    self.fitted.append(point)
        return list(again)


def make_grid(seq_len: int, longest_slice: int, granularity: int) -> MeasurementGrid:
    """Returns slice lengths, dense where slices are short, with contexts at about every eighth of the sequence.

    All lengths but 1 are multiples of `granularity`, as far as the longest is. Points in between are held out.
    """
    lengths = _lengths(longest_slice, granularity)
    contexts = (seq_len // 2, seq_len - longest_slice // 4, seq_len // 8, seq_len // 4, 3 * seq_len // 4)
    table = [(length, 0) for length in lengths]
    crossed = [(length, context) for context in contexts for length in lengths[1::2] if context > 0]
    between = _between(lengths, granularity)
    held_out = [(length, seq_len * part // 16) for length, part in zip(between, _scattered(len(between)), strict=True)]
    held_out += [
        (length, seq_len * (part + 5) // 32)
        for length, part in zip(lengths[2::2], _scattered(len(lengths)), strict=False)
    ]
    pairs = zip_longest(_extremes_first(table), _extremes_first([p for p in crossed if sum(p) <= seq_len]))
    fitted = dict.fromkeys(point for pair in pairs for point in pair if point is not None)
    unseen = [p for p in dict.fromkeys(held_out) if p not in fitted and p[1] > 0 and sum(p) <= seq_len]
    return MeasurementGrid(list(fitted), unseen)


def make_short_grid(seq_len: int, longest_slice: int, granularity: int) -> MeasurementGrid:
    """Returns a few points, all of them fitted: for a plan of this run, within seconds.

    Lengths are 1, for the rest of a sequence after multiples of the granularity, and in steps of four from the
    granularity to the longest: between them a slice's own scores are known to grow with the square, and all else in
    proportion. All but the first and the longest are measured twice after a context too, an eighth of the longest's
    time: a context adds no more than four terms (`TimeFit`). Short ones come first, with and without a context: so the
    points left where the time runs out have both.
    """
    lengths = [min(granularity, longest_slice)]
    while lengths[-1] < longest_slice:
        lengths.append(min(_SHORT_RATIO * lengths[-1], longest_slice))
    points = [(1, 0)]
    for place, length in enumerate(lengths):
        inner = length < longest_slice or len(lengths) == 1
        contexts = (0, seq_len // 4 if place % 2 else seq_len // 2, seq_len - length) if inner else (0,)
        points += [(length, context) for context in contexts if length + context <= seq_len]
    return MeasurementGrid([*dict.fromkeys(points)])


def _lengths(longest: int, granularity: int) -> list[int]:
    """Returns 1, the first multiples of the granularity, then lengths in equal ratios up to the longest."""
    lengths = [1, *range(granularity, _DENSE * granularity + 1, granularity)]
    while lengths[-1] < longest:
        lengths.append(max(round(lengths[-1] * _RATIO / granularity), 1) * granularity)
    return sorted({min(length, longest) for length in lengths})


def _between(lengths: Sequence[int], granularity: int) -> list[int]:
    """Returns a length off the middle between any two neighbours that leave room for one."""
    room = [(a, b) for a, b in pairwise(lengths) if a > 1 and b - a > granularity]
    return [a + max(1, (b - a) * 2 // 5 // granularity) * granularity for a, b in room]


def _scattered(count: int) -> list[int]:
    return [(5 * k + 3) % 15 + 1 for k in range(count)]


def _extremes_first(points: Sequence[SlicePoint]) -> list[SlicePoint]:
    """Returns the last point, the first, and then the others from coarse to fine."""
    order = sorted(range(len(points)), key=lambda k: -(k & -k) if k else 0)
    ends = [len(points) - 1, 0] if points else []
    return [points[k] for k in dict.fromkeys([*ends, *order])]


Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class MeasuringTeams:
    """The teams of this rank's host. A team is one rank, or those that exchange something in an action and measure in
    step.

    Only teams of one host deal: another host may be faster. Where several have ranks, each host measures everything.
    """

    world: RankGroup
    teams: tuple[tuple[int, ...], ...]  # ranks of the world
    mine: int  # the number of this rank's team

    @classmethod
    def of(cls, ranks: Ranks, deals: bool = True) -> MeasuringTeams:
        """Returns the teams of this rank's host; this rank's alone where nothing is to be dealt. Collective."""
        shared = ranks.team.size > 1
        team = tuple(map(ranks.world.global_ranks.index, ranks.team.global_ranks)) if shared else (ranks.world.rank,)
        everyone = ranks.world.gather((team, socket.gethostname()))
        hosts = [host for _, host in everyone]
        here = {hosts[rank] for rank in team}
        teams = tuple(dict.fromkeys(other for other, _ in everyone if {hosts[rank] for rank in other} == here))
        if not deals:
            return cls(ranks.world, ((ranks.world.rank,),), 0)
        return cls(ranks.world, teams, teams.index(team))

    def share(self, seconds: Mapping[Item, float], turn: int = 0, fills: bool = True) -> list[Item]:
        """Returns the items that this rank's team measures.

        Args:
            seconds: about how long each item takes, equal on all ranks. The team's own items come in this order.
            turn: the number of the round: from one to the next, items go to the next team.
            fills: whether a team that would be done before others measures some of the items too, so that no core
                rests while another one measures.
        """
        shares: list[list[Item]] = [[] for _ in self.teams]
        load = [0.0] * len(shares)
        for item in sorted(seconds, key=lambda item: -seconds[item]):
            least = load.index(min(load))
            shares[least].append(item)
            load[least] += seconds[item]
        own_index = (self.mine + turn) % len(shares)
        own_share = [item for item in seconds if item in shares[own_index]]
        if fills:
            own_share += _filling(own_share, seconds, max(load) - load[own_index])
        return own_share

    def gather(self, mine: Result) -> list[Result]:
        """Returns the results of each team of this host, as of its first rank. Collective."""
        everyone: list[Any] = self.world.gather(mine)
        return [everyone[team[0]] for team in self.teams]


def _filling(has: list[Item], seconds: Mapping[Item, float], room: float) -> list[Item]:
    """Returns items for which there is room, those first that a team doesn't have, and each of them at most once."""
    added: list[Item] = []
    for item in sorted(seconds, key=lambda item: (item in has, -seconds[item])):
        if seconds[item] <= room:
            added.append(item)
            room -= seconds[item]
    return added


FIT_TOLERANCE = 0.02  # TeraPipe's mean relative error
_FEWEST_SAMPLES = 2  # samples of a point, if they agree
_LEAST_REPEATS = 3  # samples of a point, if they don't agree and time is left
# Share of a point's longest op, below which another op or stage may differ from sample to sample.
_NOTABLE = 0.1
_STEADY = 0.05  # relative difference of a point's quartiles beyond which it is measured again
_FURTHER_ROUNDS = 3
_REFINEMENTS = 2
_ROUND_SHARE = 0.2  # largest share of the budget for warming up or a round; points beyond it are left out
_ROUND_SHARE_OF_FEW = 0.3  # the same without held-out points, as two rounds are mostly enough then
_GRID_SHARE = 0.7  # share of the budget for the grid, the rest for refinements
_FEWEST_POINTS = 8
_Samples = dict[tuple[int, SlicePoint], dict[Op, list[float]]]  # (stage, point) -> seconds of each op
_Sizes = dict[tuple[int, int], tuple[int, ActionBytes]]  # (stage, length) -> bytes of activations, and of actions


class TooLittleTimeError(SlipstreamError):
    """The budget ended before enough points were measured for a fit. Every rank raises it."""

    def __init__(self, num_done: int, num_points: int) -> None:
        super().__init__(f"the budget is spent after {num_done} of {num_points} points, too few for a fit")


class TimeBudget:
    """The remaining time, on which all ranks agree.

    Args:
        budget: seconds.
        ranks: those that measure.
        on_progress: called with the fraction of the budget that is spent.
        on_growth: called with the seconds that a fit needs, where these are more; the run then goes on instead of
            throwing away what it has measured. None: the budget doesn't grow.
    """

    def __init__(
        self,
        budget: float,
        ranks: Ranks,
        on_progress: Callable[[float], None],
        on_growth: Callable[[float], None] | None = None,
    ) -> None:
        self.ranks = ranks
        self._budget = budget
        self._on_progress = on_progress
        self._on_growth = on_growth
        self._began = time.perf_counter()

    def within(self, share: float, planned: float = 0.0) -> bool:
        """Returns whether less than this fraction of the budget is spent, and also less than it is planned, in seconds,
        for the rest. Collective: synchronises the ranks."""
        spent, planned = self.ranks.broadcast((time.perf_counter() - self._began, planned))
        self.tell()
        return bool(max(spent, planned) < share * self._budget)

    def grow(self, needed: float) -> bool:
        """Takes the seconds that are needed, 0 where nobody knows yet, for the budget; returns whether it may grow.
        Collective."""
        if self._on_growth is None:
            return False
        spent, needed = self.ranks.broadcast((time.perf_counter() - self._began, needed))
        if needed:
            self._budget = max(self._budget, needed, 2 * spent)
            self._on_growth(self._budget)
        return True

    @property
    def may_grow(self) -> bool:
        """Whether the budget grows to what a fit needs."""
        return self._on_growth is not None

    def is_spent(self, team: RankGroup) -> bool:
        """Returns whether all of the budget is spent, by the clock of the team's first rank. Collective in the team."""
        return team.run_on_leader(lambda: time.perf_counter() - self._began >= self._budget)

    def tell(self) -> None:
        """Tells this rank's progress."""
        self._on_progress(min(1.0, (time.perf_counter() - self._began) / self._budget))


@dataclass
class MeasurementRun:
    """Collects seconds for every stage, point and op until the fits are good or the time is over."""

    benches: list[StageBench]
    parts: Sequence[range]  # parts of every bench
    grid: MeasurementGrid
    budget: TimeBudget
    teams: MeasuringTeams
    repeats: int  # rounds, at most
    # Relative doubt of each point's median; without held-out points, of an op's two shortest samples.
    doubt: float
    windows: list[tuple[AttentionWindow, ...]] = field(init=False)  # attention windows of every bench
    samples: _Samples = field(default_factory=lambda: defaultdict(lambda: {op: [] for op in OPS}))
    warm: dict[int, float] = field(default_factory=dict)  # length -> seconds of its first slice in all stages
    rounds: int = 0  # number of measured rounds

    def run(self) -> tuple[MeasuredStage, ...]:
        """Warms up, measures the grid, then measures again where the fit is off. Returns the stages. Collective."""
        self.windows = [bench.windows() for bench in self.benches]
        contexts = self._context_bytes()
        self._warm_up()
        self._repeat(self.grid.points, _GRID_SHARE)
        self._end_grid_at_the_measured()
        if self.grid.held_out:
            self._measure_unsteady_again()
        for _ in range(_REFINEMENTS):
            off = self.budget.ranks.broadcast(self._off())
            if not off or not self.budget.within(1.0):
                break
            again = self.grid.refine(off, self.benches[0].seq_len)
            if all(self._warm(length) for length, _ in again):
                self._repeat(again, 1.0)
            self._end_grid_at_the_measured()
        sizes = self._slice_bytes()
        return tuple(self._stage(index, contexts[index], sizes) for index in self._indices)

    @property
    def _indices(self) -> range:
        return range(len(self.benches))

    def _stage(self, index: int, context: tuple[int, int], sizes: _Sizes) -> MeasuredStage:
        bench, parts = self.benches[index], self.parts[index]
        of_stage = {length: entry for (stage, length), entry in sizes.items() if stage == index}
        return MeasuredStage(
            first=parts.start,
            last=parts.stop - 1,
            fits={op: self._fit(index, op) for op in OPS},
            points={op: tuple(self._measurements(index, op)) for op in OPS},
            activation_bytes=tuple((length, of_stage[length][0]) for length in sorted(of_stage)),
            context_bytes=context[0],
            context_gradient_bytes=context[1],
            actions=tuple((length, of_stage[length][1]) for length in sorted(of_stage)),
            num_parameters=bench.num_parameters(),
            num_in_experts=bench.num_parameters(of_experts=True),
        )

    def _context_bytes(self) -> dict[int, tuple[int, int]]:
        """Returns the bytes per token of every stage's keys and values, and of their gradients. Collective."""
        mine = self.teams.share(dict.fromkeys(self._indices, 1.0), fills=False)
        return dict(ChainMap(*self.teams.gather({index: self.benches[index].context_bytes() for index in mine})))

    def _slice_bytes(self) -> _Sizes:
        """Returns the bytes of every stage and length: of its activations and of its actions. Collective."""
        lengths = self.grid.sized
        mine = self.teams.share({index: float(len(self.parts[index])) for index in self._indices}, fills=False)
        stage_sizes: _Sizes = {}
        for index in mine:
            bench = self.benches[index]
            for length, actions in zip(lengths, bench.action_bytes(*lengths), strict=True):
                stage_sizes[index, length] = bench.activation_bytes(length), actions
        return dict(ChainMap(*self.teams.gather(stage_sizes)))

    def _warm_up(self) -> None:
        """Warms up every length of the grid; ends the grid where a round of it would take too long."""
        points = self.grid.points
        share = _ROUND_SHARE if self.grid.held_out else _ROUND_SHARE_OF_FEW
        reached: list[SlicePoint] = []
        for point in points:
            planned = sum(self._seconds(length) for length, _ in [*reached, point]) / len(self.teams.teams)
            has_enough = len(reached) >= _FEWEST_POINTS
            in_time = self.budget.within(*((share, planned) if has_enough else (1.0,)))
            if not in_time and (has_enough or not self.budget.grow(self._needed(points, share))):
                break
            if not self._warm(point[0], in_any_case=self.budget.may_grow and not has_enough):
                break
            reached.append(point)
        self._end_grid_at(reached)

    def _end_grid_at(self, reached: Sequence[SlicePoint]) -> None:
        """Leaves the other points out. Raises TooLittleTimeError where too few are left."""
        if len(reached) < self._fewest:
            raise TooLittleTimeError(len(reached), len(self.grid.points))
        self.grid.fitted = [point for point in self.grid.fitted if point in reached]
        self.grid.held_out = [point for point in self.grid.held_out if point in reached]

    def _end_grid_at_the_measured(self) -> None:
        """Leaves out the points that were not reached in time; where the budget may grow, only once there are enough
        for a fit. Collective: every host has measured what is left."""
        measured = self._measured()
        num_lacking = self._fewest - len(measured)
        if num_lacking > 0 and self.budget.grow(self._needed(self.grid.points, _GRID_SHARE)):
            missing = [point for point in self.grid.points if point not in measured]
            self._round(missing[:num_lacking], in_any_case=True)
            measured = self._measured()
        self._end_grid_at(measured)

    def _measured(self) -> list[SlicePoint]:
        """Returns the points of which every host has samples. Collective."""
        here = [point for point in self.grid.points if self._num_samples(point)]
        there = self.budget.ranks.world.gather(here)
        return [point for point in here if all(point in points for points in there)]

    @property
    def _fewest(self) -> int:
        """The number of points that a fit needs."""
        return min(_FEWEST_POINTS, len(self.grid.points))

    def _needed(self, points: Sequence[SlicePoint], share: float) -> float:
        """Returns about how many seconds a fit needs; 0 before anything has run."""
        return sum(self._seconds(length) for length, _ in points[:_FEWEST_POINTS]) / share

    def _seconds(self, length: int) -> float:
        """Returns about how long a length takes to warm up, in proportion to the longest so far."""
        if length in self.warm or not self.warm:
            return self.warm.get(length, 0.0)
        longest = max(self.warm)
        return self.warm[longest] * max(1.0, length / longest)

    def _warm(self, length: int, in_any_case: bool = False) -> bool:
        """Runs a slice of a length that hasn't run yet, as a sample does, without counting it; returns whether all
        ranks have done so before the budget was spent, or in any case. Collective.

        It is the one with the longest context: the others of its length compute nothing else, and need no more memory.
        """
        if length in self.warm:
            return True
        context = max(context for point_length, context in self.grid.points if point_length == length)
        began = time.perf_counter()
        num_warm = sum(1 for _ in self._in_time(lambda bench: bench.warm_up(length, context), in_any_case))
        seconds = time.perf_counter() - began
        if min(self.budget.ranks.world.gather(num_warm)) < len(self.benches):
            return False
        self.warm[length] = seconds
        return True

    def _in_time(self, work: Callable[[StageBench], Result], in_any_case: bool) -> Iterator[Result]:
        """Yields every stage's result until the budget is spent, or in any case. Collective in the team."""
        for bench in self.benches:
            if not in_any_case and self.budget.is_spent(self.budget.ranks.team):
                return
            yield work(bench)

    def _repeat(self, points: list[SlicePoint], share: float) -> None:
        """Measures points until little is in doubt, as often as is wanted at most."""
        for repeat in range(self.repeats):
            if repeat >= _FEWEST_SAMPLES:
                points = self.budget.ranks.broadcast(self._doubtful(points))
            if not points or (repeat >= _LEAST_REPEATS and not self.budget.within(share)):
                break
            if repeat >= _FEWEST_SAMPLES and not self.budget.within(1.0):
                break
            self._round(points)

    def _num_samples(self, point: SlicePoint) -> int:
        """Returns how often all stages were measured at the point."""
        return min(len(self.samples[index, point][Op.F]) for index in self._indices)

    def _doubtful(self, points: list[SlicePoint]) -> list[SlicePoint]:
        """Returns the points that are measured again: where samples disagree, or are too few to tell."""
        in_doubt = self._doubt if self.grid.held_out else self._disagreement
        few = _FEWEST_SAMPLES
        return [point for point in points if self._num_samples(point) < few or in_doubt(point) > self.doubt]

    def _disagreement(self, point: SlicePoint) -> float:
        """Returns by how much, relatively, the two shortest samples of an op differ, of those that take long at all.

        A disturbance makes a sample longer, such as memory that is new to the process. One op of one stage is enough
        for a fit to few points to be wrong everywhere.
        """
        ops = [sorted(samples) for index in self._indices for samples in self.samples[index, point].values()]
        least = _NOTABLE * max(shortest for shortest, *_ in ops)
        return max(second / shortest - 1 for shortest, second, *_ in ops if shortest >= least)

    def _measure_unsteady_again(self) -> None:
        """Adds samples of the points whose samples differ: few of them, of which one was disturbed, move a fit."""
        for _ in range(_FURTHER_ROUNDS):
            points = [point for point in self.grid.points if self._spread(point) > _STEADY]
            unsteady = self.budget.ranks.broadcast(points)
            if not unsteady or not self.budget.within(_GRID_SHARE):
                break
            self._round(unsteady)

    def _spread(self, point: SlicePoint) -> float:
        return max(_relative_spread(samples)[1] for samples in self._totals(point))

    def _doubt(self, point: SlicePoint) -> float:
        return max(_relative_spread(samples)[1] / sqrt(len(samples)) for samples in self._totals(point))

    def _totals(self, point: SlicePoint) -> list[list[float]]:
        return [list(map(sum, zip(*self.samples[index, point].values(), strict=True))) for index in self._indices]

    def _round(self, points: Iterable[SlicePoint], in_any_case: bool = False) -> None:
        """Measures all stages at this rank's share of the points, and takes in other teams' results. Collective.

        A point's stages are measured one after another on one rank, so that other load on the machine, or a slower
        core, affects all of them alike: parts are differences of stages. Once the budget is spent, a team leaves out
        the rest of its share, and a point of which not all stages were measured, unless all are needed in any case.
        """
        warm = self.budget.ranks.broadcast(self.warm)
        mine = self.teams.share({point: warm[point[0]] for point in points}, self.rounds)
        self.rounds += 1
        results: list[tuple[int, SlicePoint, dict[Op, float]]] = []
        for point in mine:
            self.budget.tell()
            of_stages = [*self._in_time(partial(_run, point), in_any_case)]
            if len(of_stages) < len(self.benches):
                break
            results += [(index, point, seconds) for index, seconds in enumerate(of_stages)]
        for index, point, seconds in chain.from_iterable(self.teams.gather(results)):
            for op in OPS:
                self.samples[index, point][op].append(seconds[op])

    def _off(self) -> list[SlicePoint]:
        """Returns the points where an op is off by more than allowed; none where the mean error is within it."""
        worst: dict[SlicePoint, float] = {}
        held_out: list[float] = []
        for index, op in product(self._indices, OPS):
            fit = self._fit(index, op)
            for point in self.grid.points:
                seconds = statistics.median(self.samples[index, point][op])
                error = abs(fit(*point) - seconds) / seconds
                worst[point] = max(error, worst.get(point, 0.0))
                held_out += [error] if point in self.grid.held_out else []
        if not held_out or statistics.mean(held_out) <= FIT_TOLERANCE:
            return []
        return [point for point, error in worst.items() if error > FIT_TOLERANCE]

    def _fit(self, index: int, op: Op) -> TimeFit:
        medians = {point: statistics.median(self.samples[index, point][op]) for point in self.grid.fitted}
        return fit_times(medians, self.windows[index])

    def _measurements(self, index: int, op: Op) -> Iterator[Measurement]:
        for point in self.grid.points:
            yield Measurement(*point, *_relative_spread(self.samples[index, point][op]), point in self.grid.held_out)


def _run(point: SlicePoint, bench: StageBench) -> dict[Op, float]:
    return bench.run(*point)


def _relative_spread(seconds: Sequence[float]) -> tuple[float, float]:
    """Returns the median, and the difference of the quartiles over it, which is unknown, 0, of a single sample."""
    if len(seconds) == 1:
        return seconds[0], 0.0
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return middle, (high - low) / middle
