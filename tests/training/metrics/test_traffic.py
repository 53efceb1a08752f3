"""Bytes by axis are those that a ring of two real processes sends."""

from __future__ import annotations

import json

from slipstream.parallel import RankGroup
from slipstream.train.metrics.reporter import Traffic
from support.forked import launch
from support.paths import WORKERS

WORKER = WORKERS / "training/traffic.py"


def test_collectives_send_what_a_ring_sends() -> None:
    """A layer of tensor parallelism sends 8 b s h (t-1)/t elements (PTD-P section 3.2), replicas (d-1)/d of theirs."""
    ended = launch(2, WORKER)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout)
    layer = 8 * (2 * 24 * 8) * (2 - 1) // 2 * 4
    replicas = (2 * 50 * 8 + 2 * 50 * 4) // 2
    step = {"pp": 7, "dp": replicas, "tp": layer}
    nothing = {"pp": 0, "dp": 0, "tp": 0}
    assert found["rank"] == [step, step, nothing]
    assert found["all"] == [{axis: 2 * size for axis, size in each.items()} for each in (step, step, nothing)]


def test_a_process_alone_sends_nothing() -> None:
    assert Traffic({"dp": RankGroup(), "tp": RankGroup()}).of_step(0) == {"pp": 0, "dp": 0, "tp": 0}
