"""The shipped conversations are what their program makes, and the configuration of the guide learns to answer."""

from __future__ import annotations

import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from examples.chat.make_conversations import write

from support.paths import ROOT
from support.tiny_training import metrics_of

CHAT = ROOT / "examples" / "chat"


def test_the_conversations_are_what_the_program_makes() -> None:
    made = StringIO()
    write(made)
    assert (CHAT / "conversations.jsonl").read_text() == made.getvalue()
    assert len(made.getvalue().splitlines()) == 400


@pytest.mark.grid
def test_the_configuration_of_the_guide_learns_to_answer(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "slipstream", "train", "examples/chat/fine_tune.yaml"]
    result = subprocess.run(
        [*command, f"--training.output={tmp_path / 'chat'}"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "assistant:\n[[<answer>f</answer><|endoftext|>]]\nuser:\nshout fox" in result.stdout
    assert result.stdout.rstrip().endswith("user:\nshout owl\nassistant:\n<answer>OWL!</answer>")
    lines = metrics_of(tmp_path / "chat")
    assert [line["validation_loss"] for line in lines if "validation_loss" in line][-1] < 0.1
    assert "{%- generation -%}" in (tmp_path / "chat" / "model" / "chat_template.jinja").read_text()


@pytest.mark.grid
def test_the_demo_is_resumed_to_the_bit_and_answers_in_the_format_of_the_conversations(tmp_path: Path) -> None:
    command = [sys.executable, "examples/chat/demo.py", f"--runs={tmp_path}"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    assert "interrupted; all ranks have ended; the checkpoint of step" in result.stdout + result.stderr
    assert "is, to the bit, what the undisturbed run has left" in result.stdout
    assert re.search(r"user:\nshout owl\nassistant:\n<answer>[A-Z]+!</answer>\n\Z", result.stdout.rstrip() + "\n")
