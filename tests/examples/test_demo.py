"""The demo, as it is shipped, learns at least one nat more than the frequencies of tokens tell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.train.data import TokenisedText, unigram_entropy
from slipstream.train.run_folder import RunFolder
from support.paths import ROOT

DEMO = ROOT / "examples" / "demo.yaml"


@pytest.mark.more
def test_the_demo_learns_at_least_one_nat_more_than_how_often_tokens_occur(tmp_path: Path) -> None:
    output = RunFolder(tmp_path / "demo")
    command = [sys.executable, "-m", "slipstream", "train", str(DEMO), f"--training.output={output.path}"]
    result = subprocess.run([*command, "--training.single_process_steps=0"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    last = json.loads(output.metrics.read_text().splitlines()[-1])
    entropy = unigram_entropy(TokenisedText.load(output.inputs, "validation").tokens)
    assert last["validation_loss"] <= entropy - 1.0
