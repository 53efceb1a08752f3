"""The weight is named by which a loss isn't finite, by a training, full or with an adapter, and by an evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from slipstream.launch import Progress
from slipstream.train.data import train_tokenizer
from support.forked import COMMAND, launch
from support.tiny_training import TEXT, tiny_llama

POISONED = "model.layers.2.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of which one number isn't one."""
    folder = tmp_path_factory.mktemp("poisoned") / "model"
    config = LlamaConfig(**{name: value for name, value in tiny_llama().items() if name != "model_type"})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    train_tokenizer([TEXT], 300, Progress(None)).save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    state[POISONED][1, 1] = torch.nan
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder.parent / "text.txt").write_text(TEXT)
    pairs = [{"prompt": f"{n} is", "chosen": " a number", "rejected": " none"} for n in range(8)]
    (folder.parent / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return folder


TRAININGS: dict[str, tuple[int, dict[str, Any]]] = {
    "all weights": (3, {}),
    "steps that go on": (3, {"training": {"bad_numbers": "skip"}}),
    "an adapter": (3, {"lora": {"r": 2}, "training": {"bad_numbers": "rollback"}, "checkpoint": {"every": 1}}),
    "replicas": (3, {"parallel": {"data": 2, "shard": "parameters"}, "pipeline": {"num_ranks": 1}}),
    "preferences": (2, {"preference": {"loss": "dpo"}, "data": {"dataset": "pairs.jsonl"}}),
}


@pytest.mark.parametrize(
    "training", [*list(TRAININGS)[:2], *(pytest.param(name, marks=pytest.mark.more) for name in list(TRAININGS)[2:])]
)
def test_a_training_names_the_weight(training: str, model: Path, tmp_path: Path) -> None:
    code, more = TRAININGS[training]
    values: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"files": [str(model.parent / "text.txt")], "validation_fraction": 0},
        "pipeline": {"num_ranks": 2, "slices": 2, "schedule": "1f1b"},
        "runtime": {"self_check": False},
        "training": {"output": str(tmp_path / "output"), "seq_len": 64, "batch_size": 2, "steps": 20},
    }
    for section, settings in more.items():
        values[section] = values.get(section, {}) | settings
    if "dataset" in values["data"]:
        values["data"] = {"dataset": str(model.parent / "pairs.jsonl"), "validation_fraction": 0}
        values["pipeline"] = {"num_ranks": 2}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    ended = launch(2, COMMAND, "train", tmp_path / "config.yaml")
    said = ended.stderr.splitlines()[-1]
    assert ended.returncode == code, ended.stderr[-3000:]
    assert f"{POISONED} has elements that are infinite or not numbers" in said
    if training != "preferences":
        assert f"the loss of step 1 is nan, as {POISONED}" in said
        assert f"they come from {model}; copy or download its weights again" in said
    assert "optimizer.lr" not in ended.stderr


def test_an_evaluation_names_the_weight(model: Path) -> None:
    ended = launch(1, COMMAND, "eval", model, model.parent / "text.txt", "--data.max_samples=2")
    assert ended.returncode == 3, ended.stderr[-3000:]
    assert f"the loss is nan, as {POISONED} has elements" in ended.stderr.splitlines()[-1]
