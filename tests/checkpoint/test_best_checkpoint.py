"""The best checkpoint stays whatever is saved after it, and saves come as often as loses least."""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.checkpoint import CheckpointFolder, Checkpoints, TensorShard, find_best
from slipstream.errors import SlipstreamError
from slipstream.parallel import ParameterShare, RankGroup
from slipstream.train.run_checkpoints import SaveInterval, best_interval
from slipstream.train.validation import LossHistory
from support.examples import examples

LOSSES = st.sampled_from([1.0, 2.0, 3.0, 4.0, math.nan, math.inf])
VALIDATIONS = st.lists(st.tuples(LOSSES, st.booleans(), st.booleans()), max_size=6)


class Run:
    """A folder, its checkpoints, and the history of validations."""

    def __init__(self, folder: Path, keep: int = 1) -> None:
        self.checkpoints = Checkpoints(folder, RankGroup(), keep, say=lambda _: None)
        self.checkpoints.prepare()
        self.folder, self.history = CheckpointFolder(folder), LossHistory(keeps_best=True)

    def save(self, step: int, fails: bool = False) -> None:
        obstacle = self.folder.part(step)
        if fails:
            obstacle.write_text("no folder can be made here")
        shards = [TensorShard("weight", ParameterShare.whole((2,)), torch.full((2,), float(step)))]
        self.checkpoints.save(step, shards, {"validation": self.history.facts()})
        self.checkpoints.wait()
        if fails:
            obstacle.unlink()

    def validate(self, step: int, loss: float, fails: bool = False) -> None:
        """As a run does: it saves where the loss is the best so far."""
        if self.history.add(step, loss):
            self.save(step, fails)

    def find(self, wanted: Any = "best") -> int:
        found = self.checkpoints.find(wanted)
        assert found is not None
        return found.step


@examples(25)
@given(VALIDATIONS, st.integers(1, 2))
def test_the_lowest_loss_that_was_saved_stays(validations: list[tuple[float, bool, bool]], keep: int) -> None:
    """Each validation: its loss, whether a save after it fails, and whether one is due in any case."""
    lowest, expected, saved = math.inf, None, []
    with TemporaryDirectory() as folder:
        run = Run(Path(folder), keep)
        for step, (loss, fails, is_due) in enumerate(validations, start=1):
            is_best = run.history.add(step, loss)
            assert is_best == (loss < lowest)
            lowest = loss if is_best else lowest
            if is_best or is_due:
                run.save(step, fails)
            if (is_best or is_due) and not fails:
                saved.append(step)
                expected = step if is_best else expected
            others = [each for each in saved if each != expected][-keep:]
            assert set(run.folder.steps()) >= {*others} | ({expected} - {None})
            best = find_best(run.folder)
            assert (None if best is None else best.step) == expected
            saved = sorted(run.folder.steps())
            assert len(saved) <= keep + 1
        if expected is not None:
            assert run.find() == expected


@examples(200)
@given(st.lists(LOSSES, max_size=12), st.integers(1, 4), st.integers(0, 12))
def test_patience_counts_validations_since_the_best(losses: list[float], patience: int, resumed_at: int) -> None:
    history = LossHistory(keeps_best=True, patience=patience)
    for step, loss in enumerate(losses, start=1):
        if step == resumed_at:
            facts = history.facts()
            history = LossHistory(keeps_best=True, patience=patience)
            history.restore(facts)
            assert history.facts() == facts
        assert not history.has(step)
        history.add(step, loss)
        assert history.has(step)
        finite = [each for each in losses[:step] if each < math.inf]
        since = step - 1 - losses.index(min(finite)) if finite else step
        assert history.is_out_of_patience == (since >= patience)
        if finite:
            assert history.best == (losses.index(min(finite)) + 1, min(finite))


def test_one_that_another_start_left_is_not_taken(tmp_path: Path) -> None:
    """The run is resumed from step 1, and the better model of step 2 can't be saved this time."""
    first = Run(tmp_path, keep=9)
    first.validate(1, 3.0)
    facts = first.history.facts()
    first.validate(2, 2.0)
    again = Run(tmp_path, keep=9)
    again.history.restore(facts)
    again.validate(2, 1.0, fails=True)
    again.save(3)
    assert again.folder.steps() == [3, 2, 1]
    assert again.find() == 1


def test_one_that_is_damaged_is_named_and_stays(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.validate(1, 1.0)
    (run.folder.complete(1) / "manifest.json").write_text("{}")
    run.save(2)
    run.save(3)
    assert run.folder.steps() == [3, 1]
    with pytest.raises(SlipstreamError, match=r"the checkpoint of step 1 .* damaged: .* take latest"):
        run.find()
    assert run.find("latest") == 3


def test_a_run_that_keeps_none_has_none(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.checkpoints.find("best") is None
    run.history = LossHistory(keeps_best=False)
    run.history.add(1, 1.0)
    run.save(1)
    run.save(2)
    assert run.folder.steps() == [2]
    with pytest.raises(SlipstreamError, match=r"there is no best checkpoint in .*keep_best: true .*there \(2\)"):
        run.find()


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
    interval.note_save(400, cost=0.5)  # sqrt(2 * 0.5 * 86400) = 294 seconds
    assert next(step for step in range(401, 700) if interval.is_due(step)) == 584
    assert all(SaveInterval(every, 1.0, RankGroup()).has_one_at_the_end for every in (None, 4, "auto"))
    assert not SaveInterval(0, 1.0, RankGroup()).has_one_at_the_end


def test_a_number_of_steps_is_kept() -> None:
    interval = SaveInterval(4, 1.0, RankGroup())
    assert [step for step in range(1, 10) if interval.is_due(step)] == [4, 8]
    assert not SaveInterval(0, 1.0, RankGroup()).is_due(4)
