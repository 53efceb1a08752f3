"""A run that names no schedule, slices or partition plans them once, writes the plan, and never plans again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml

from slipstream import Memory, Pipeline, Runtime, make_schedule
from slipstream.training.checkpoint.run_state import _cut
from slipstream.training.config.config_file import parse_config
from slipstream.training.planned_start import _found_again
from support.architectures import llama
from support.forked import COMMAND, launch

PLAIN = Runtime(self_check=False)
SETTINGS: dict[str, Any] = {
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 300,
            "max_position_embeddings": 64,
        }
    },
    "data": {"vocab_size": 300, "validation_fraction": 0, "files": ["text.txt"]},
    "runtime": {"self_check": False},
    "training": {"seq_len": 64, "batch_size": 2, "steps": 4, "output": "runs"},
    "checkpoint": {"every": 2},
}


def with_section(**sections: dict[str, Any]) -> dict[str, Any]:
    return {**SETTINGS, **sections}


def test_what_is_not_named_is_left_to_a_plan() -> None:
    for values in (SETTINGS, with_section(pipeline={"num_ranks": 2, "num_microbatches": 2})):
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
        {"parallel": {"tensor": 2}},
    ],
    ids=str,
)
def test_naming_one_of_them_leaves_the_others_at_their_defaults(sections: dict[str, Any]) -> None:
    pipeline = parse_config(with_section(**sections)).pipeline
    assert (pipeline.schedule, pipeline.slices) == ("1f1b", 8)


def test_a_dumped_configuration_is_left_open_again() -> None:
    config = parse_config(SETTINGS)
    assert parse_config(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("recompute", ["none", "selective", "full", 1])
def test_a_checkpoint_carries_the_plan_and_what_is_computed_again(recompute: Any) -> None:
    memory = Memory(recompute=recompute)
    pipe = Pipeline.from_config(
        llama(), schedule="gpipe", slices=[5, 3], num_ranks=2, partition=[1, 3], memory=memory, runtime=PLAIN
    )
    assert _cut(pipe) == {"partition": [1, 3], "recompute": recompute}


def test_an_older_checkpoint_has_balanced_layers() -> None:
    config = parse_config(SETTINGS)
    earlier = {"schedule": str(make_schedule("1f1b", 2, 1, 2)), "slices": [40, 24]}
    found = _found_again(config, earlier)
    assert (found["partition"], found["slices"], found["memory"].recompute) == ("auto", [40, 24], "none")
    assert _found_again(config, earlier | {"slices": [40, 8]}) == {}


def train(folder: Path, output: str, *more: str, config: str = "free.yaml") -> CompletedProcess[str]:
    arguments = [f"--training.output={folder / output}", f"--data.files=[{folder / 'text.txt'}]", *more]
    return launch(2, COMMAND, "train", str(folder / config), *arguments)


@pytest.mark.more
@pytest.mark.usefixtures("compiled_search")
def test_a_run_plans_once_and_another_starts_from_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The resumed run and the one from the plan file neither measure nor search, and train the same to the bit."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(" ".join(f"{n} is {n * n % 97} more than {n % 13}." for n in range(3000)))
    (tmp_path / "free.yaml").write_text(yaml.safe_dump(SETTINGS))
    first = train(tmp_path, "first")
    assert first.returncode == 0, first.stderr
    assert "stages on ranks" in first.stdout
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("plan.yaml", "plan.txt"):
        (tmp_path / "first" / name).rename(moved / name)
    plan = yaml.safe_load((moved / "plan.yaml").read_text())
    assert sum(plan["pipeline"]["slices"]) == 64
    assert sum(plan["pipeline"]["partition"]) == 4

    shutil.copytree(
        tmp_path / "first" / "checkpoints" / "step-00000002", tmp_path / "again" / "checkpoints" / "step-00000002"
    )
    resumed = train(tmp_path, "again", "--checkpoint.resume=latest")
    assert resumed.returncode == 0, resumed.stderr
    more = ["--data.vocab_size=300", "--data.validation_fraction=0", "--training.steps=4", "--runtime.self_check=false"]
    planned = train(tmp_path, "planned", *more, config="moved/plan.yaml")
    assert planned.returncode == 0, planned.stderr
    for run in (resumed, planned):
        assert "stages on ranks" not in run.stdout
    losses = {name: _losses(tmp_path / name) for name in ("first", "again", "planned")}
    assert losses["again"] == losses["first"][2:]
    assert losses["planned"] == losses["first"]


def _losses(folder: Path) -> list[float]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in found if "loss" in line]
