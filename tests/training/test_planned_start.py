"""A run that names no schedule, slices or partition plans them once, writes the plan, and never plans again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoConfig

from slipstream import Memory, Parallelism, make_schedule
from slipstream.cost import Degrees, load_profile
from slipstream.pipeline.pipeline_options import PipelineOptions
from slipstream.pipeline.tuning import StartRequest, is_free
from slipstream.profile.cost_cache import CostCache
from slipstream.train.config.run_config import parse_config
from slipstream.train.data import PackedSequences, TokenisedText
from slipstream.train.planned_start import chosen_facts, chosen_settings, plan_obstacle
from support.architectures import llama
from support.forked import slipstream_command
from support.pipelines import make_pipe
from support.tiny_training import TEXT, half_of, losses_of, run_training, tiny_llama

SETTINGS: dict[str, Any] = {
    "model": {"config": tiny_llama(num_key_value_heads=2)},
    "data": {"vocab_size": 300, "validation_fraction": 0, "files": ["text.txt"]},
    "runtime": {"self_check": False},
    "training": {"seq_len": 64, "batch_size": 2, "steps": 4, "output": "runs"},
    "checkpoint": {"every": 2},
}


FROM_PLAN = (
    "--data.vocab_size=300",
    "--data.validation_fraction=0",
    "--training.steps=4",
    "--runtime.self_check=false",
)


def with_section(**sections: dict[str, Any]) -> dict[str, Any]:
    return {**SETTINGS, **sections}


def test_what_is_not_named_is_left_to_a_plan() -> None:
    several = {"num_ranks": 2, "num_microbatches": 2}
    for values in (SETTINGS, with_section(pipeline=several), with_section(parallel={"tensor": 2, "data": 2})):
        pipeline = parse_config(values).pipeline
        assert (pipeline.schedule, pipeline.slices, pipeline.partition) == ("auto", "auto", "auto")


@pytest.mark.parametrize(
    "sections",
    [
        {"pipeline": {"schedule": "1f1b"}},
        {"pipeline": {"slices": 8}},
        {"pipeline": {"partition": [2, 2]}},
        {"pipeline": {"num_ranks": 1}},
        {"memory": {"recompute": "full"}},
    ],
    ids=str,
)
def test_naming_one_of_them_leaves_the_others_at_their_defaults(sections: dict[str, Any]) -> None:
    pipeline = parse_config(with_section(**sections)).pipeline
    assert (pipeline.schedule, pipeline.slices) == ("1f1b", 8)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({}, ""),
        ({"parallel": {"tensor": 2}}, ""),
        ({"pipeline": {"num_ranks": 1, "slices": 2}}, ""),
        ({"pipeline": {"schedule": "gpipe", "slices": 2}}, ""),
        ({"pipeline": {"schedule": "auto", "slices": "auto", "partition": "auto"}}, ""),
        ({"data": {**SETTINGS["data"], "packing": "none"}}, ""),
        (
            {"data": {**SETTINGS["data"], "packing": "none"}, "pipeline": {"slices": 4}},
            "pipeline.slices=4 is given, so the run plans each step by multiplications, not by measured times: "
            "schedule=1f1b, slices=4, partition=auto. Leave it out for a plan.",
        ),
        (
            {
                "data": {**SETTINGS["data"], "packing": "none"},
                "pipeline": {"num_ranks": 2, "schedule": "1f1b", "slices": 4},
            },
            "pipeline.schedule=1f1b and pipeline.slices=4 are given, so the run plans each step by multiplications, "
            "not by measured times: schedule=1f1b, slices=4, partition=auto. Leave them out for a plan.",
        ),
        (
            {"memory": {"recompute": "full"}},
            "memory.recompute=full is given, so the run plans nothing before its first step: schedule=1f1b, slices=8, "
            "partition=auto. Leave it out for a plan.",
        ),
        (
            {"pipeline": {"schedule": "auto", "slices": 4}, "memory": {"offload": 0.5}},
            "pipeline.slices=4 and memory.offload=0.5 are given, so the run plans nothing before its first step: "
            "schedule=auto, slices=4, partition=auto. Leave them out for a plan.",
        ),
    ],
    ids=str,
)
def test_what_falls_back_to_defaults_is_said(sections: dict[str, Any], said: str) -> None:
    assert plan_obstacle(parse_config(with_section(**sections))) == said


def test_a_dumped_configuration_is_left_open_again() -> None:
    config = parse_config(SETTINGS)
    assert parse_config(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("recompute", ["none", "selective", "full", 1])
def test_a_checkpoint_carries_the_plan_and_what_is_computed_again(recompute: Any) -> None:
    memory = Memory(recompute=recompute)
    pipe = make_pipe(llama(), schedule="gpipe", slices=[5, 3], num_ranks=2, partition=[1, 3], memory=memory)
    sequences = PackedSequences(TokenisedText.join([np.zeros(8, dtype=np.int32)]), 8, seed=None)
    chosen = chosen_facts(pipe, sequences, None)
    assert chosen is not None
    assert (chosen["partition"], chosen["recompute"], chosen["slices"]) == ([1, 3], recompute, [5, 3])


def test_what_was_chosen_is_for_sequences_and_stages_like_its_own() -> None:
    config = parse_config(SETTINGS)
    chosen = {"schedule": str(make_schedule("1f1b", 2, 1, 2)), "slices": [40, 24], "partition": [1, 3], "recompute": 1}
    chosen["degrees"] = Degrees(exchange="keys")
    found = chosen_settings(config, chosen)
    assert (found["partition"], found["slices"], found["memory"].recompute) == ([1, 3], [40, 24], 1)
    assert found["parallel"].context_exchange == "keys"
    assert chosen_settings(config, chosen | {"slices": [40, 8]}) == {}
    others = chosen_settings(config, chosen | {"degrees": Degrees(context=2, exchange="keys")})
    assert "parallel" not in others
    for schedule, stages_per_rank in (("auto", 1), ("auto-v", 2)):
        pipeline = {"schedule": schedule, "slices": [40, 24], "stages_per_rank": stages_per_rank}
        found = chosen_settings(parse_config(with_section(pipeline=pipeline)), chosen)
        assert ("schedule" in found) == (schedule == "auto")


def train(
    folder: Path, output: str, *more: str, config: str = "free.yaml", num_processes: int = 2
) -> CompletedProcess[str]:
    files = f"--data.files=[{folder / 'text.txt'}]"
    return run_training(num_processes, folder / output, folder / config, files, *more)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory, compiled_search: None) -> Iterator[Path]:
    """The folder of a run that measured, planned and trained, with the cache that it left."""
    folder = tmp_path_factory.mktemp("planned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        (folder / "text.txt").write_text(TEXT)
        (folder / "free.yaml").write_text(yaml.safe_dump(SETTINGS))
        run = train(folder, "first")
        assert "stages on ranks" in run.stdout
        yield folder


@pytest.mark.more
def test_a_run_plans_once_and_another_starts_from_its_plan(first_run: Path) -> None:
    """The resumed run and the one from the plan file neither measure nor search, and train the same to the bit."""
    moved = first_run / "moved"
    moved.mkdir()
    for name in ("plan.yaml", "plan.txt"):
        shutil.copy(first_run / "first" / name, moved)
    plan = yaml.safe_load((moved / "plan.yaml").read_text())
    assert sum(plan["pipeline"]["slices"]) == 64
    assert sum(plan["pipeline"]["partition"]) == 4

    check_that_no_other_run_plans(first_run, "first", "free.yaml", "moved/plan.yaml")


def check_that_no_other_run_plans(folder: Path, first: str, config: str, plan: str, num_processes: int = 2) -> None:
    """Resumes the run `first`, and starts another from its plan: both train as it did, to the bit."""
    again = f"{first}-again"
    half_of(folder / first, folder / again, 2)
    resumed = train(folder, again, "--checkpoint.resume=latest", config=config, num_processes=num_processes)
    planned = train(folder, f"{first}-planned", *FROM_PLAN, config=plan, num_processes=num_processes)
    for run in (resumed, planned):
        assert "stages on ranks" not in run.stdout
        assert "measuring what" not in run.stdout
    losses = losses_of(folder / first)
    assert losses_of(folder / again) == losses[2:]
    assert losses_of(folder / f"{first}-planned") == losses


@pytest.mark.more
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"training.seq_len": 32}, "add up to 64 tokens, but training.seq_len=32"),
        ({"pipeline.num_ranks": 3}, "has num_ranks 2, but pipeline.num_ranks=3; set --pipeline.num_ranks=2"),
        ({"pipeline.num_microbatches": 2}, "but pipeline.num_microbatches=2; set --pipeline.num_microbatches=1"),
    ],
    ids=str,
)
def test_a_plan_for_other_settings_is_refused_before_ranks_start(
    first_run: Path, changed: dict[str, int], said: str
) -> None:
    files, output = f"--data.files=[{first_run / 'text.txt'}]", f"--training.output={first_run / 'refused'}"
    given = [f"--{name}={value}" for name, value in changed.items()]
    plan = first_run / "first" / "plan.yaml"
    refused = slipstream_command("train", plan, files, output, *FROM_PLAN, *given)
    assert refused.returncode == 2
    assert said in refused.stderr
    assert not (first_run / "refused").exists()
    anew = refused.stderr.partition("to plan for these: ")[2].split()
    assert anew[0] == "--pipeline.schedule=auto"
    values = yaml.safe_load(plan.read_text()) | {"data": {"files": ["text.txt"]}}
    values["training"] |= {"steps": 4, "output": "runs"}
    for name, _, value in (each.removeprefix("--").partition("=") for each in [*given, *anew]):
        section, _, setting = name.partition(".")
        values[section][setting] = yaml.safe_load(value)
    assert is_free(PipelineOptions(**parse_config(values).pipeline_options()))


MIXTURE = {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
WINDOWS = {"model_type": "gemma2", "sliding_window": 16, "query_pre_attn_scalar": 8}


@pytest.mark.grid
@pytest.mark.parametrize("family", [MIXTURE, WINDOWS], ids=lambda family: family["model_type"])
def test_layers_of_several_kinds_are_planned(first_run: Path, family: dict[str, Any]) -> None:
    """Every other layer has experts, or a window."""
    name = family["model_type"]
    model = {"config": SETTINGS["model"]["config"] | {"head_dim": 8} | family}
    (first_run / f"{name}.yaml").write_text(yaml.safe_dump(with_section(model=model)))
    run = train(first_run, name, config=f"{name}.yaml")
    assert "stages on ranks" in run.stdout
    assert len(losses_of(first_run / name)) == 4


@pytest.mark.grid
def test_replicas_are_planned_together(first_run: Path) -> None:
    """From costs that all ranks of all replicas measure at the same time, and which are kept as such."""
    config = AutoConfig.from_pretrained(first_run / "first" / "inputs")
    request = StartRequest(seq_len=64, microbatch_size=1, num_microbatches=1, num_ranks=2, dtype="float32")
    path = CostCache(config, request.profile, torch.device("cpu"), num_processes=4).path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("damaged")
    (first_run / "replicas.yaml").write_text(yaml.safe_dump(with_section(parallel={"data": 2})))
    run = train(first_run, "replicas", config="replicas.yaml", num_processes=4)
    assert run.stdout.count("stages on ranks") == 1
    assert path.name in "".join(run.stdout.split())
    plan = yaml.safe_load((first_run / "replicas" / "plan.yaml").read_text())
    assert plan["parallel"] == {"data": 2, "tensor": 1}
    assert len(losses_of(first_run / "replicas")) == 4


@pytest.mark.grid
@pytest.mark.parametrize("sequence", [False, True])
def test_ranks_that_share_layers_are_planned(first_run: Path, sequence: bool) -> None:
    """From what their shares cost, which is kept apart from what whole layers cost four ranks."""
    name, parallel = f"tensor-{sequence}", {"tensor": 2} | ({"sequence_parallel": True} if sequence else {})
    (first_run / f"{name}.yaml").write_text(yaml.safe_dump(with_section(parallel=parallel)))
    run = train(first_run, name, config=f"{name}.yaml", num_processes=4)
    assert run.stdout.count("stages on ranks") == 1
    plan = yaml.safe_load((first_run / name / "plan.yaml").read_text())
    assert plan["parallel"] == {"data": 1, **parallel}
    assert sum(plan["pipeline"]["partition"]) == 4
    config = AutoConfig.from_pretrained(first_run / name / "inputs")
    request = StartRequest(
        seq_len=64,
        microbatch_size=2,
        num_microbatches=1,
        num_ranks=2,
        dtype="float32",
        parallel=Parallelism(sequence_parallel=sequence),
    )
    cpu = torch.device("cpu")
    shared, whole = (CostCache(config, request.profile, cpu, 4, number).path for number in (2, 1))
    assert shared != whole
    if "costs are used, but not kept" not in " ".join(run.stdout.split()):
        found = load_profile(shared)
        assert (found.degrees.tensor, found.sequence_parallel, found.hardware.processes) == (2, sequence, 4)
    check_that_no_other_run_plans(first_run, name, f"{name}.yaml", f"{name}/plan.yaml", num_processes=4)
