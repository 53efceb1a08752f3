"""The configuration of a training of a few seconds, on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def tiny_llama(**config: Any) -> dict[str, Any]:
    """The configuration of a Llama of four layers, with further settings."""
    return {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 300,
        "max_position_embeddings": 64,
    } | config


def tiny_training(steps: int, save_every: int, **config: Any) -> dict[str, Any]:
    """Settings of a training of that Llama, with further settings of the model."""
    return {
        "model": {"config": tiny_llama(**config)},
        "data": {"vocab_size": 300, "validation_fraction": 0},
        "pipeline": {"num_ranks": 2, "slices": 4},
        "runtime": {"self_check": False},
        "training": {"seq_len": 64, "batch_size": 4, "steps": steps},
        "checkpoint": {"every": save_every},
    }


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
