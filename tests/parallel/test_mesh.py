"""A mesh of four processes keeps its promises: bytes sent, exports, dropout, memory limits, refusals."""

from __future__ import annotations

from support.forked import launch
from support.paths import WORKERS

WORKER = WORKERS / "parallel/mesh.py"
CASES = ["link_bytes", "export", "dropout", "accumulation", "ends_apart", "auto", "limit", "refusals", "low_precision"]


def test_a_mesh_keeps_its_promises() -> None:
    ended = launch(4, WORKER)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.split() == CASES
