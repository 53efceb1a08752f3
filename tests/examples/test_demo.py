"""The demos and the configurations of the guides learn what they are meant to, and are resumed to the bit."""

from __future__ import annotations

import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from examples.chat.make_conversations import write

from slipstream.checkpoint import CheckpointFolder, Manifest
from slipstream.train.data import TokenisedText, unigram_entropy
from slipstream.train.run_folder import RunFolder
from support.forked import launch, slipstream_command
from support.paths import ROOT, WORKERS
from support.tiny_training import metrics_of


def demo(output: RunFolder, *settings: str) -> dict[str, Any]:
    """The last figures of a run of the demo."""
    trained = slipstream_command("train", ROOT / "examples/demo.yaml", f"--training.output={output.path}", *settings)
    assert trained.returncode == 0, trained.stderr
    assert "class Reader:" in trained.stdout
    return [line for line in metrics_of(output.path) if "validation_loss" in line][-1]


@pytest.mark.more
def test_the_first_steps_of_the_demo(tmp_path: Path) -> None:
    steps = ["--training.steps=3", "--training.single_process_steps=1", "--optimizer.warmup_steps=1"]
    steps += ["--training.eval_batches=1", "--sample.max_new_tokens=8"]
    text = "--data.corpus=null", f"--data.files=[{ROOT / 'examples'}]", "--data.suffixes=[.py]"  # of little of it
    last = demo(RunFolder(tmp_path / "demo"), *steps, *text)
    assert last["step"] == 3
    assert last["validation_loss"] > 0


@pytest.mark.grid
def test_the_demo_learns_at_least_one_nat_more_than_how_often_tokens_occur(tmp_path: Path) -> None:
    output = RunFolder(tmp_path / "demo")
    last = demo(output, "--training.single_process_steps=0")
    entropy = unigram_entropy(TokenisedText.load(output.inputs, "validation").tokens)
    assert last["validation_loss"] <= entropy - 1.0


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


LOOP = WORKERS / "examples" / "dying_loop.py"


@pytest.mark.more
def test_a_loop_that_lost_a_rank_goes_on_to_the_bit(tmp_path: Path) -> None:
    undisturbed, folder = CheckpointFolder(tmp_path / "undisturbed"), CheckpointFolder(tmp_path / "killed")
    whole = launch(2, LOOP, undisturbed.path, "0")
    assert whole.returncode == 0, whole.stderr
    killed = launch(2, LOOP, folder.path, "8")
    assert killed.returncode == -9, killed.stderr
    assert folder.steps() == [5]
    again = launch(2, LOOP, folder.path, "0")
    assert again.returncode == 0, again.stderr
    assert whole.stdout.endswith(again.stdout)
    assert again.stdout != whole.stdout
    expected, found = (Manifest.read(each.complete(10)) for each in (undisturbed, folder))
    assert expected.files == found.files
