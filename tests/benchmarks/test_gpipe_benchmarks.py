"""The benchmarks of GPipe's tables balance layers optimally, add up, and are the numbers on their page."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch

from slipstream import Layers, Memory, Pipeline, partition_layers
from support.paths import ROOT


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no package that is installed."""
    monkeypatch.syspath_prepend(str(ROOT))


def recorded(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"gpipe_{name}.json").read_text())


def random_costs(draw: random.Random, most_layers: int) -> tuple[list[float], list[float], int]:
    """Forward and backward seconds of some layers, and a number of stages."""
    num_layers = draw.randint(4, most_layers)
    forward = [draw.uniform(0.2, 2) for _ in range(num_layers)]
    return forward, [cost * draw.uniform(1, 3) for cost in forward], draw.randint(2, min(8, num_layers))


def slowest(costs: Sequence[float], counts: Sequence[int]) -> float:
    ends = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return max(sum(costs[a:b]) for a, b in pairwise(ends))


def test_exact_balance_is_never_worse_than_the_heuristics_on_100_random_models() -> None:
    from benchmarks.gpipe.balance import SPLITS, flush_seconds

    draw, gains = random.Random(3), []
    for _ in range(100):
        forward, backward, num_stages = random_costs(draw, 24)
        both = [f + b for f, b in zip(forward, backward, strict=True)]
        found = {name: split(forward, backward, num_stages) for name, split in SPLITS.items()}
        assert all(sum(counts) == len(both) and min(counts) >= 1 for counts in found.values())
        best = slowest(both, found["exact"])
        assert all(best <= slowest(both, counts) * (1 + 1e-12) for counts in found.values())
        gains.append(slowest(both, found["variance, greedy"]) / best)
        flush = {name: flush_seconds(forward, backward, counts) for name, counts in found.items()}
        assert min(flush.values()) == flush["exact, for a flush"]
    assert sum(gains) / len(gains) > 1.02  # they are worth beating


def test_balance_for_a_flush_against_every_partition() -> None:
    from benchmarks.gpipe.balance import flush_seconds, for_flush

    draw, num_better = random.Random(5), 0
    for _ in range(60):
        forward, backward, num_stages = random_costs(draw, 9)
        cuts = combinations(range(1, len(forward)), num_stages - 1)
        every = [[b - a for a, b in pairwise((0, *cut, len(forward)))] for cut in cuts]
        found = flush_seconds(forward, backward, for_flush(forward, backward, num_stages))
        assert found == pytest.approx(min(flush_seconds(forward, backward, counts) for counts in every))
        balanced = partition_layers([f + b for f, b in zip(forward, backward, strict=True)], num_stages)
        num_better += found < flush_seconds(forward, backward, balanced)
    assert num_better >= 3


def test_cells_stay_whole() -> None:
    from benchmarks.gpipe.balance import between_cells

    cells = ["stem", *["cell0"] * 3, *["cell1"] * 2, "classify"]
    assert between_cells(cells)([1, 1, 1, 1, 4, 4, 1], 2) == [4, 3]
    assert partition_layers([1, 1, 1, 1, 4, 4, 1], 2) == [5, 2]


def test_equal_stages_take_the_bubbles_bound() -> None:
    """Normalised over K=2 and M=1, equal layers give K M / (M + K - 1) where nothing is recomputed."""
    from benchmarks.gpipe.layer_times import LayerTime, Times
    from benchmarks.gpipe.stage_cost import EARLY, LATE, NONE, Link, step_seconds

    times = Times([LayerTime(str(i), 1.0, 2.0, 3, 8, 1) for i in range(8)], [])
    for recompute in (NONE, LATE):
        first = step_seconds(times, [4, 4], Link(), 1, recompute)
        assert first / step_seconds(times, [1] * 8, Link(), 32, recompute) * 32 == pytest.approx(8 * 32 / 39)
    assert step_seconds(times, [1] * 8, Link(), 32, EARLY) < step_seconds(times, [1] * 8, Link(), 32, LATE)
    assert step_seconds(times, [4, 4], Link(), 1, EARLY) == step_seconds(times, [4, 4], Link(), 1, NONE)
    late = step_seconds(times, [4, 4], Link(latency=0.5, seconds_per_byte=0.25), 1, NONE)
    assert late == 24 + 2 * (0.5 + 8 * 0.25)


def test_a_step_is_the_sum_of_its_parts() -> None:
    from benchmarks.gpipe.breakdown import parts
    from benchmarks.gpipe.models import amoebanet

    case = amoebanet(3, 16, 64)
    pipe = Pipeline(
        case.model(), "gpipe", 4, num_ranks=2, memory=Memory(recompute="stage"), layers=Layers(example=case.batch(1)[0])
    )
    pipe.step(*case.batch(4))
    timeline = pipe.timeline()
    found = parts(timeline, pipe.layout.training, step=timeline.makespan + 0.25, update=0.5)
    assert sum(found.values()) == pytest.approx(timeline.makespan + 0.75)
    assert found["recomputation"] > 0
    assert found["weight update"] == 0.5


def test_every_layer_is_measured() -> None:
    from benchmarks.gpipe.layer_times import measure
    from benchmarks.gpipe.models import transformer

    case = transformer(3, 16, 2, 50, 8)
    times = measure(case.model(), *case.batch(2), case.loss, repeats=1)
    assert len(times.layers) == 2 + 2 * 3
    assert min(times.costs) > 0
    assert times.layers[1].flops == times.layers[3].flops != times.layers[2].flops
    assert times.layers[1].output_bytes == 2 * 8 * 16 * 4
    deeper = times.deepened(5)
    assert len(deeper.layers) == 2 + 2 * 5
    assert deeper.layers[7].forward == times.layers[1].forward


def test_counted_memory_leaves_out_a_trace() -> None:
    """What a run on fake tensors makes has no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from slipstream.profile.stage_bench import LiveMemory

    with LiveMemory() as memory:
        with FakeTensorMode():
            torch.zeros(1000)
        assert memory.peak == 0
        kept = torch.zeros(1000)
        assert memory.peak == kept.nbytes


def test_the_fit_finds_what_it_is_made_from() -> None:
    from benchmarks.gpipe.memory_fit import TERMS, fit

    rows = []
    for recompute, terms in TERMS.items():
        for k in (2, 4):
            for m in (1, 4, 16):
                for layers in (8, 32):
                    row = {"K": k, "M": m, "L": layers, "N": 64, "recompute": recompute}
                    size = sum((i + 1) * 1000 * term(row) for i, term in enumerate(terms.values()))
                    rows.append(row | {"activations": [size, size / 2]})
    for recompute, found in fit(rows).items():
        assert list(found["bytes"].values()) == pytest.approx([1000 * (i + 1) for i in range(len(TERMS[recompute]))])
        assert found["worst error"] < 1e-9


def test_the_largest_that_fits() -> None:
    from benchmarks.gpipe.memory import largest

    for limit in (0, 1, 3, 4, 5, 17):
        assert largest(lambda size, limit=limit: size <= limit, guess=4) == limit


def test_an_interval_of_ratios() -> None:
    from benchmarks.gpipe.peers import interval

    mean, low, high = interval([1.0, 1.0, 1.0, 1.0])
    assert (mean, low, high) == (1, 1, 1)
    draw = random.Random(1)
    values = [math.exp(draw.gauss(0.1, 0.02)) for _ in range(40)]
    mean, low, high = interval(values)
    assert low < mean < high
    assert low < math.exp(0.1) < high
    assert high / low == pytest.approx(math.exp(2 * 1.96 * 0.02 / math.sqrt(40)), rel=0.01)


def test_the_targets_are_reached() -> None:
    """Of what is recorded: normalised throughput of Table 2, simulated from measured layers."""
    rows = {
        (row["model"], row["K"]): row["normalised"]
        for row in recorded("throughput")["table 2"]
        if row["M"] == 32 and row["recompute"] == "none" and row["split"] == "exact, for a flush"
    }
    assert rows["Transformer-48", 4] >= 3.4
    assert rows["Transformer-48", 8] >= 6.0
    assert rows["AmoebaNet-D(18 256)", 8] > 3.48


def test_table_2_can_be_had_again_from_the_recorded_layers() -> None:
    from benchmarks.gpipe.layer_times import LayerTime, Times
    from benchmarks.gpipe.stage_cost import Link
    from benchmarks.gpipe.throughput import throughput_rows

    report = recorded("throughput")
    seconds = report["layers"]["Transformer-48"]
    pairs = zip(seconds["forward"], seconds["backward"], strict=True)
    times = Times([LayerTime(str(i), f, b, 0, 0, 0) for i, (f, b) in enumerate(pairs)], [])
    rows = [row for row in report["table 2"] if row["model"] == "Transformer-48"]
    for found, row in zip(throughput_rows("Transformer-48", times, Link(), (2, 1)), rows, strict=True):
        assert found.pop("normalised") == pytest.approx(row.pop("normalised"))
        assert found.pop("over one") == pytest.approx(row.pop("over one"))
        assert found == row


def test_every_largest_model_is_the_largest() -> None:
    from benchmarks.gpipe.page import families

    assert families()
    for report in families().values():
        for row in report["rows"]:
            assert max(row["peak bytes"]) <= 256 * 2**20 < max(row["peak bytes of the next"])


def test_the_page_has_the_recorded_tables() -> None:
    from benchmarks.gpipe.page import MARK, PAGE, tables

    text = PAGE.read_text(encoding="utf-8")
    for name, content in tables().items():
        assert MARK.format(name) + content in text
