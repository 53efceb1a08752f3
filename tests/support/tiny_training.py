"""Trainings of a few seconds: their configuration and text, how they are run and resumed, and what they record."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM

from slipstream.train.data import TokenBatch
from support.forked import COMMAND, launch

TEXT = " ".join(f"{n} is {n * n % 97} more than {n % 13}." for n in range(3000))


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
        "pipeline": {"num_ranks": 2, "slices": 4, "schedule": "1f1b"},
        "runtime": {"self_check": False},
        "training": {"seq_len": 64, "batch_size": 4, "steps": steps},
        "checkpoint": {"every": save_every},
    }


def with_settings(values: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """A copy of a configuration with further settings, named as on the command line, or whole sections."""
    values = copy.deepcopy(values)
    for name, value in settings.items():
        *path, last = name.split(".")
        section = values
        for each in path:
            section = section.setdefault(each, {})
        section[last] = copy.deepcopy(value)
    return values


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run_training(
    num_processes: int, output: Path, settings: dict[str, Any] | Path, *more: str, script: Path = COMMAND, code: int = 0
) -> CompletedProcess[str]:
    """Trains by settings or their file, on ranks as torchrun starts them, only sooner; it must end with the code."""
    config = settings if isinstance(settings, Path) else output.with_suffix(".yaml")
    if not isinstance(settings, Path):
        config.write_text(yaml.safe_dump(settings))
    ended = launch(num_processes, script, "train", config, f"--training.output={output}", *more)
    assert ended.returncode == code, ended.stderr[-3000:]
    return ended


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """What a run has recorded of its steps."""
    return [line for line in metrics_of(folder) if "loss" in line]


def losses_of(folder: Path) -> list[float]:
    return [line["loss"] for line in steps_of(folder)]


def half_of(run: Path, folder: Path, step: int = 3) -> Path:
    """Makes a folder with what is left of a run that ended after its checkpoint of that step."""
    place = Path("checkpoints", f"step-{step:08}")
    shutil.copytree(run / place, folder / place)
    return folder


def exported_loss(folder: Path, batch: TokenBatch) -> float:
    """The mean loss of a run's exported model on each document of a batch alone, by transformers."""
    model, total, count = AutoModelForCausalLM.from_pretrained(folder / "model"), 0.0, 0
    for number, (row, labels) in enumerate(zip(batch.input_ids, batch.labels, strict=True)):
        documents = torch.zeros_like(row) if batch.document_ids is None else batch.document_ids[number]
        for document in range(int(documents.max()) + 1):
            ids, wanted = (each[documents == document][None] for each in (row, labels))
            if valid := int((wanted[0, 1:] != -100).sum()):
                with torch.no_grad():
                    total += float(model(input_ids=ids, labels=wanted).loss) * valid
                count += valid
    assert count == batch.num_predicted
    return total / count
