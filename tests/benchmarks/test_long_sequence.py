"""Long sequences beside transformers: what is sampled of a process, what is refused, and toys of both programs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from benchmarks.gpu_layers import TOY
from benchmarks.records import TRIAL
from transformers import LlamaConfig

from benchmarks import gpu_context, long_sequence, long_sequence_page
from support.timeouts import SOON, wait_until

HOLDS = "import sys; held = bytearray(b'1') * 100_000_000; print(flush=True); sys.stdin.read()"


@pytest.mark.parametrize(("limit", "is_ended"), [(1e9, False), (5e7, True)])
def test_a_process_is_sampled_from_outside_and_ended_at_a_limit(limit: float, is_ended: bool) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process, long_sequence.sampled(process.pid, limit) as memory:
        if is_ended:
            assert process.wait(SOON) == -9
        else:
            wait_until(lambda: memory.peak > 1e8, "nothing is sampled", SOON)
            process.kill()
        assert memory.was_killed == is_ended
    assert 1e8 * (not is_ended) < memory.peak < 2e8
    assert long_sequence.resident_bytes(process.pid) == 0


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="has no file system in memory")
def test_files_in_memory_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["long_sequence"])
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    with pytest.raises(SystemExit):
        long_sequence.main()
    said = capsys.readouterr().err
    assert "/dev/shm is a tmpfs, whose files take memory. Give a folder on a disk: TMPDIR=/var/tmp python -m" in said


def test_what_did_not_run_is_in_the_table() -> None:
    rows = [
        {"contender": "transformers", "tokens": 8192, "seconds": 1.25, "bytes": 2_000_000_000},
        {"contender": "transformers", "tokens": 16384, "not run": "more than 3,000 MB"},
        {"contender": long_sequence_page.HOST, "tokens": 16384, "seconds": 2.0, "bytes": 31_000_000},
    ]
    assert long_sequence_page.table({"rows": rows}).splitlines() == [
        "| tokens | 8,192 | 16,384 |",
        "| --- | --- | --- |",
        "| transformers | 2,000 MB, 1.2 s | more than 3,000 MB |",
        "| Slipstream, context on the host |  | 31 MB, 2.0 s |",
    ]


@pytest.mark.more
def test_the_toy_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of transformers' ways one alone, as each contender is a new process."""
    monkeypatch.setenv(TRIAL, str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["long_sequence", "--repeats=1"])
    monkeypatch.setattr(long_sequence, "THEIRS", {"transformers, checkpointing": (True,)})
    monkeypatch.setattr(long_sequence, "TOY", long_sequence.Sizes((128,), (256,), (128, 256), 64))
    long_sequence.main()
    record = json.loads((tmp_path / "long_sequence.json").read_text())
    assert [(row["contender"], row["tokens"]) for row in record["rows"]] == [
        ("transformers, checkpointing", 128),
        ("Slipstream", 128),
        ("Slipstream, context on the host", 128),
        ("Slipstream, context on the host", 256),
    ]
    assert all(row["before"] > 1e8 and row["seconds"] > 0 for row in record["rows"])
    assert len(record["targets"]) == 2
    assert (tmp_path / long_sequence_page.PICTURE.name).stat().st_size > 1000


def test_the_toy_of_the_gpus_program_runs() -> None:
    config = LlamaConfig(**TOY, num_hidden_layers=2, max_position_embeddings=256)
    rows = gpu_context.measure_all(config, torch.device("cpu"), 128, 256, 32)
    assert [(row["tokens"], "share of copies hidden" in row) for row in rows] == [
        (128, False),
        (128, False),
        (128, True),
        (256, True),
    ]
    losses = [row["loss"] for row in rows[:3]]
    assert max(losses) - min(losses) < 1e-3
