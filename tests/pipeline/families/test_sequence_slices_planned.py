"""Token slices of an nn.Sequential are simulated with layers that can't be sliced, as they run."""

from __future__ import annotations

import re
from functools import cache
from itertools import accumulate

import torch
from examples.gpipe.transformer import transformer

from slipstream import CutTokens, make_schedule, partition_layers, schedule_costs, simulate
from slipstream.pipeline.families.layer_sequence import counted_costs
from slipstream.schedule import Op
from slipstream.sequential import BatchSlice, ShapeTracer, flatten_layers
from support.paths import ROOT

PAGE = ROOT / "docs" / "benchmarks.md"
RANKS, TOKENS = 4, 512
COUNTS, MICROBATCHES = (1, 2, 4, 8, 16, 32), (1, 2, 4, 16)


@cache
def counted() -> tuple[list[float], int]:
    """Of T(6, 8192, 16) with one row of 512 source and 512 target tokens, in units of the whole forward."""
    with torch.device("meta"):
        layers = flatten_layers(transformer(6, 8192, 16))
    tracer = ShapeTracer(layers, torch.device("cpu"))
    ids = torch.ones(1, TOKENS, dtype=torch.int64)
    costs = counted_costs(tracer.trace(BatchSlice((ids, ids)), training=True))
    cut = next(number for number, layer in enumerate(layers) if isinstance(layer.module, CutTokens))
    return [cost / sum(costs) for cost in costs], cut


def seconds(num_microbatches: int, num_slices: int) -> float:
    """Of a step; a rank takes for every slice 1% of its forward of a microbatch besides."""
    costs, cut = counted()
    stops = [*accumulate(partition_layers(costs, RANKS))]

    def time(stage: int, op: Op, tokens: int, context: int) -> float:
        """What is before the cut runs with the first slice."""
        start = stops[stage - 1] if stage else 0
        whole = sum(costs[start : min(cut, stops[stage])]) if context == 0 else 0.0
        sliced = sum(costs[max(start, cut + 1) : stops[stage]]) * tokens / TOKENS
        works = context == 0 or stops[stage] > cut
        return works * (0.01 / RANKS + whole + sliced) * (2 if op is Op.B else 1)

    schedule = make_schedule("1f1b", RANKS, num_microbatches, num_slices)
    return simulate(schedule, schedule_costs(schedule, (TOKENS // num_slices,) * num_slices, time)).makespan


def test_the_page_says_how_many_slices_pay() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## Slices behind an encoder")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| ([\d. |]+) \|$", section, re.MULTILINE)
    assert [int(count) for count, _ in rows] == [*COUNTS]
    for count, cells in rows:
        expected = [f"{seconds(m, 1) / seconds(m, int(count)):.2f}" for m in MICROBATCHES]
        assert cells.split(" | ") == expected, (count, expected)


def test_slices_pay_with_few_microbatches() -> None:
    best = [max(COUNTS, key=lambda count, m=m: seconds(m, 1) / seconds(m, count)) for m in MICROBATCHES]  # type: ignore[misc]
    assert best[:2] == [16, 8]
    assert best[3] == 1  # with four it makes no difference


def test_the_encoder_bounds_what_slices_gain() -> None:
    """One microbatch runs the encoder on one rank after the other, however its decoder is sliced."""
    costs, cut = counted()
    bound = 1 / sum(costs[:cut])
    gains = [seconds(1, 1) / seconds(1, count) for count in COUNTS]
    assert 1.1 < max(gains) < bound
