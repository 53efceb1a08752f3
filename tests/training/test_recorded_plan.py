"""A run that names no schedule, slices or partition plans them once, a heavy head spread too, writes the plan, and
never plans again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream import Memory, Parallelism, make_schedule
from slipstream.cost import Degrees, load_profile
from slipstream.pipeline.pipeline_options import PipelineOptions
from slipstream.pipeline.planning import StartRequest, is_free
from slipstream.planner import Plan
from slipstream.profile.cost_cache import CostCache
from slipstream.train.config.config_values import parse_config
from slipstream.train.data import PackedSequences, TokenisedText
from slipstream.train.recorded_plan import chosen_facts, chosen_settings, is_counted_open, plan_obstacle, recorded_plan
from support.architectures import llama
from support.forked import run_alone, slipstream_command
from support.parameters import first_of
from support.paths import WORKERS
from support.pipelines import make_pipe
from support.tiny_training import TEXT, half_of, losses_of, run_training, tiny_llama

SETTINGS: dict[str, Any] = {
    "model": {"config": tiny_llama(num_key_value_heads=2)},
    "data": {"vocab_size": 300, "validation_fraction": 0, "files": ["text.txt"]},
    "runtime": {"self_check": False},
    "training": {"seq_len": 64, "batch_size": 2, "steps": 4, "output": "runs"},
    "checkpoint": {"every": 2},
}
FROM_PLAN = "--data.vocab_size=300", "--data.validation_fraction=0", "--training.steps=4", "--runtime.self_check=false"


def with_section(**sections: dict[str, Any]) -> dict[str, Any]:
    """The settings above, with others in some of their sections."""
    every = {name: {} for name in sections} | SETTINGS
    return {name: values | sections.get(name, {}) for name, values in every.items()}


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
def test_naming_one_of_them_leaves_the_others_to_counted_operations(sections: dict[str, Any]) -> None:
    config = parse_config(with_section(**sections))
    named = sections.get("pipeline", {})
    assert (config.pipeline.schedule, config.pipeline.slices) == (named.get("schedule"), named.get("slices"))
    assert is_counted_open(config)
    assert not is_counted_open(parse_config(with_section(pipeline={"num_ranks": 1, "slices": 8})))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({}, ""),
        ({"parallel": {"tensor": 2}}, ""),
        ({"pipeline": {"num_ranks": 1, "slices": 2}}, ""),
        ({"pipeline": {"schedule": "gpipe", "slices": 2}}, ""),
        ({"pipeline": {"schedule": "auto", "slices": "auto", "partition": "auto"}}, ""),
        ({"data": {"packing": "none"}}, ""),
        ({"pipeline": {"schedule": "auto"}}, ""),
        (
            {"data": {"packing": "none"}, "pipeline": {"slices": 4}},
            "pipeline.slices=4 is given, so the run plans each step by multiplications, not by measured times: "
            "slices=4, partition=auto. Leave it out for a plan.",
        ),
        (
            {"data": {"packing": "none"}, "pipeline": {"num_ranks": 2, "schedule": "1f1b", "slices": 4}},
            "pipeline.schedule=1f1b and pipeline.slices=4 are given, so the run plans each step by multiplications, "
            "not by measured times: schedule=1f1b, slices=4, partition=auto. Leave them out for a plan.",
        ),
        (
            {"memory": {"recompute": "full"}},
            "memory.recompute=full is given, so the run measures nothing: what is left open (schedule, slices, "
            "partition, stages_per_rank) is planned by counted operations. Leave it out for a plan from measured "
            "costs.",
        ),
        (
            {"pipeline": {"schedule": "auto", "slices": 4}, "memory": {"offload": 0.5}},
            "pipeline.slices=4 and memory.offload=0.5 are given, so the run plans nothing before its first step: "
            "schedule=auto, slices=4, partition=auto. Leave them out for a plan.",
        ),
        (
            {"pipeline": {"partition": [1, 3]}},
            "pipeline.partition=[1, 3] is given, so the run measures nothing: what is left open (schedule, slices, "
            "stages_per_rank) is planned by counted operations. Leave it out for a plan from measured costs.",
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
    plan = recorded_plan(json.loads(json.dumps(chosen)))
    assert (plan.partition, plan.settings()["memory"]["recompute"], plan.slices, plan.schedule) == (
        (1, 3),
        recompute,
        (5, 3),
        pipe.order,
    )
    older = {"schedule": str(pipe.order), "slices": [5, 3], "partition": [1, 3], "recompute": recompute}
    assert recorded_plan(older | {"degrees": [*pipe.degrees]}) == plan


def test_what_was_chosen_is_for_sequences_and_stages_like_its_own() -> None:
    config = parse_config(SETTINGS)
    chosen = {"schedule": str(make_schedule("1f1b", 2, 1, 2)), "slices": [40, 24], "partition": [1, 3], "recompute": 1}
    chosen["degrees"] = Degrees()
    found = chosen_settings(config, chosen)
    assert (found["partition"], found["slices"], found["memory"].recompute) == ([1, 3], [40, 24], 1)
    by_keys = chosen | {"degrees": Degrees(context=2, exchange="keys")}
    # What is on the host isn't the plan's: a run may resume with another place.
    there = {"context": "host", "optimizer": "host", "loss_tokens": 16}
    on_host = parse_config(with_section(memory=there))
    written = {"plan": recorded_plan(chosen).closed(**Degrees().choices).dump()}
    memory = chosen_settings(on_host, chosen | written)["memory"]
    assert (memory.context, memory.optimizer) == ("host", "host")
    sharing = parse_config(with_section(parallel={"context": 2}))
    assert chosen_settings(sharing, by_keys)["parallel"].context_exchange == "keys"
    assert chosen_settings(config, chosen | {"slices": [40, 8]}) == {}
    others = chosen_settings(config, chosen | {"degrees": Degrees(context=2, exchange="keys")})
    assert "parallel" not in others
    for schedule, stages_per_rank in (("auto", 1), ("auto-v", 2)):
        pipeline = {"schedule": schedule, "slices": [40, 24], "stages_per_rank": stages_per_rank}
        found = chosen_settings(parse_config(with_section(pipeline=pipeline)), chosen)
        assert ("schedule" in found) == (schedule == "auto")


def test_a_single_rank_goes_on_in_the_slices_that_it_had() -> None:
    plan = Plan(recompute="stage").closed(schedule=make_schedule("1f1b", 1, 1, 4), slices=(16,) * 4, partition=(4,))
    chosen = {"plan": plan.closed(**Degrees().choices).dump()}
    limited = with_section(pipeline={"num_ranks": 1}, memory={"limit": 1e9})
    found = chosen_settings(parse_config(limited), chosen)
    assert (found["slices"], found["memory"].recompute) == ([16] * 4, "stage")
    assert chosen_settings(parse_config(with_section(pipeline={"num_ranks": 1, "slices": 8})), chosen) == {}
    # Each step's slices follow from the longest sequence's, which are planned anew.
    by_step = with_section(pipeline={"num_ranks": 1}, data={"packing": "none"})
    assert chosen_settings(parse_config(by_step), chosen) == {}


def train(folder: Path, output: str, *more: str, config: str = "free.yaml", num_processes: int = 2) -> str:
    """What a run says on the text in that folder, by a configuration there."""
    files = f"--data.files=[{folder / 'text.txt'}]"
    return run_training(num_processes, folder / output, folder / config, files, *more).stdout


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory, compiled_search: None) -> Iterator[Path]:
    """The folder of a run that measured, planned and trained, with the cache that it left."""
    folder = tmp_path_factory.mktemp("planned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        (folder / "text.txt").write_text(TEXT)
        (folder / "free.yaml").write_text(yaml.safe_dump(SETTINGS))
        assert "stages on ranks" in train(folder, "first")
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
    for said in (resumed, planned):
        assert "stages on ranks" not in said
        assert "measuring what" not in said
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
    assert "stages on ranks" in train(first_run, name, config=f"{name}.yaml")
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
    said = train(first_run, "replicas", config="replicas.yaml", num_processes=4)
    assert said.count("stages on ranks") == 1
    assert path.name in "".join(said.split())
    plan = yaml.safe_load((first_run / "replicas" / "plan.yaml").read_text())
    assert plan["parallel"] == {"data": 2, "tensor": 1}
    assert len(losses_of(first_run / "replicas")) == 4


@pytest.mark.grid
@pytest.mark.parametrize("sequence", [False, True])
def test_ranks_that_share_layers_are_planned(first_run: Path, sequence: bool) -> None:
    """From what their shares cost, which is kept apart from what whole layers cost four ranks."""
    name, parallel = f"tensor-{sequence}", {"tensor": 2} | ({"sequence_parallel": True} if sequence else {})
    (first_run / f"{name}.yaml").write_text(yaml.safe_dump(with_section(parallel=parallel)))
    said = train(first_run, name, config=f"{name}.yaml", num_processes=4)
    assert said.count("stages on ranks") == 1
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
    if "costs are used, but not kept" not in " ".join(said.split()):
        found = load_profile(shared)
        assert (found.degrees.tensor, found.sequence_parallel, found.hardware.processes) == (2, sequence, 4)
    check_that_no_other_run_plans(first_run, name, f"{name}.yaml", f"{name}/plan.yaml", num_processes=4)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text and costs of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def logits(folder: Path) -> Tensor:
    """Of what the run exported, as transformers loads it."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    found: Tensor = model(torch.arange(64)[None]).logits.detach()
    return found


@pytest.mark.grid
@pytest.mark.usefixtures("compiled_search")
@pytest.mark.parametrize(("replicas", "tied"), [(1, False), (2, False), (1, True), (2, True)])
def test_a_plan_spreads_a_heavy_head(place: Path, replicas: int, tied: bool) -> None:
    """The run that resumes, and the one from the plan file, have it spread too, and train the same to the bit."""
    ranks, model = 2 * replicas, {"config": SETTINGS["model"]["config"] | {"tie_word_embeddings": tied}}
    free = with_section(parallel={"data": replicas}, model=model, training={"batch_size": 4})
    (place / "free.yaml").write_text(yaml.safe_dump(free))
    assert run_alone(WORKERS / "training/keep_heavy_head.py", place / "free.yaml", str(ranks)).returncode == 0
    said = train(place, "first", num_processes=ranks)
    assert "measuring" not in said
    assert "The head is spread: whole, on one rank, a step takes +" in said
    plan = yaml.safe_load((place / "first" / "plan.yaml").read_text())
    assert plan["pipeline"]["vocabulary"] == "spread"
    for name in ("plan.txt", "schedule.txt"):
        assert "V0.0" in (place / "first" / name).read_text()
        assert ("E0.0" in (place / "first" / name).read_text()) == tied
    check_that_no_other_run_plans(place, "first", "free.yaml", "first/plan.yaml", ranks)
    for run in ("first-again", "first-planned"):
        assert torch.equal(logits(place / run), logits(place / "first"))


@pytest.mark.more
@pytest.mark.parametrize(
    ("sections", "ranks"),
    first_of(
        [
            ({"pipeline": {"schedule": "interleaved-1f1b", "stages_per_rank": 2, "slices": 4}}, 2),
            ({"pipeline": {"schedule": "zb-h1", "slices": 4}}, 2),
            ({"pipeline": {"schedule": "1f1b", "slices": 3}, "parallel": {"data": 2}}, 4),
            ({"pipeline": {"schedule": "1f1b", "slices": 3}, "data": {"packing": "none"}}, 2),
        ],
        1,
        "grid",
    ),
    ids=["interleaved", "zb-h1", "replicas", "unpacked"],
)
def test_a_named_schedule_takes_a_spread_head(place: Path, sections: dict[str, dict[str, Any]], ranks: int) -> None:
    """It trains, resumes and exports as with a whole one."""
    settings = with_section(**sections | {"training": {"batch_size": 4}})
    (place / "free.yaml").write_text(yaml.safe_dump(settings))
    for name in ("whole", "spread"):
        train(place, name, f"--pipeline.vocabulary={name}", num_processes=ranks)
        assert ("V0.0" in (place / name / "schedule.txt").read_text()) == (name == "spread")
    assert losses_of(place / "whole") == pytest.approx(losses_of(place / "spread"), rel=1e-5)
    torch.testing.assert_close(logits(place / "whole"), logits(place / "spread"), rtol=1e-3, atol=1e-4)
    again = half_of(place / "spread", place / "again", 2)
    train(place, "again", "--pipeline.vocabulary=spread", "--checkpoint.resume=latest", num_processes=ranks)
    assert losses_of(again) == losses_of(place / "spread")[2:]
    assert torch.equal(logits(again), logits(place / "spread"))


# A version kept it whose defaults were 1f1b and 8 slices; none was given.
KEPT = Path(__file__).with_name("kept_run")


@pytest.mark.more
def test_a_run_of_a_version_with_other_defaults_goes_on_as_it_was(tmp_path: Path) -> None:
    """To the bit, as if its order and slices were given."""
    (tmp_path / "text.txt").write_text(" ".join(f"{n} is {n * n % 97} more than {n % 13}." for n in range(400)))
    settings = {
        "model": {
            "config": tiny_llama(
                hidden_size=4, intermediate_size=8, num_hidden_layers=3, num_attention_heads=2, vocab_size=260
            )
        },
        "data": {"files": [str(tmp_path / "text.txt")], "vocab_size": 260, "validation_fraction": 0},
        "pipeline": {"num_ranks": 2},
        "memory": {"recompute": "full"},
        "runtime": {"self_check": False},
        "training": {"seq_len": 48, "batch_size": 2, "steps": 4, "device": "cpu"},
        "checkpoint": {"every": 2, "resume": "latest"},
    }
    given = {**settings, "pipeline": {"num_ranks": 2, "schedule": "1f1b", "slices": 8}}
    folders = [tmp_path / "open", tmp_path / "given"]
    for folder, values in zip(folders, (settings, given), strict=True):
        shutil.copytree(KEPT, folder)
        run_training(2, folder, values)
    orders = [(folder / "schedule.txt").read_text() for folder in folders]
    assert "schedule: 1f1b\n" in orders[0]
    assert "slices: 8\n" in orders[0]
    assert orders[0] == orders[1]
    models = [(folder / "model/model.safetensors").read_bytes() for folder in folders]
    assert losses_of(folders[0]) == losses_of(folders[1])
    assert models[0] == models[1]


def test_a_run_goes_on_with_what_was_planned_by_counted_operations(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    settings = with_section(memory={"recompute": "selective"}, pipeline={"num_ranks": 2})
    settings["data"] = {**settings["data"], "files": [str(tmp_path / "text.txt")]}
    run, resumed = tmp_path / "run", tmp_path / "resumed"
    said = run_training(2, run, settings).stdout
    assert "planned by counted operations: " in said
    half_of(run, resumed, 2)
    run_training(2, resumed, settings, "--checkpoint.resume=latest")
    assert losses_of(resumed) == losses_of(run)[2:]
    assert (run / "schedule.txt").read_text() == (resumed / "schedule.txt").read_text()
    assert (run / "model/model.safetensors").read_bytes() == (resumed / "model/model.safetensors").read_bytes()
