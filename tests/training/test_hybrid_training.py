"""A configuration whose layers carry states goes from text to an export that transformers loads, on two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM

from support.forked import COMMAND, launch
from support.tiny_training import metrics_of

LENGTH, WORDS = 64, 300
_SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "mlp", "attention", "mamba", "moe"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
}


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a run of four steps on one document that fills every sequence."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(" ".join(f"{n} is {n * n % 97} more than {n % 13}." for n in range(2000)))
    values = {
        "model": {"config": {"model_type": request.param} | _SIZES | CONFIGS[request.param]},
        "data": {"vocab_size": WORDS, "validation_fraction": 0.1, "files": [str(tmp_path / "text.txt")]},
        "pipeline": {"num_microbatches": 2, "schedule": "1f1b", "slices": [20, 1, 30, 13]},
        "optimizer": {"lr": 0.01, "eps": 0.01},  # so that rounding of small gradients doesn't decide updates
        "training": {"seq_len": LENGTH, "batch_size": 4, "steps": 4, "eval_every": 4, "output": "runs"},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def train(config: Path, name: str, *changes: str, processes: int = 2) -> Path:
    output = config.parent / name
    ended = launch(processes, COMMAND, "train", str(config), f"--training.output={output}", *changes)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return output


def read(output: Path, key: str) -> list[float]:
    found = metrics_of(output)
    return [line[key] for line in found if key in line]


def logits(output: Path, inputs: Tensor) -> Tensor:
    """Those of the model that the run exported, as transformers loads it."""
    model = AutoModelForCausalLM.from_pretrained(output / "model", dtype=torch.float32).eval()
    with torch.no_grad():
        found: Tensor = model(inputs).logits
    return found


@pytest.mark.grid
def test_from_a_configuration_to_an_export(config: Path) -> None:
    """In slices under two schedules, planned by itself, and whole in one process: the same model comes out."""
    whole = ["--pipeline.num_ranks=1", "--pipeline.schedule=gpipe", "--pipeline.slices=1"]
    split = ["--pipeline.schedule=zb-h1", "--memory.recompute=selective", "--runtime.self_check=false"]
    planned = ["--pipeline.schedule=auto", "--pipeline.slices=auto", "--runtime.self_check=false"]
    expected = train(config, "whole", *whole, processes=1)
    inputs = torch.arange(LENGTH)[None]
    runs = [train(config, "1f1b"), train(config, "zb-h1", *split), train(config, "auto", *planned)]
    for run in runs:
        assert read(run, "loss") == pytest.approx(read(expected, "loss"), rel=1e-5)
        # float32: the delta rule in other slices rounds otherwise, and four updates amplify that
        torch.testing.assert_close(logits(run, inputs), logits(expected, inputs), rtol=1e-2, atol=1e-2)
