"""Of several slicings the fastest is chosen although times are noisy, and only promising ones are tried."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import replace
from itertools import accumulate
from statistics import median

import pytest

from slipstream import Op
from slipstream.pipeline.tuning.slicings import SliceTimes, growing, promising
from slipstream.pipeline.tuning.trials import Samples, Trial, TrialRequest, TrialResult, fastest
from slipstream.schedule import make_schedule, split_backwards
from slipstream.simulator import TableCost, simulate
from slipstream.timeline import Timeline
from support.parameters import first_of

GROWING = (128, 192, 256, 320, 384, 384, 384)
SECONDS = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.1, Op.W: 0.95}  # of 1000 tokens


def cost_of(slices: tuple[int, ...], num_stages: int, constant: float, pairs: float = 1 / 4e6) -> TableCost:
    contexts = list(accumulate(slices, initial=0))
    times = {
        (stage, i, op): seconds
        * (constant + length / 1000 + (0 if op is Op.W else length * (contexts[i] + length / 2) * pairs))
        for i, length in enumerate(slices)
        for stage in range(num_stages)
        for op, seconds in SECONDS.items()
    }
    return TableCost(times)


def better_by(share: float, better: Trial, others: list[Trial]) -> dict[Trial, TableCost]:
    """Costs under which all other trials take so much longer than the better one."""
    costs = {trial: cost_of(trial.slices, 2, 0.02) for trial in (better, *others)}
    wanted = simulate(better.schedule, costs[better]).makespan * (1 + share)
    for trial in others:
        factor = wanted / simulate(trial.schedule, costs[trial]).makespan
        costs[trial] = replace(costs[trial], times={key: t * factor for key, t in costs[trial].times.items()})
    return costs


class NoisyMachine:
    """Every action takes a few percent more or less, and some steps are disturbed as a whole."""

    def __init__(self, costs: dict[Trial, TableCost], seed: int) -> None:
        self.costs, self.random = costs, random.Random(seed)

    def run(self, trial: Trial) -> Timeline:
        disturbed = 1.2 if self.random.random() < 0.15 else 1.0
        times = {
            key: seconds * max(0.5, self.random.gauss(1, 0.05)) * disturbed
            for key, seconds in self.costs[trial].times.items()
        }
        return simulate(trial.schedule, TableCost(times))


def by_the_median_step(trials: list[Trial]) -> Generator[TrialRequest, TrialResult, Trial]:
    seconds = {}
    for trial in trials:
        timelines = []
        for _ in range(3):
            timelines.append((yield TrialRequest(trial)))
        seconds[trial] = median(each.makespan for each in timelines[1:] if isinstance(each, Timeline))
    return min(seconds, key=lambda trial: seconds[trial])


def choose(
    choice: Callable[[list[Trial]], Generator[TrialRequest, TrialResult, Trial]],
    trials: list[Trial],
    run: Callable[[Trial], Timeline],
) -> tuple[Trial, int]:
    """What is chosen, and after how many steps."""
    choosing, num_steps = choice(trials), 0
    request = next(choosing)
    while True:
        num_steps += 1
        try:
            request = choosing.send(run(request.trial))
        except StopIteration as end:
            return end.value, num_steps


def one_f_one_b(slices: tuple[int, ...]) -> Trial:
    return Trial(split_backwards(make_schedule("1f1b", 2, 1, len(slices))), slices)


@pytest.mark.parametrize("num_others", first_of([1, 4]))
def test_slices_that_are_4_percent_better_are_found_in_spite_of_noise(num_others: int) -> None:
    equal = [(256,) * 8, (128,) * 16, (512,) * 4, (320, 320, 320, 320, 320, 320, 128)][:num_others]
    better, *others = map(one_f_one_b, (GROWING, *equal))
    costs = better_by(0.04, better, others)
    num_right: Counter[str] = Counter()
    for seed in range(200):
        trials = random.Random(seed).sample([better, *others], 1 + num_others)
        for choice in (fastest, by_the_median_step):
            found, num_steps = choose(choice, trials, NoisyMachine(costs, seed).run)
            num_right[choice.__name__] += found == better
            assert num_steps <= 16
    assert num_right["fastest"] >= 0.95 * 200
    assert num_right["fastest"] > num_right["by_the_median_step"]  # else the noise is no test


def test_what_the_executor_adds_between_actions_counts() -> None:
    """Two orders with equal actions, one of which loses time that no action takes."""
    trials = [one_f_one_b(slices) for slices in ((256,) * 8, (512,) * 4)]
    cost = {trial: cost_of(trial.slices, 2, 0.0, pairs=0) for trial in trials}

    def run(trial: Trial) -> Timeline:
        timeline = simulate(trial.schedule, cost[trial])
        if trial == trials[1]:
            return timeline
        late = [replace(s, start=s.start * 2, end=s.start * 2 + s.seconds) for s in timeline.spans]
        return replace(timeline, spans=tuple(late))

    found, _ = choose(fastest, trials, run)
    assert found == trials[1]
    assert simulate(trials[0].schedule, cost[trials[0]]).makespan < run(trials[1]).makespan


def fitted(num_stages: int, constant: float, pairs: float) -> SliceTimes:
    times = SliceTimes()
    for slices in ((256,) * 8, (512,) * 4):
        schedule = make_schedule("1f1b", num_stages, 1, len(slices))
        cost = cost_of(slices, num_stages, constant, pairs)
        measured = [simulate(order, cost) for order in (split_backwards(schedule, everywhere=True), schedule)]
        times.add(Samples(measured), slices)
    return times


def candidates(num_stages: int, constant: float, pairs: float) -> list[tuple[int, ...]]:
    def order(slices: tuple[int, ...]):  # type: ignore[no-untyped-def]
        return split_backwards(make_schedule("1f1b", num_stages, 1, len(slices)))

    return promising(order, order, fitted(num_stages, constant, pairs).cost, 2048, 64)


def test_few_growing_slices_are_tried_where_slices_are_dear_and_contexts_cheap() -> None:
    """The fit says so: a constant in every action, and attention that costs little."""
    found = candidates(num_stages=2, constant=0.05, pairs=1 / 40e6)
    assert any(len(slices) <= 8 and slices[0] < slices[1] <= max(slices[2:-1]) for slices in found)
    as_good = simulate(one_f_one_b(GROWING).schedule, cost_of(GROWING, 2, 0.05, 1 / 40e6)).makespan
    best = min(simulate(one_f_one_b(s).schedule, cost_of(s, 2, 0.05, 1 / 40e6)).makespan for s in found)
    assert best <= as_good


def test_growing_slices_are_whole_and_begin_at_multiples() -> None:
    for length, granularity in ((2048, 64), (100, 6), (2000, 64)):
        for slices in growing(length, granularity):
            assert sum(slices) == length
            assert all(start % granularity == 0 for start in list(accumulate(slices, initial=0))[:-1])
    assert any(len(s) == 7 and s[0] < s[1] < s[2] and s[0] == 128 for s in growing(2048, 64))
