"""A training on documents of their own lengths, from text to an exported model, resumed and on replicas."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from slipstream.errors import SlipstreamError
from slipstream.schedule import Schedule
from slipstream.training.config.config_file import parse_config
from slipstream.training.data import TokenisedText, WholeDocuments
from support.forked import COMMAND, launch

SETTINGS: dict[str, Any] = {
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "vocab_size": 300,
            "max_position_embeddings": 64,
            "initializer_range": 0.1,
        }
    },
    "data": {"packing": "none", "vocab_size": 300, "validation_fraction": 0.2},
    "pipeline": {"num_ranks": 2, "slices": 3, "num_microbatches": 2},
    "runtime": {"self_check": False},
    "optimizer": {"lr": 0.01},
    "training": {"seq_len": 64, "batch_size": 4, "steps": 6, "eval_every": 6},
    "checkpoint": {"every": 3},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 5 to 150 tokens."""
    folder = tmp_path_factory.mktemp("text")
    for index in range(40):
        (folder / f"{index:02}.txt").write_text(f"{index}: the quick brown fox jumps over it. " * (1 + index**2 // 100))
    return folder


def train(
    num_processes: int, output: Path, text: Path, *more: str, settings: dict[str, Any] = SETTINGS
) -> CompletedProcess[str]:
    config = output.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(settings))
    places = [f"--training.output={output}", f"--data.files=[{text}]"]
    ended = launch(num_processes, COMMAND, "train", str(config), *places, *more)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended


def steps_of(output: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    output = tmp_path_factory.mktemp("finished") / "run"
    train(2, output, text)
    return output


def test_steps_differ_in_their_tokens(finished: Path) -> None:
    steps = steps_of(finished)
    sequences = WholeDocuments(TokenisedText.load(finished / "inputs", "train"), 64, 0)
    tokens = [sum(sequences.lengths(4 * step, 4)) for step in range(6)]
    assert [step["tokens"] for step in steps] == tokens
    assert len(set(tokens)) > 3
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    for step in steps:
        assert step["tokens_per_second"] == pytest.approx(step["tokens"] / step["step_seconds"])
    flops = [step["model_flops"] / step["tokens"] for step in steps]
    assert max(flops) < 1.5 * min(flops)


def test_the_export_has_the_loss_that_was_measured(finished: Path) -> None:
    """On the held-out documents, each alone, by transformers."""
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    (measured,) = [line["validation_loss"] for line in lines if "validation_loss" in line]
    model = AutoModelForCausalLM.from_pretrained(finished / "model")
    sequences = WholeDocuments(TokenisedText.load(finished / "inputs", "validation"), 64, None)
    total, count = 0.0, 0
    for row in sequences.batch(0, sequences.num_sequences // 4 * 4).input_ids:
        with torch.no_grad():
            loss = model(input_ids=row[None], labels=row[None]).loss
        total, count = total + float(loss) * (len(row) - 1), count + len(row) - 1
    assert measured == pytest.approx(total / count, rel=1e-4)


def test_a_resumed_run_is_the_same_to_the_bit(finished: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "half"
    (output / "checkpoints").mkdir(parents=True)
    shutil.copytree(finished / "checkpoints" / "step-00000003", output / "checkpoints" / "step-00000003")
    train(2, output, text, "--checkpoint.resume=latest")
    wanted, found = steps_of(finished)[3:], steps_of(output)
    for name in ("step", "loss", "grad_norm", "tokens"):
        assert [step[name] for step in found] == [step[name] for step in wanted]


@pytest.mark.more
@pytest.mark.parametrize(
    ("num_processes", "changes"),
    [
        (1, ["--pp=1"]),
        (4, ["--dp=2"]),
        (4, ["--tp=2"]),
        (2, ["--pipeline.schedule=zb-v", "--pipeline.stages_per_rank=2"]),
    ],
    ids=["one process", "two replicas", "two tensor ranks", "zb-v"],
)
def test_other_meshes_have_the_same_losses(
    num_processes: int, changes: list[str], finished: Path, text: Path, tmp_path: Path
) -> None:
    train(num_processes, tmp_path / "run", text, *changes)
    for step, wanted in zip(steps_of(tmp_path / "run"), steps_of(finished), strict=True):
        assert step["loss"] == pytest.approx(wanted["loss"], rel=1e-3)
        assert step["tokens"] == wanted["tokens"]
        assert math.isfinite(step["grad_norm"])


@pytest.mark.more
def test_where_nothing_is_named_each_step_is_planned(text: Path, tmp_path: Path) -> None:
    """From the model's multiplications, so that a resumed run plans the same, to the bit."""
    named = SETTINGS | {"pipeline": {"num_ranks": 2}}
    train(2, tmp_path / "run", text, settings=named)
    schedules = Schedule.parse((tmp_path / "run" / "schedule.txt").read_text())
    assert schedules.num_microbatches > 1
    (tmp_path / "half" / "checkpoints").mkdir(parents=True)
    shutil.copytree(tmp_path / "run/checkpoints/step-00000003", tmp_path / "half/checkpoints/step-00000003")
    train(2, tmp_path / "half", text, "--checkpoint.resume=latest", settings=named)
    wanted, found = steps_of(tmp_path / "run"), steps_of(tmp_path / "half")
    assert not any("trial" in step for step in wanted)
    for name in ("step", "loss", "grad_norm", "tokens"):
        assert [step[name] for step in found] == [step[name] for step in wanted[3:]]


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        (
            "pipeline",
            {"slices": [32, 32]},
            "pipeline.slices=[32, 32] with data.packing=none: it is for sequences of one",
        ),
        ("pipeline", {"microbatches": [[4, [64]]]}, "pipeline.microbatches with data.packing=none"),
        ("memory", {"num_flushes": 2}, "memory.num_flushes=2 with data.packing=none"),
        ("training", {"single_process_steps": 3}, "training.single_process_steps=3 with data.packing=none"),
    ],
)
def test_settings_for_one_length_are_refused(section: str, values: dict[str, Any], words: str) -> None:
    plain = {name: each for name, each in SETTINGS["pipeline"].items() if name != "slices"} | {"num_microbatches": 2}
    if "microbatches" in values:
        plain = {"num_ranks": 2}
    given = {**SETTINGS, "pipeline": plain, "training": {**SETTINGS["training"], "output": "out"}}
    given["data"] = {**SETTINGS["data"], "corpus": "python-stdlib"}
    with pytest.raises(SlipstreamError) as problem:
        parse_config(given | {section: {**given.get(section, {}), **values}})
    assert words in str(problem.value)
