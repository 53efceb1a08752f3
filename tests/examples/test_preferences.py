"""The shipped pairs are what their program makes, and the configuration of the guide learns to prefer."""

from __future__ import annotations

import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from examples.preferences.make_pairs import write

from support.paths import ROOT
from support.tiny_training import metrics_of

FOLDER = ROOT / "examples" / "preferences"


def test_the_pairs_are_what_the_program_makes() -> None:
    made = StringIO()
    write(made)
    assert (FOLDER / "pairs.jsonl").read_text() == made.getvalue()
    assert len(made.getvalue().splitlines()) == 200


@pytest.mark.grid
def test_the_configuration_of_the_guide_learns_to_prefer(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "slipstream", "train", "examples/preferences/dpo.yaml"]
    result = subprocess.run(
        [*command, f"--training.output={tmp_path / 'run'}"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stderr
    lines = metrics_of(tmp_path / "run")
    last = [line for line in lines if "validation_loss" in line][-1]
    assert last["validation_loss"] < 0.3
    assert last["rewards"]["accuracy"] > 0.95
