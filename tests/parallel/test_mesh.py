"""What a mesh of four processes promises beside equal gradients: bytes, exports, dropout, limits, refusals."""

from __future__ import annotations

from pathlib import Path

from forked import launch

WORKER = Path(__file__).with_name("mesh_worker.py")
CASES = ["link_bytes", "export", "dropout", "accumulation", "ends_apart", "auto", "limit", "refusals", "low_precision"]


def test_a_mesh_keeps_its_promises() -> None:
    ended = launch(4, WORKER)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.split() == CASES
