"""A run that loses processes goes on with what is left, as if it had been stopped and resumed by hand on its meshes."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from slipstream.train.run_folder import RunFolder
from support.forked import COMMAND, ForkedProgram, slipstream_command
from support.timeouts import LIMIT
from support.tiny_training import tiny_training

STEPS = 16


def write_config(folder: Path, **training: Any) -> Path:
    """Two stages in two replicas, with rows of one microbatch each; every second step is saved."""
    folder.mkdir()
    text = folder / "text.txt"
    text.write_text(" ".join(f"{n} is {n * n % 97} more than {n % 13}." for n in range(2000)))
    values = tiny_training(STEPS, 2)
    values["data"]["files"] = [str(text)]
    values["parallel"] = {"data": 2}
    values["pipeline"]["num_microbatches"] = 2
    values["training"] |= {"output": str(folder / "run"), "min_ranks": 2, **training}
    values["checkpoint"]["keep_every"] = 2
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def lines_of(output: RunFolder) -> list[dict[str, Any]]:
    """The lines of the metrics that are whole."""
    text = output.metrics.read_bytes() if output.metrics.exists() else b""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"}\n")]


def steps_of(output: RunFolder) -> list[int]:
    return [line["step"] for line in lines_of(output) if "loss" in line]


def wait_for(output: RunFolder, step: int, process: ForkedProgram) -> None:
    deadline = time.monotonic() + LIMIT
    while max(steps_of(output), default=0) < step:
        assert process.returncode is None, process.communicate()
        assert time.monotonic() < deadline, f"step {step} didn't come"
        time.sleep(0.02)


def wait_for_lost(output: RunFolder, process: ForkedProgram) -> None:
    deadline = time.monotonic() + LIMIT
    while not output.lost.exists():
        assert process.returncode is None, process.communicate()
        assert time.monotonic() < deadline, "nothing is lost"
        time.sleep(0.02)


def rank_of(process: ForkedProgram, rank: int) -> psutil.Process:
    return next(each for each in psutil.Process(process.pid).children(recursive=True) if each.name() == f"rank {rank}")


def resumptions(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"resumed after step (\d+)", text)]


def weights(output: RunFolder) -> bytes:
    return (output.model / "model.safetensors").read_bytes()


def by_hand(config: Path, output: RunFolder, phases: list[tuple[int, list[str]]]) -> bytes:
    """The weights of a run that was stopped after some steps and resumed, each time with other settings."""
    shutil.rmtree(output.path, ignore_errors=True)
    for number, (step, settings) in enumerate(phases):
        resumed = ["--checkpoint.every=1", "--checkpoint.keep_every=1"]  # wherever the other one has been stopped
        resumed += [f"--checkpoint.resume={step}"] if number else []
        for later in output.checkpoints.glob("step-*") if number else ():
            if int(later.name.removeprefix("step-")) > step:
                shutil.rmtree(later)
        ended = slipstream_command("train", config, f"--training.output={output.path}", *resumed, *settings)
        assert ended.returncode == 0, ended.stderr
    return weights(output)


HALF = ["--pp=2", "--dp=1", "--pipeline.num_microbatches=4"]


@pytest.mark.more
def test_a_process_is_lost_and_comes_back(tmp_path: Path) -> None:
    """Under our own launcher."""
    config = write_config(tmp_path / "run")
    output = RunFolder(config.parent / "run")
    process = ForkedProgram(tmp_path, COMMAND, "train", config)
    try:
        wait_for(output, 5, process)
        rank_of(process, 1).kill()
        wait_for_lost(output, process)
        wait_for(output, 9, process)
        (output.lost / "1").unlink()
        text, errors = process.communicate()
    finally:
        if process.returncode is None:
            os.kill(process.pid, 2)
            process.communicate()
    assert process.returncode == 0, errors
    assert "with 2 of 4 processes as --pp=2 --dp=1 --tp=1; process 3 is without work; process 1 is lost" in text
    first, second = resumptions(text)
    assert first in (2, 4, 6)  # a checkpoint may not have been complete
    assert second >= 9
    assert steps_of(output) == list(range(1, STEPS + 1))
    expected = by_hand(config, RunFolder(tmp_path / "by_hand"), [(0, []), (first, HALF), (second, [])])
    assert weights(output) == expected
