"""A run that has planned itself says which cut would make up for a rank that has become slow, or that none would."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.planner.joint import JointPlan
from slipstream.schedule import make_schedule
from slipstream.train.config.run_config import parse_config
from slipstream.train.metrics.reporter import cut_advice
from support.forked import COMMAND, launch
from support.paths import WORKERS
from support.plain_costs import PlainCosts
from support.tiny_training import TEXT, metrics_of, tiny_llama

MODEL = tiny_llama(hidden_size=128, intermediate_size=512, num_hidden_layers=8, max_position_embeddings=256)


@pytest.mark.grid
def test_a_rank_that_has_become_slow(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 3)
    settings: dict[str, Any] = {
        "model": {"config": MODEL},
        "data": {"files": [str(text)], "vocab_size": 300, "validation_fraction": 0},
        "pipeline": {"num_ranks": 2, "num_microbatches": 2},
        "runtime": {"self_check": False},
        "training": {"output": str(tmp_path / "run"), "seq_len": 256, "batch_size": 4, "steps": 24},
        "checkpoint": {"every": 24},
    }
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    ended = launch(2, WORKERS / "training/slow_rank.py", "train", config)
    assert ended.returncode == 0, ended.stderr
    records = metrics_of(tmp_path / "run")
    said = [line for record in records for line in record.get("stragglers") or []]
    slow = next(line for line in said if line.startswith("rank 1 computes"))
    found = re.fullmatch(
        r"rank 1 computes ([\d.]+) times as slowly: the cut ([\d.,]+) would take (0\.\d\d) of the step's time; "
        r"to go on with it from a checkpoint, type (--checkpoint.resume=latest .* --pipeline.partition=\[\2\])",
        slow,
    )
    assert found, said
    assert float(found[1]) >= 1.3
    assert sum(map(float, found[2].split(","))) == 8
    assert "rank 1 computes" in ended.stdout
    resumed = launch(2, COMMAND, "train", config, *found[4].split(), "--training.steps=25")
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed after step 24" in resumed.stdout


@pytest.mark.parametrize(("slowness", "end"), [(1.01, "no other cut would save 3% of the step's time"), (1.6, "]")])
def test_a_cut_is_named_only_where_it_saves_time(tmp_path: Path, slowness: float, end: str) -> None:
    schedule, slices = make_schedule("1f1b", 2, 2, 3), (48, 32, 48)
    values: dict[str, Any] = {"model": {"config": MODEL}, "data": {"files": ["text.txt"]}}
    config = parse_config(values | {"training": {"output": str(tmp_path), "steps": 1, "seq_len": 128}})
    assert cut_advice(config, None, 1, 1, slowness) == []  # no plan, no costs
    plan = JointPlan(schedule, (6, 6), slices, seconds=1.0, bound=1.0, ideal=1.0, costs=PlainCosts())
    (line,) = cut_advice(config, plan, 1, 1, slowness)
    assert line.startswith(f"rank 1 computes {slowness:.2g} times as slowly: ")
    assert line.endswith(end)
