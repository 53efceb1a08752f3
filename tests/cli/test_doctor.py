"""`slipstream doctor` says what this machine can do, and ends with 1 where a training would fail, and says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipstream.extras.doctor.examination import find_folder
from support.forked import COMMAND, SHOWS_GPU, run_alone, slipstream_command
from support.timeouts import LIMIT


def found(*arguments: str | Path, code: int = 0) -> dict[str, dict[str, str]]:
    """The findings of `slipstream doctor --json`, by topic."""
    ended = slipstream_command("doctor", "--json", *arguments)
    assert ended.returncode == code, ended.stdout + ended.stderr
    answer = json.loads(ended.stdout)
    assert answer["can_train"] == (code == 0)
    return {finding["topic"]: finding for finding in answer["findings"]}


def test_it_says_what_this_machine_can_do(tmp_path: Path) -> None:
    ended = slipstream_command("doctor", "--folder", tmp_path / "runs")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for expected in (f" usable of {os.cpu_count()}", "gloo", "compiler", f"torch {torch.__version__}", "FLOP/s"):
        assert expected in " ".join(ended.stdout.split()), ended.stdout
    assert "fails: " not in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_json_has_the_same_and_what_the_environment_says_of_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How their memory is given out, by the variable that PyTorch reads of the two, and one that it can't use."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho NVIDIA H100 80GB HBM3\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    findings = found("--folder", tmp_path)
    assert findings["gloo"] == {"topic": "gloo", "text": "available", "problem": None, "advice": None}
    products = [each["text"] for topic, each in findings.items() if topic.startswith("matrix product")]
    assert products
    assert all("FLOP/s" in text for text in products)
    assert "written at" in findings["folder"]["text"]
    assert findings["GPU allocator"]["text"] == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    if torch.version.cuda is None:
        assert findings["GPU"]["text"] == "nvidia-smi sees NVIDIA H100 80GB HBM3, but PyTorch can't use it"
        assert "pip install" in findings["GPU"]["advice"]


def test_a_folder_that_cant_be_written_to_is_a_failure(tmp_path: Path) -> None:
    finding = found("--folder", "/proc/runs", code=1)["folder"]  # not even root makes files there
    assert "couldn't be written to /proc" in finding["problem"]
    assert "training.output" in finding["problem"]
    (tmp_path / "runs").write_text("")
    (other,) = find_folder(tmp_path / "runs")
    assert other.text == f"{tmp_path / 'runs'}: {tmp_path / 'runs'} is a file"
    assert "--folder=FOLDER" in str(other.problem)


def test_a_torch_that_cant_be_imported_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "slipstream", "doctor", "--folder", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "fails: OSError: libcudart.so.12: cannot open shared object file; it is broken" in ended.stdout
    assert "/dev/shm" in ended.stdout  # the checks that don't need it have run
    assert "Traceback" not in ended.stdout + ended.stderr


# The command in a namespace whose loopback interface is down.
NO_LOOPBACK = """
import ctypes, sys
from slipstream.cli import main
NEW_NETWORK, NEW_USER = 0x40000000, 0x10000000
if ctypes.CDLL(None).unshare(NEW_USER | NEW_NETWORK) != 0:
    sys.exit("no namespace")
main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="has no namespaces")
def test_no_loopback_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(NO_LOOPBACK)
    ended = run_alone(tmp_path / "program.py", "doctor", "--folder", tmp_path)
    if ended.stderr == "no namespace\n":
        pytest.skip("needs network namespaces")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "no store answers at 127.0.0.1" in ended.stdout
    assert "ip link set lo up" in ended.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_it_names_the_gpu_and_its_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHOWS_GPU, "1")
    ended = run_alone(COMMAND, "doctor", "--json", "--folder", tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    findings = {each["topic"]: each["text"] for each in json.loads(ended.stdout)["findings"]}
    assert torch.cuda.get_device_name(0) in findings["GPU 0"]
    assert "TFLOP/s" in findings["matrix product, GPU 0"]
    assert "TFLOP/s forward and backward" in findings["FlashAttention-2"]
    assert "pinned memory" in findings["host to GPU 0"]
