"""A training makes its data and its model's family once, and a command reads each of a model's files once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from support.readings import counts

WORDS = {"<eos>": 0, "<unk>": 1, **{str(number): number + 2 for number in range(62)}}
SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": len(WORDS),
    "max_position_embeddings": 64,
    "eos_token_id": 0,
}


def saved_model(folder: Path, **settings: Any) -> Path:
    """A Llama of two layers with a tokenizer of numbers."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE | settings))
    model.generation_config = GenerationConfig(eos_token_id=0)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel(WORDS, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    return folder


def configuration(folder: Path, model: dict[str, Any], **sections: dict[str, Any]) -> Path:
    (folder / "text.txt").write_text(" ".join(str(number * 7 % 61) for number in range(2000)))
    settings = {
        "model": model,
        "data": {"files": [str(folder / "text.txt")], "validation_fraction": 0},
        "pipeline": {"num_ranks": 2, "slices": 2, "schedule": "1f1b"},
        "runtime": {"self_check": False},
        "training": {"seq_len": 32, "batch_size": 2, "steps": 1, "output": str(folder / "run")},
        "checkpoint": {"every": 0},
    }
    for name, section in sections.items():
        settings[name] = settings.get(name, {}) | section
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer")


def often(found: Counter[str], names: Sequence[str]) -> dict[str, int]:
    """Which of the files were opened more than once, and how often."""
    return {name: found[name] for name in names if found[name] > 1}


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.more)], ids=["apart", "tied"])
def test_a_training_reads_its_model_once_in_each_process(tmp_path: Path, tied: bool) -> None:
    """The launcher checks the model's files and tokenises the text, and each rank reads what it has of them. Where ends
    are tied by the configuration, the launcher first compares the weights that are saved of both."""
    model = saved_model(tmp_path / "model", tie_word_embeddings=tied)
    launcher, *ranks = counts(tmp_path, "train", configuration(tmp_path, {"path": str(model)}))
    assert launcher["PackedSequences"] == 1
    assert often(launcher, [f"model/{name}" for name in MODEL_FILES]) == (
        {"model/model.safetensors": 2} if tied else {}
    )
    assert len(ranks) == 2
    for rank in ranks:
        made = {name: count for name, count in rank.items() if "/" not in name}
        assert made == {"CausalLMFamily": 1, "PackedSequences": 1}
        assert often(rank, [f"model/{name}" for name in MODEL_FILES]) == {}
        assert often(rank, ["run/inputs/config.json", "run/inputs/train.tokens.npy"]) == {}
        assert rank["model/model.safetensors"] == 1


@pytest.mark.more
def test_a_run_with_another_tokenizer_reads_both_once(tmp_path: Path) -> None:
    """Of which the model's own says which of the tokens are new to it."""
    model, other = saved_model(tmp_path / "model"), saved_model(tmp_path / "other")
    data = {"tokenizer": str(other), "special_tokens": ["<stop>"]}
    launcher, *ranks = counts(tmp_path, "train", configuration(tmp_path, {"path": str(model)}, data=data))
    files = ["model/tokenizer", "other/tokenizer", *(f"model/{name}" for name in MODEL_FILES)]
    assert often(launcher, files) == {}
    assert launcher["other/tokenizer"] == 1
    for rank in ranks:
        assert often(rank, files) == {}


def test_preferences_take_their_reference_into_the_data_that_is_there(tmp_path: Path) -> None:
    model = saved_model(tmp_path / "model")
    pairs = [{"prompt": "1 2", "chosen": f"3 {number}", "rejected": "4"} for number in range(8)]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    data = {"files": None, "dataset": str(tmp_path / "pairs.jsonl")}
    file = configuration(tmp_path, {"path": str(model)}, data=data, preference={"loss": "dpo"})
    _, *ranks = counts(tmp_path, "train", file)
    for rank in ranks:
        # The pairs are taken once more in their order, to find the reference.
        made = {name: count for name, count in rank.items() if "/" not in name}
        assert made == {"CausalLMFamily": 1, "PreferencePairs": 1}
        assert often(rank, ["run/inputs/train.tokens.npy"]) == {}


@pytest.mark.parametrize("command", ["check", "plan", pytest.param("profile", marks=pytest.mark.more)])
def test_a_command_reads_a_models_files_once(tmp_path: Path, command: str) -> None:
    """Of `profile` the launcher; its ranks read the configuration that it has written for them."""
    model = saved_model(tmp_path / "model")
    more = {
        "check": [],
        "plan": ["a100-dgx", "--seq-len=32", "--global-batch=8", f"--output={tmp_path / 'plan.yaml'}"],
        "profile": ["--budget=1", "--repeats=2", "--longest-slice=16", f"--output={tmp_path / 'profile.json'}"],
    }
    file = configuration(tmp_path, {"path": str(model)})
    launcher, *_ = counts(tmp_path, command, file, *more[command])
    assert launcher["model/config.json"] == 1
    assert often(launcher, [f"model/{name}" for name in MODEL_FILES]) == {}
    assert command == "check" or launcher["config.yaml"] == 1
