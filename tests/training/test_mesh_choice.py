"""Axes of the mesh that a configuration leaves open are chosen by measured costs when the run starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig

from slipstream import Parallelism, Plan, SlipstreamError
from slipstream.cost import MeasuredCosts, MeasuredLink, Profile, load_profile
from slipstream.pipeline.planning import StartRequest
from slipstream.planner.search import Evaluation
from slipstream.profile import profile_model
from slipstream.profile.cost_cache import CostCache
from slipstream.schedule import make_schedule
from slipstream.train.config import Config, load_config
from slipstream.train.mesh_choice import TriedMesh, mesh_table, preferred
from slipstream.train.preflight import possible_meshes
from slipstream.units import bytes_text, seconds_text
from support.paths import ROOT
from support.readings import counts
from support.tiny_training import TEXT, run_training, steps_of, tiny_llama

SETTINGS: dict[str, Any] = {
    "model": {"config": tiny_llama(num_key_value_heads=2)},
    "data": {"vocab_size": 300, "validation_fraction": 0, "files": ["text.txt"]},
    "runtime": {"self_check": False},
    "training": {"seq_len": 64, "batch_size": 4, "steps": 2, "output": "runs"},
    "checkpoint": {"every": 1},
}
MODEL = LlamaConfig(**{name: value for name, value in SETTINGS["model"]["config"].items() if name != "model_type"})
OPEN = ("--pp=auto", "--dp=auto", "--tp=auto")
FREE_LINK = MeasuredLink(latency=0.0, bandwidth=1e12, backend="gloo", points=((1024, 1e-9), (4096, 4e-9)))


def loaded(folder: Path, *more: str) -> Config:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(SETTINGS))
    return load_config(file, [f"--training.output={folder / 'run'}", *more])


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """As if a launcher had started so many."""
    monkeypatch.setenv("RANK", "0")
    return lambda number: monkeypatch.setenv("WORLD_SIZE", str(number))


def meshes(config: Config) -> list[tuple[int, int, int, int]]:
    found = [(each.pipeline, each.parallel) for each in possible_meshes(config, MODEL)]
    return [(pipeline.num_ranks, axes.data, axes.tensor, pipeline.num_microbatches) for pipeline, axes in found]


def test_each_mesh_that_fits_batch_layers_and_heads_is_looked_at(tmp_path: Path, ranks: Callable[[int], None]) -> None:
    """Of 4 layers, 4 heads and 4 sequences, each of which is a microbatch."""
    ranks(8)
    config = loaded(tmp_path, *OPEN)
    assert config.num_processes == 8
    two, four = [(4, 1, 2, 4), (2, 2, 2, 2), (1, 4, 2, 1)], [(2, 1, 4, 4), (1, 2, 4, 2)]
    assert meshes(config) == [(4, 2, 1, 2), (2, 4, 1, 1), *two, *four]
    assert meshes(loaded(tmp_path, "--pp=auto", "--dp=auto", "--tp=2")) == two
    given = loaded(tmp_path, *OPEN, "--pipeline.num_microbatches=2")
    assert meshes(given) == [(4, 2, 1, 2), (4, 1, 2, 2), (2, 2, 2, 2), (2, 1, 4, 2), (1, 2, 4, 2)]
    ranks(2)
    assert meshes(loaded(tmp_path, *OPEN, "--optimizer.name=Adafactor")) == [(1, 2, 1, 2)]  # which sees the whole model


def test_ranks_that_share_slices_may_be_chosen_too(tmp_path: Path, ranks: Callable[[int], None]) -> None:
    ranks(4)
    found = [*possible_meshes(loaded(tmp_path, "--pp=auto", "--cp=auto"), MODEL)]
    assert [(each.pipeline.num_ranks, each.parallel.context) for each in found] == [(4, 1), (2, 2), (1, 4)]


def test_of_steps_as_short_within_what_plans_are_off_the_fewest_pipeline_ranks_are_taken() -> None:
    assert preferred([(1.0, 4), (1.03, 1), (1.015, 2)]) == 2
    assert preferred([(1.0, 4), (1.03, 1), (1.03, 2)]) == 0
    assert preferred([(1.01, 1), (1.0, 1)]) == 1


def test_a_mesh_is_chosen_only_with_the_plan(tmp_path: Path, ranks: Callable[[int], None]) -> None:
    ranks(2)
    with pytest.raises(SlipstreamError, match=r"--pp=auto and --dp=auto: meshes are compared .* pipeline.slices=4 is"):
        meshes(loaded(tmp_path, "--pp=auto", "--dp=auto", "--pipeline.slices=4"))
    ranks(8)
    with pytest.raises(SlipstreamError, match=r"no mesh of 8 ranks is possible: pipeline.num_ranks=8 is more than"):
        meshes(loaded(tmp_path, "--pp=auto", "--dp=auto", "--training.batch_size=1"))


def test_without_gpu_and_launcher_there_are_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert loaded(tmp_path, *OPEN).num_processes == 2


def step_on(replicas: int, shard: str = "none", context: str = "device") -> Evaluation:
    """A step of interleaved stages on two ranks of each replica, by measured costs."""
    request = StartRequest(
        seq_len=512,
        num_microbatches=4,
        num_ranks=2,
        replicas=replicas,
        dtype="float32",
        parallel=Parallelism(shard=shard),
        context=context,
    )
    order = make_schedule("interleaved-1f1b", 2, 4, 1, 2)
    plan = Plan(recompute="none").closed(schedule=order, slices=(512,), partition=(2, 2, 2, 2))
    return request.evaluate(MeasuredCosts(load_profile(ROOT / "examples/profiles/xeon-two-processes.json")), plan)


def test_a_mesh_is_judged_by_all_of_its_step_and_of_what_its_ranks_hold() -> None:
    """A rank reduces the gradients of its last stage while others go backward, and a sharded optimizer has less state
    and half of the messages after the last backward."""
    alone, replicated = step_on(1), step_on(2)
    sharded, parameters = (step_on(2, shard) for shard in ("optimizer", "parameters"))
    for step in (alone, replicated, sharded, parameters):
        assert step.plan.open_fields == ()
        assert sum(step.causes.values()) == pytest.approx(step.seconds)
    reduced = replicated.cut.per_rank(replicated.step_times.reductions).max()
    assert 0 < replicated.seconds - alone.seconds < 0.7 * reduced
    assert sharded.seconds < replicated.seconds
    assert replicated.peaks() == alone.peaks()
    state = alone.cut.per_rank(alone.cut.per_stage(alone.cut.costs.num_parameters)) * alone.update.state.optimizer
    for before, after, of_rank in zip(replicated.peaks(), sharded.peaks(), state, strict=True):
        assert before - after == pytest.approx(1.01 * of_rank / 2)
    assert max(sharded.peaks()) < max(parameters.peaks())  # with the whole parameters of a step beside the rows


def test_the_table_says_what_was_passed_over(tmp_path: Path, ranks: Callable[[int], None]) -> None:
    ranks(2)
    first, second = (loaded(tmp_path, *sizes) for sizes in (["--pp=2"], ["--pp=1", "--dp=2"]))
    step = step_on(1)
    shown = mesh_table([TriedMesh(first, step), TriedMesh(second, obstacle="3.0 GB more than 2.0 GB")])
    assert [[cell for cell in re.split(" {2,}", line) if cell] for line in shown.splitlines()] == [
        ["mesh", "step", "fullest rank"],
        ["--pp=2 --dp=1 --tp=1", seconds_text(step.seconds), bytes_text(max(step.peaks()))],
        ["--pp=1 --dp=2 --tp=1", "3.0 GB more than 2.0 GB"],
    ]
    on_host = step_on(1, context="host")
    head, row = mesh_table([TriedMesh(first, on_host)]).splitlines()
    assert re.split(" {2,}", head.strip()) == ["mesh", "step", "fullest rank", "its host"]
    assert row.strip().endswith(bytes_text(max(on_host.host_peaks())))


def train(folder: Path, output: str, *more: str) -> CompletedProcess[str]:
    """Steps of two sequences, whose order is soon searched."""
    given = f"--data.files=[{folder / 'text.txt'}]", "--training.batch_size=2"
    return run_training(2, folder / output, folder / "config.yaml", *given, *more)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, compiled_search: None) -> Iterator[tuple[Path, CostCache, Profile]]:
    """A folder of runs, and costs that one process measured, of which the optimizer and the messages are free."""
    folder, cpu = tmp_path_factory.mktemp("mesh"), torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        (folder / "text.txt").write_text(TEXT)
        (folder / "config.yaml").write_text(yaml.safe_dump(SETTINGS))
        request = StartRequest(seq_len=64, microbatch_size=1, num_microbatches=2, num_ranks=2, dtype="float32")
        profile = profile_model(MODEL, request.profile, cpu)
        profile = replace(profile, link=FREE_LINK, optimizer_seconds=0.0, disturbed=0.0)
        yield folder, CostCache(MODEL, request.profile, cpu, num_processes=2), profile


@pytest.mark.more
def test_the_faster_mesh_runs_and_stands_in_the_plan(kept: tuple[Path, CostCache, Profile]) -> None:
    """Where the optimizer takes most of a step it is the pipeline, whose ranks update half each; where messages do,
    replicas, unless these are more than the memory. Another run from the plan trains the same, and so does one that
    goes on from a checkpoint."""
    folder, cache, profile = kept
    replicated = replace(profile, link=replace(FREE_LINK, handling=((64, 1.0),)))
    cases = {"pipeline": (replace(profile, optimizer_seconds=1e-3), 2, 1), "replicas": (replicated, 1, 2)}
    for name, (costs, num_ranks, num_replicas) in cases.items():
        cache.keep(costs, print)
        run = train(folder, name, "--pp=auto", "--dp=auto")
        plan = yaml.safe_load((folder / name / "plan.yaml").read_text())
        assert plan["pipeline"]["num_ranks"] == num_ranks
        assert plan["parallel"] == {"data": num_replicas, "tensor": 1, "shard": "none"}
        seconds = plan["plan"]["predicted"]["meshes"]
        assert min(seconds, key=seconds.get).startswith(f"--pp={num_ranks} ")
        assert len(seconds) == 2
        assert "measuring what" not in run.stdout
        assert run.stdout.index("mesh ") < run.stdout.index("stages on ranks")
    again = train(folder, "replicas", "--pp=auto", "--dp=auto", "--checkpoint.resume=latest", "--training.steps=3")
    assert "planning --pp" not in again.stdout
    assert [line["step"] for line in steps_of(folder / "replicas")] == [1, 2, 3]


@pytest.mark.more
def test_all_meshes_that_are_compared_have_one_family_and_the_data_once(kept: tuple[Path, CostCache, Profile]) -> None:
    """And so does the training after that."""
    folder, cache, profile = kept
    cache.keep(profile, print)
    given = (f"--data.files=[{folder / 'text.txt'}]", "--training.batch_size=2", f"--training.output={folder / 'once'}")
    _, *ranks = counts(folder, "train", folder / "config.yaml", "--pp=auto", "--dp=auto", *given)
    assert len(yaml.safe_load((folder / "once" / "plan.yaml").read_text())["plan"]["predicted"]["meshes"]) == 2
    assert len(ranks) == 2
    for rank in ranks:
        made = {name: count for name, count in rank.items() if "/" not in name}
        assert made == {"CausalLMFamily": 1, "PackedSequences": 1}


@pytest.mark.grid
def test_what_does_not_fit_is_passed_over(kept: tuple[Path, CostCache, Profile]) -> None:
    folder, cache, profile = kept
    cache.keep(replace(profile, link=replace(FREE_LINK, handling=((64, 1.0),))), print)
    state = 16 * MeasuredCosts(profile).num_parameters(range(4))  # what a replica has besides activations
    train(folder, "limited", "--pp=auto", "--dp=auto", f"--memory.limit={state}")
    plan = yaml.safe_load((folder / "limited" / "plan.yaml").read_text())
    assert plan["pipeline"]["num_ranks"] == 2
