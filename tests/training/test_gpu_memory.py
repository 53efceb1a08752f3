"""A run says what PyTorch's allocator holds of each rank's GPU: at each step, once in words, and when it runs out."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import yaml

from slipstream.extras.run_page import write_run_page
from support.forked import launch, run_alone
from support.parameters import first_of
from support.paths import WORKERS
from support.tiny_training import TEXT, steps_of, tiny_training

WORKER = WORKERS / "training/gpu_memory.py"
BETTER = "put PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the command"


@pytest.fixture(autouse=True)
def no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    text, path, settings = tmp_path / "text.txt", tmp_path / "config.yaml", tiny_training(4, 4)
    text.write_text(TEXT)
    settings["data"] |= {"files": [str(text)]}
    settings["training"] |= {"output": str(tmp_path / "run"), "device": "cpu"}
    path.write_text(yaml.safe_dump(settings))
    return path


def said_in(ended: CompletedProcess[str]) -> str:
    return " ".join((ended.stdout + ended.stderr).split())


@pytest.mark.more
def test_metrics_page_and_log_of_a_run_whose_memory_is_fragmented(config: Path) -> None:
    ended = launch(2, WORKER, "fragmented", "train", config)
    assert ended.returncode == 0, ended.stderr[-3000:]
    first, *_, last = (record["gpu_memory"] for record in steps_of(config.parent / "run"))
    assert [rank["reserved"] for rank in first] == [11e9, 11e9]
    assert last[1] == {
        "allocated": 10_000_000_000,
        "reserved": 15_000_000_000,
        "between": 4_000_000_000,
        "retries": 3,
        "failures": 0,
    }
    said = said_in(ended)
    held = "tensors held 10.0 GB of the GPU at most, and PyTorch's allocator had reserved 15.0 GB"
    assert said.count(f"step 2: on rank 1 {held}: 5.00 GB in pieces") == 1
    assert said.count("step 2: on rank 1 the GPU's memory ran out 2 times") == 1  # the first was before the run
    assert said.count(BETTER) == 2
    page = write_run_page(config.parent / "run")[0].read_text()
    assert "<td>rank 1</td><td>10.0 GB</td><td>15.0 GB</td><td>4.00 GB</td><td>3</td><td>0</td>" in page


@pytest.mark.grid
def test_what_is_set_already_stays(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:False")
    said = said_in(launch(2, WORKER, "fragmented", "train", config, "--training.steps=2"))
    assert said.count("put PYTORCH_ALLOC_CONF=max_split_size_mb:64,expandable_segments:True before the command") == 2
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # which is read in place of the other
    said = said_in(launch(2, WORKER, "fragmented", "train", config, "--training.steps=2", "--training.overwrite=true"))
    assert "before the command" not in said
    assert "expandable_segments:True is set already" in said
    assert "--memory.recompute=full or more slices" in said


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")
@pytest.mark.parametrize("started_by", first_of(["itself", "torchrun"], 0))
def test_a_rank_that_runs_out(config: Path, started_by: str) -> None:
    """The last line of a command that starts its ranks itself also has the planner's account of each change."""
    command = WORKER, "out", "train", config
    ended = run_alone(*command) if started_by == "itself" else launch(2, *command)
    assert ended.returncode == 1
    said = said_in(ended)
    assert "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.00 GiB. In this process tensors" in said
    assert "reserved 15.0 GB, and it had given back all that was unused 3 times; 4.00 GB lay free" in said
    assert BETTER in said
    assert "PYTORCH_ALLOC_CONF" not in said  # PyTorch's own advice, in other words
    assert "--pipeline.slices=8 (now 4)" in said
    if started_by == "itself":
        assert "To need less memory, try in this order: " in ended.stderr.splitlines()[-1]
        assert BETTER in ended.stderr.splitlines()[-1]
