"""The demo trains and samples, and as it is shipped learns one nat more than the frequencies of tokens tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.train.data import TokenisedText, unigram_entropy
from slipstream.train.run_folder import RunFolder
from support.forked import slipstream_command
from support.paths import ROOT


def demo(output: RunFolder, *settings: str) -> dict[str, Any]:
    """The last figures of a run of the demo."""
    trained = slipstream_command("train", ROOT / "examples/demo.yaml", f"--training.output={output.path}", *settings)
    assert trained.returncode == 0, trained.stderr
    assert "class Reader:" in trained.stdout
    last: dict[str, Any] = json.loads(output.metrics.read_text().splitlines()[-1])
    return last


@pytest.mark.more
def test_the_first_steps_of_the_demo(tmp_path: Path) -> None:
    steps = ["--training.steps=12", "--training.single_process_steps=2", "--optimizer.warmup_steps=4"]
    last = demo(RunFolder(tmp_path / "demo"), *steps, "--training.eval_batches=4")
    assert last["step"] == 12
    assert last["validation_loss"] > 0


@pytest.mark.grid
def test_the_demo_learns_at_least_one_nat_more_than_how_often_tokens_occur(tmp_path: Path) -> None:
    output = RunFolder(tmp_path / "demo")
    last = demo(output, "--training.single_process_steps=0")
    entropy = unigram_entropy(TokenisedText.load(output.inputs, "validation").tokens)
    assert last["validation_loss"] <= entropy - 1.0
