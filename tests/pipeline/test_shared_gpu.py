"""Processes that share one GPU train as the unsplit model, go on to the bit, and settle on an order by themselves.

Where there is none, processes on CPUs exchange messages and sums by the same way through memory.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import yaml

from slipstream.cost import load_profile
from support.forked import SHOWS_GPU, launch, slipstream_command
from support.parameters import first_of
from support.paths import WORKERS
from support.tiny_training import metrics_of, tiny_training

WORKER = WORKERS / "pipeline/shared_gpu.py"
STEPS, HALF = 6, 3
SETTINGS = tiny_training(STEPS, HALF)

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
    ),
]
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:])


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks see the first GPU alone."""
    monkeypatch.setenv(SHOWS_GPU, "1")
    if torch.cuda.device_count() > 1:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("num_processes", "cases"),
    # What two axes add to each by itself is no other message or sum: meshes of test_meshes.py have them.
    [*first_of([(2, ["pp", "state"]), (2, ["dp", "tp"])], 0), *first_of([(4, ["pp, tp", "pp, dp"])], 0, "grid")],
)
def test_gradients_in_float64(num_processes: int, cases: list[str], device: str) -> None:
    ended = launch(num_processes, WORKER, device, *cases)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.usefixtures("compiled_search")
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.grid), *DEVICES[1:]])
def test_auto(device: str) -> None:
    ended = launch(2, WORKER, device, "auto")
    assert ended.returncode == 0, ended.stderr[-3000:]


def train(device: str, folder: Path, *more: str) -> str:
    """What a run of `slipstream train` with local ranks, which it starts by itself, says."""
    text, config = folder.parent / "text.txt", folder.with_suffix(".yaml")
    text.write_text(" ".join(f"{n} is {n * n % 97} more than {n % 13}." for n in range(3000)))
    config.write_text(yaml.safe_dump(SETTINGS))
    places = [f"--training.output={folder}", f"--data.files=[{text}]", f"--training.device={device}"]
    ended = slipstream_command("train", config, *places, *more)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ("ranks share 1 GPU" in ended.stdout) == (device == "cuda")
    assert "import torch and transformers first" not in ended.stdout  # ranks are forked although there is a GPU
    return ended.stdout


def losses(folder: Path) -> list[float]:
    lines = metrics_of(folder)
    return [line["loss"] for line in lines if "loss" in line]


@on_a_gpu
@pytest.mark.parametrize("mesh", [[], ["--dp=2", "--parallel.shard=optimizer"]], ids=["pp", "pp, dp"])
def test_a_run_goes_on_to_the_bit(tmp_path: Path, mesh: list[str], device: str) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"
    train(device, whole, *mesh)
    first = f"checkpoints/step-{HALF:08}"
    shutil.copytree(whole / first, again / first)
    assert f"resumed after step {HALF}" in train(device, again, *mesh, "--checkpoint.resume=latest")
    assert losses(whole)[HALF:] == losses(again)
    models = [(run / "model" / "model.safetensors").read_bytes() for run in (whole, again)]
    assert models[0] == models[1]


@pytest.mark.usefixtures("compiled_search")
@on_a_gpu
def test_a_run_chooses_its_order(tmp_path: Path, device: str) -> None:
    automatic = [f"--pipeline.{name}=auto" for name in ("schedule", "slices", "partition")]
    train(device, tmp_path / "run", *automatic, "--training.steps=12")
    assert len(losses(tmp_path / "run")) == 12


@on_a_gpu
@pytest.mark.more
def test_a_profile(tmp_path: Path, device: str) -> None:
    """Two processes measure at the same time, and the link between them."""
    config, output = tmp_path / "config.yaml", tmp_path / "profile.json"
    training = SETTINGS["training"] | {"output": str(tmp_path / "run")}
    config.write_text(yaml.safe_dump(SETTINGS | {"data": {"corpus": "python-stdlib"}, "training": training}))
    options = [f"--output={output}", f"--device={device}", "--ranks=2", "--repeats=2", "--granularity=16"]
    ended = slipstream_command("profile", config, *options)
    assert ended.returncode == 0, ended.stderr[-3000:]
    link = load_profile(output).link
    assert link is not None
    assert "gloo" in link.backend
