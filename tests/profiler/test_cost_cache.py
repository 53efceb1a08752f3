"""Costs are measured once, kept and found again, for each kind of layer its own."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PretrainedConfig

from slipstream.cost import OPS, MeasuredCosts, Profile, Work
from slipstream.errors import SlipstreamError
from slipstream.model import find_anatomy
from slipstream.options import Parallelism
from slipstream.parallel import Ranks
from slipstream.profile import ProfileSettings, cost_cache, find_costs, profile_model
from slipstream.profile.cost_cache import CostCache
from slipstream.profile.layer_kinds import anatomy_with_halves, find_layer_kinds, find_unit_kinds
from support.architectures import ARCHITECTURES, build, llama

CPU = torch.device("cpu")
SETTINGS = ProfileSettings(seq_len=64, longest_slice=32, granularity=8, repeats=2, budget=20.0, few_points=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SLIPSTREAM_SHARED_CORES", raising=False)
    return tmp_path / "slipstream" / "costs"


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_model(llama(), SETTINGS, CPU)


@pytest.fixture
def measured(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The disturbances of the next measurements, by another program, which are used up one after the other.

    Each finds what the first one of these tests found.
    """
    disturbances: list[float] = []
    monkeypatch.setattr(cost_cache, "profile_model", lambda *_: replace(profile, disturbed=disturbances.pop(0)))
    return disturbances


def costs(lines: list[str]) -> Profile:
    return find_costs(llama(), SETTINGS, CPU, Ranks.of(), lines.append)


@pytest.mark.parametrize(
    ("variable", "disturbed"), [(None, 0.0), ("LOCAL_WORLD_SIZE", 0.4), ("SLIPSTREAM_SHARED_CORES", 0.4)]
)
def test_a_second_start_measures_nothing(
    variable: str | None, disturbed: float, measured: list[float], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However disturbed the first one was, where ranks share cores all the time, among themselves or with others."""
    if variable:
        monkeypatch.setenv(variable, str((os.cpu_count() or 1) + 1))
    measured += [disturbed]
    lines: list[str] = []
    first = costs(lines)
    assert costs(lines) == first
    assert len([*cache.iterdir()]) == 1
    assert (measured, lines) == ([], [])


@pytest.mark.parametrize(("shared", "rounds"), [(False, 6), (True, 3)])
def test_what_is_always_disturbed_is_measured_in_few_rounds(
    shared: bool, rounds: int, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shared:
        monkeypatch.setenv("SLIPSTREAM_SHARED_CORES", "1")
    asked = list[ProfileSettings]()

    def profiled(_: PretrainedConfig, settings: ProfileSettings, *__: object) -> Profile:
        asked.append(settings)
        return replace(profile, disturbed=0.0)

    monkeypatch.setattr(cost_cache, "profile_model", profiled)
    find_costs(llama(), replace(SETTINGS, repeats=6), CPU, Ranks.of())
    assert asked == [replace(SETTINGS, repeats=rounds, budget=asked[0].budget)]


def test_costs_of_other_settings_and_numbers_of_processes_are_other_files() -> None:
    """Replicas measure at the same time as the ranks of one pipeline, and share memory with them. Four ranks may also
    be two that share the layers of two others, or their tokens too."""
    keys = (1, 1), (2, 1), (4, 1), (4, 2)
    paths = {CostCache(llama(), SETTINGS, CPU, *key).path for key in keys}
    paths.add(CostCache(llama(), replace(SETTINGS, parallel=Parallelism(sequence_parallel=True)), CPU, 4, 2).path)
    paths.add(CostCache(llama(), replace(SETTINGS, microbatch_size=2), CPU, 1, 1).path)
    assert len(paths) == 6


def of_other_versions(text: str) -> str:
    values = json.loads(text)
    values["versions"]["torch"] = "1.0"
    return json.dumps(values)


@pytest.mark.parametrize(
    ("damage", "words"),
    [(of_other_versions, ["measured again", "torch 1.0"]), (lambda text: text[:100], ["isn't a profile"])],
    ids=["versions", "damaged"],
)
def test_what_cannot_be_used_is_measured_again(
    damage: Callable[[str], str], words: list[str], measured: list[float], cache: Path
) -> None:
    measured += [0.0, 0.0]
    costs([])
    (path,) = cache.iterdir()
    path.write_text(damage(path.read_text()))
    lines: list[str] = []
    costs(lines)
    assert measured == []
    assert [word for word in words if word not in lines[0]] == []
    assert costs([]).parts == costs([]).parts


def test_a_busy_machine_is_measured_again_and_what_stays_disturbed_is_not_kept(
    measured: list[float], cache: Path
) -> None:
    measured += [0.4, 0.01]
    lines: list[str] = []
    assert costs(lines).disturbed == 0.01
    begin = "another program used the cores for 40% of the measuring: measuring again. Where others always use them"
    assert [line[: len(begin)] for line in lines] == [begin]
    for path in cache.iterdir():
        path.unlink()
    measured += [0.4, 0.3]
    assert costs(lines).disturbed == 0.3
    assert "not kept" in lines[-1]
    assert [*cache.iterdir()] == []


@pytest.mark.parametrize(
    ("seconds", "disturbances", "said"),
    [
        (0.0, [0.4, 0.3], ["40% of the measuring: measuring again", "30% of the measuring: the costs are used"]),
        (0.6, [0.4], ["40% of the measuring: the costs are used, but not kept"]),
    ],
)
def test_all_attempts_together_take_the_budget_and_a_busy_machine_can_be_declared(
    seconds: float, disturbances: list[float], said: list[str], profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second attempt has what is left of it, and isn't made with less than half; the share that is told rises."""
    budgets, shares, lines = list[float](), list[float](), list[str]()

    def profiled(
        _: object, settings: ProfileSettings, __: object, ___: object, tell: Callable[[float], None], *____: object
    ) -> Profile:
        budgets.append(settings.budget)
        tell(0.5)
        time.sleep(seconds)
        return replace(profile, disturbed=disturbances[len(budgets) - 1])

    monkeypatch.setattr(cost_cache, "profile_model", profiled)
    find_costs(llama(), replace(SETTINGS, budget=1.0), CPU, Ranks.of(), lines.append, shares.append)
    assert len(budgets) == len(disturbances)
    assert all(0.5 < budget <= 1 for budget in budgets)
    assert shares == sorted(shares)
    assert [words for words, line in zip(said, lines, strict=True) if words not in line] == []
    assert all("Where others always use them, set SLIPSTREAM_SHARED_CORES=1" in line for line in lines)


def test_a_machine_on_which_nothing_can_be_measured_is_told_what_to_set() -> None:
    with pytest.raises(SlipstreamError, match=r"too few for a fit in 1e-06 s; set SLIPSTREAM_SHARED_CORES=1 where"):
        find_costs(llama(), replace(SETTINGS, budget=1e-6), CPU, Ranks.of())


def test_a_folder_that_cannot_be_written_costs_a_line_only(
    measured: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured += [0.0]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    lines: list[str] = []
    costs(lines)
    assert "can't be kept" in lines[0]


MIXTURE = ARCHITECTURES["qwen2_moe"].to_dict() | {"decoder_sparse_step": 2}
# The kinds of the halves of two layers: a layer with experts attends as a dense one does, one with a window doesn't.
CASES = {
    "a mixture every other layer": (type(ARCHITECTURES["qwen2_moe"]).from_dict(MIXTURE), (0, 1, 0, 2)),
    "a window every other layer": (ARCHITECTURES["gemma2"], (0, 1, 2, 3)),
}


@pytest.mark.parametrize(("config", "halves"), CASES.values(), ids=CASES)
def test_halves_that_are_equal_are_of_one_kind(config: PretrainedConfig, halves: tuple[int, ...]) -> None:
    anatomy = anatomy_with_halves(config)
    kinds, _ = find_layer_kinds(config, anatomy)
    assert find_unit_kinds(config, anatomy, kinds) == halves
    assert find_unit_kinds(config, replace(anatomy, halves=()), kinds) == ()


@pytest.mark.more
@pytest.mark.parametrize(("config", "halves"), CASES.values(), ids=CASES)
def test_each_layer_has_the_costs_of_its_kind(config: PretrainedConfig, halves: tuple[int, ...]) -> None:
    costs = MeasuredCosts(profile_model(config, SETTINGS, torch.device("cpu")))
    assert costs.profile.kinds == (0, 1, 0, 1)
    assert len(costs.profile.stages) == len(set(halves)) + 3  # the ends, and several parts together
    layers = find_anatomy(config).layers_of(build(config))
    numbers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    inner = list(costs.parts[1:-1])
    per_layer = costs.each_number.all[inner].reshape(4, -1)
    np.testing.assert_allclose(per_layer.sum(axis=1), numbers)
    lengths, contexts = np.array([8, 16]), np.array([0, 40])
    for op in OPS:
        first, second, third, fourth = costs.each_seconds(Work(op, lengths, contexts))[inner].reshape(4, -1, 2)
        np.testing.assert_array_equal(first, third)
        np.testing.assert_array_equal(second, fourth)
        assert not np.array_equal(first, second)
        assert np.array_equal(first[0], second[0]) == (halves[0] == halves[2])
