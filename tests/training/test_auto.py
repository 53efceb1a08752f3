"""`slipstream train` with schedule "auto": what it says, and that a run goes on with what was found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml

import slipstream
from forked import launch
from slipstream.schedule import Op, Schedule
from slipstream.training.checkpoint.manifest import Manifest

COMMAND = Path(slipstream.__file__).with_name("__main__.py")
STEPS, SETTLED, TUNING = 12, 8, 4  # seven steps learn
SETTINGS: dict[str, Any] = {
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "vocab_size": 300,
            "max_position_embeddings": 64,
        }
    },
    "data": {"vocab_size": 300, "validation_fraction": 0},
    "pipeline": {
        "num_ranks": 2,
        "schedule": "auto",
        "slices": [8, 16, 24, 16],
        "num_microbatches": 2,
        "self_check": False,
    },
    "training": {"seq_len": 64, "batch_size": 2, "steps": STEPS},
    "checkpoint": {"every": 4, "keep": 9},
}


def train(folder: Path, *more: str) -> CompletedProcess[str]:
    """As torchrun starts its ranks, only sooner."""
    text = folder.with_suffix(".txt")
    text.write_text(" ".join(f"{n} is {n * n % 97} more than {n % 13}." for n in range(3000)))
    config = folder.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(SETTINGS))
    return launch(2, COMMAND, "train", str(config), f"--training.output={folder}", f"--data.files=[{text}]", *more)


def test_a_run_goes_on_with_what_was_found(tmp_path: Path) -> None:
    """With recomputation and offloading, which the order that was found gets again."""
    extras = ["--pipeline.recompute=full", "--pipeline.offload=0.5"]
    whole, again, anew = (tmp_path / name for name in ("whole", "again", "anew"))
    ended = train(whole, *extras)
    assert ended.returncode == 0, ended.stderr
    assert "auto tries orders or slices in the first steps" in ended.stdout
    assert "auto has settled on slices of" in ended.stdout
    found = Manifest.read(whole / "checkpoints" / f"step-{SETTLED:08}").facts["tuned"]
    ran = Schedule.parse((whole / "schedule.txt").read_text())
    assert found["slices"] == [8, 16, 24, 16]
    assert ran.ops >= {Op.R, Op.OFFLOAD}

    for folder, step in ((again, SETTLED), (anew, TUNING)):
        (folder / "checkpoints").mkdir(parents=True)
        name = f"step-{step:08}"
        shutil.copytree(whole / "checkpoints" / name, folder / "checkpoints" / name)
        ended = train(folder, *extras, "--checkpoint.resume=latest")
        assert ended.returncode == 0, ended.stderr
        assert ("auto tries" in ended.stdout) == (folder == anew)
    assert [line["step"] for line in steps(whole) if "trial" in line] == [1, 2, 3, 4, 5, 6, 7]
    assert (again / "schedule.txt").read_text() == (whole / "schedule.txt").read_text()
    assert losses(again) == losses(whole)[SETTLED:]
    assert losses(anew) == pytest.approx(losses(whole)[TUNING:], rel=1e-4)  # perhaps in another order


def steps(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if "loss" in line]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in steps(folder)]
