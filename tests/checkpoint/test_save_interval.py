"""Checkpoints are due as often as loses the least time."""

from __future__ import annotations

import pytest

from slipstream.parallel import RankGroup
from slipstream.train.run_checkpoints import SaveInterval, best_interval


def lost_share(interval: float, save: float, between: float) -> float:
    """Of a run with failures at random (exponential) times: the expected time of interval + save, over interval."""
    import math

    return between * (math.exp((interval + save) / between) - 1) / interval


@pytest.mark.parametrize(("save", "between"), [(1.0, 86400.0), (10.0, 3600.0), (30.0, 600.0)])
def test_no_other_interval_loses_less(save: float, between: float) -> None:
    best = lost_share(best_interval(save, between), save, between)
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert lost_share(factor * best_interval(save, between), save, between) > best
    assert best_interval(save, between) == pytest.approx((2 * save * between) ** 0.5, rel=0.2)


def test_it_follows_what_is_measured() -> None:
    interval = SaveInterval("auto", failures_per_day=86400 / 3600, world=RankGroup())  # one an hour
    assert [step for step in range(1, 13) if interval.is_due(step)] == [10, 11, 12]
    for _ in range(10):
        interval.note_step(2.0)
    interval.note_save(10, cost=0.5)
    assert not interval.is_due(10 + 29)
    assert interval.is_due(10 + 30)  # sqrt(2 * 0.5 * 3600) = 60 seconds
    interval.note_written(100.0)  # no save may wait for the one before
    interval.note_save(40, cost=0.5)
    assert not interval.is_due(40 + 49)
    assert interval.is_due(40 + 50)


def test_where_nothing_is_said_a_long_run_has_checkpoints() -> None:
    interval = SaveInterval(None, 1.0, RankGroup())
    for step in range(1, 401):
        interval.note_step(1.6)
        assert interval.is_due(step) == (step in (380, 390, 400))  # after 600 seconds, at a tenth step
        assert not interval.has_one_at_the_end
    interval.note_save(400, cost=0.5)  # sqrt(2 * 0.5 * 86400) = 294 seconds
    assert interval.has_one_at_the_end
    assert next(step for step in range(401, 700) if interval.is_due(step)) == 584
    assert SaveInterval(4, 1.0, RankGroup()).has_one_at_the_end
    assert not SaveInterval(0, 1.0, RankGroup()).has_one_at_the_end


def test_a_number_of_steps_is_kept() -> None:
    interval = SaveInterval(4, 1.0, RankGroup())
    assert [step for step in range(1, 10) if interval.is_due(step)] == [4, 8]
    assert not SaveInterval(0, 1.0, RankGroup()).is_due(4)
