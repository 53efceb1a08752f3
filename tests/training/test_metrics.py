from __future__ import annotations

import json
from pathlib import Path

from slipstream.training.metrics import MetricsFile, Validation, gather, peak_memory


def test_peak_memory_grows_with_what_is_held() -> None:
    before = peak_memory()
    held = bytearray(before + 64 * 2**20)
    held[:: 2**10] = b"x" * len(held[:: 2**10])
    assert peak_memory() >= before + 32 * 2**20


def test_lines_are_readable_at_once(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(Validation(3, 1.5, 4.5))
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line) == {"step": 3, "validation_loss": 1.5, "perplexity": 4.5}
    file.close()
    MetricsFile(None).write(Validation(3, 1.5, 4.5))


def test_without_a_process_group_there_is_one_rank() -> None:
    assert gather("mine") == ["mine"]
