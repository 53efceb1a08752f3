"""The command as users run it: its own process, its exit codes, its last lines."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slipstream.schedule import one_f_one_b


def slipstream(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slipstream", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        result = slipstream("--help")
        seconds.append(time.perf_counter() - started)
        assert result.returncode == 0
        assert "train" in result.stdout
    assert min(seconds) < 0.5
    loaded = "import sys, slipstream.cli; print({'torch', 'transformers', 'numpy', 'pydantic'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", loaded], text=True).strip() == "set()"


@pytest.mark.parametrize("command", ["train", "timeline", "check"])
def test_every_command_explains_itself(command: str) -> None:
    result = slipstream(command, "--help")
    assert result.returncode == 0
    assert "Usage" in result.stdout


def test_bad_input_ends_with_its_message_and_code_2(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "model: {config: {model_type: llama}}\n"
        "data: {corpus: python-stdlib}\n"
        f"training: {{output: {tmp_path / 'output'}, steps: 1, seq_len: 8}}\n"
    )
    result = slipstream("train", config, "--training.stepz=3")
    assert result.returncode == 2
    assert result.stderr.splitlines() == ["error: unknown key training.stepz; did you mean training.steps?"]
    result = slipstream("train", config, "--pipeline.num_stages=64", "--pipeline.slices=2")
    assert result.returncode == 2
    assert result.stderr.startswith("error: pipeline.num_stages=64 is more than the model's 32 layers")
    assert not (tmp_path / "output").exists()


def test_a_timeline_of_a_named_schedule() -> None:
    result = slipstream("timeline", "gpipe", "--stages=2", "--slices=3", "--backward=1")
    assert result.stdout.splitlines() == [
        "rank 0  F0.0 F0.1 F0.2           B0.2 B0.1 B0.0",
        "rank 1       F0.0 F0.1 F0.2 B0.2 B0.1 B0.0",
        "gpipe: 8 s, 25.0% idle",
    ]


@pytest.mark.parametrize("suffix", [".png", ".svg", ".json"])
def test_a_timeline_of_a_schedule_file_as_a_file(tmp_path: Path, suffix: str) -> None:
    plan = tmp_path / "schedule.txt"
    plan.write_text(str(one_f_one_b(3, 2, 2)))
    output = tmp_path / f"timeline{suffix}"
    result = slipstream("timeline", plan, "--output", output)
    assert result.returncode == 0, result.stderr
    assert output.stat().st_size > 1000
    if suffix == ".json":
        assert json.loads(output.read_text())["traceEvents"]


def test_a_timeline_of_nothing_known(tmp_path: Path) -> None:
    result = slipstream("timeline", "zigzag")
    assert result.returncode == 2
    assert result.stderr.strip() == "error: there is no schedule 'zigzag'; choose gpipe, 1f1b, or name a file"
    (tmp_path / "schedule.txt").write_text("nonsense")
    assert slipstream("timeline", tmp_path / "schedule.txt").returncode == 2
    assert "must end in .png, .svg or .json" in slipstream("timeline", "gpipe", "--output=x.pdf").stderr


def test_check_tells_whether_a_model_can_be_sliced(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    result = slipstream("check", tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("llama: sliced and unsliced agree")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bloom"}))
    result = slipstream("check", tmp_path)
    assert result.returncode == 2
    assert "model_type 'bloom' can't be trained in token slices" in result.stderr
