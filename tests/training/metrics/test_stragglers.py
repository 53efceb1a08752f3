"""A slow rank is named, with its host and phase; noise isn't taken for one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from slipstream.train.metrics.reporter import Stragglers

HOSTS = ["node0", "node0", "node1", "node1"]
REPLICAS = [[0, 2], [1, 3], [0, 2], [1, 3]]  # two pipelines of two stages
ALONE = [[0], [1], [2], [3]]


def lines_of(peers: list[list[int]], seconds: Callable[[int, int], float], steps: int) -> list[str]:
    watch = Stragglers(peers, HOSTS)
    return [
        each.line
        for step in range(1, steps + 1)
        for each in watch.add(
            step, [{"forward": 0.03, "backward": seconds(rank, step) - 0.03, "data": 0.0} for rank in range(4)]
        )
    ]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("peers", [REPLICAS, ALONE])
def test_no_false_alarm_in_a_thousand_noisy_steps(peers: list[list[int]], seed: int) -> None:
    """Stages differ by half; every step by a fifth; one in twenty of a rank takes up to three times as long, and a
    machine is now and then slower for eight steps."""
    noise = random.Random(seed)
    busy = {step: noise.random() < 0.004 for step in range(1, 1001)}

    def seconds(rank: int, step: int) -> float:
        long = noise.uniform(1, 3) if noise.random() < 0.05 else 1.0
        is_busy = any(busy.get(step - back, False) for back in range(8))
        return (0.08 + 0.04 * (rank % 2)) * noise.uniform(0.9, 1.1) * long * (1.5 if is_busy and rank < 2 else 1)

    assert lines_of(peers, seconds, 1000) == []


@pytest.mark.parametrize(("peers", "against"), [(REPLICAS, "its peers' (rank 0)"), (ALONE, "its own before")])
def test_a_slow_rank_is_named_once(peers: list[list[int]], against: str) -> None:
    noise = random.Random(0)

    def seconds(rank: int, step: int) -> float:
        return 0.1 * noise.uniform(0.9, 1.1) * (1.6 if rank == 2 and step > 200 else 1)

    (line,) = lines_of(peers, seconds, 400)
    assert "rank 2 (node1) is slow in backward: it computes for 0.1" in line
    assert line.endswith(against)
    assert 200 < int(line.removeprefix("step ").partition(":")[0]) < 245


def test_a_rank_that_has_caught_up_is_named_again_when_it_falls_back() -> None:
    lines = lines_of(REPLICAS, lambda rank, step: 0.2 if rank == 2 and step % 100 > 50 else 0.1, 200)
    assert len(lines) == 2
