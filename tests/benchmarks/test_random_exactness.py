"""The random tester draws the same case from the same seed, and finds what differs; its kept seeds hold."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from benchmarks.random_exactness.__main__ import summary
from benchmarks.random_exactness.comparison import BOUND, Piped, largest_difference
from benchmarks.random_exactness.cuts import Dice, partition, parts, place_of
from benchmarks.random_exactness.preferences import PreferenceCase
from benchmarks.zoo.workers import Limits, Result, Send, run_forked

from slipstream import Pipeline
from slipstream.model.toy import float64_masks, full_precision, quiet_transformers
from support.paths import ROOT


def test_a_place_follows_from_the_seed() -> None:
    places = [place_of(str(seed)) for seed in range(400)]
    assert places == [place_of(str(seed)) for seed in range(400)]
    assert {place.num_processes for place in places} == {1, 2, 3, 4}


def test_parts_and_partitions_add_up() -> None:
    for seed in range(200):
        assert sum(parts(Dice(seed), 9, 4)) == 9
        assert sum(partition(Dice(seed), 5, 4, is_causal=True) or [5]) == 5


def test_a_changed_and_a_missing_gradient_show() -> None:
    pipe = Pipeline(torch.nn.Sequential(torch.nn.Linear(2, 2, dtype=torch.float64)))
    piped = Piped(pipe, lambda batch: ((batch,), {}))
    weight, bias = torch.eye(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    expected = [("gradients of step 1", {"0.weight": weight, "0.bias": bias})]

    def found(**numbers: torch.Tensor) -> tuple[float, str]:
        named = {f"0.{name}": each for name, each in numbers.items()}
        return largest_difference(expected, iter([("gradients of step 1", named)]), piped)

    assert found(weight=weight, bias=bias) == (0.0, "")
    error, where = found(weight=weight, bias=bias + 1e-3)
    assert abs(error - 1e-3) < 1e-12
    assert where == "gradients of step 1: 0.bias"
    assert found(weight=weight) == (float("inf"), "gradients of step 1: 0.bias is missing")


@pytest.mark.parametrize("seed", ["10", "60", "51"], ids=["orpo", "kto", "kto of pairs"])
def test_a_case_of_preferences_is_exact(seed: str) -> None:
    """With dropout, which is switched off, and several answers to a prompt, none of which is taken for another's."""
    with float64_masks(), quiet_transformers(), full_precision():
        case = PreferenceCase(seed, place_of(seed))
        error, where = case.compare()
    assert error < BOUND, where


@pytest.mark.more
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_rank_that_is_ended_ends_the_others() -> None:
    limits = Limits(seconds=10, memory=1 << 28, patience=1)
    (result,) = run_forked(["hangs"], _rank_of_three, 1, limits, lambda _: 3)
    assert result.sent == [0, 1, 2]
    assert result.ended_by == "it waited for more than 10 s"


def test_a_step_that_runs_without_gradients_shows() -> None:
    """And one that is refused for another reason isn't taken for it."""
    pipe = Pipeline(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    rows = torch.randn(2, 2), torch.tensor([0, 1])
    Piped(pipe, lambda batch: (rows, {}), refused_within=torch.no_grad).step([None])
    with pytest.raises(AssertionError, match="a step within enable_grad ran"):
        Piped(pipe, lambda batch: (rows, {}), refused_within=torch.enable_grad).step([None])


def _rank_of_three(task: str, send: Send, rank: int) -> None:
    send(rank)
    if rank == 1:
        torch.multiprocessing.Event().wait(60)


def test_a_rank_that_lost_another_is_not_the_cause() -> None:
    """Of two ranks, one says why."""
    lost = {"verdict": "crash", "reason": "LostRankError: ... Connection closed by peer", "error": 0.0}
    seed = next(str(each) for each in range(99) if place_of(str(each)).num_processes == 2)
    row = summary(
        Result(seed, [{"axes": {"ranks": 2}}, lost, {"verdict": "refused", "reason": "slices=0", "error": 0.0}])
    )
    assert (row["verdict"], row["reason"], row["axes"]) == ("refused", "slices=0", {"ranks": 2})
    row = summary(Result(seed, [lost], ended_by="it waited for more than 720 s"))
    assert (row["verdict"], row["reason"]) == ("out of limits", "it waited for more than 720 s")


@pytest.mark.grid
@pytest.mark.timeout(900)
def test_kept_seeds_are_exact_or_refused() -> None:
    command = [sys.executable, "-m", "benchmarks.random_exactness", "--kept"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert ended.returncode == 0, ended.stdout[-3000:]


@pytest.mark.more
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("seed", "axes"),
    [("1", {}), ("0", {"attention": "sharper", "loss_fn": "ScaledLoss"}), ("16", {"loss_fn": "WeightedLoss"})],
)
def test_a_case_says_what_was_drawn(seed: str, axes: dict[str, str]) -> None:
    command = [sys.executable, "-m", "benchmarks.random_exactness", "--case", seed]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    drawn = ended.stdout[ended.stdout.index("{") : ended.stdout.rindex("}") + 1]
    assert ended.returncode == 0, ended.stdout
    assert json.loads(drawn)["ranks"]
    assert json.loads(drawn).items() >= axes.items()
    assert "1 exact" in ended.stdout
