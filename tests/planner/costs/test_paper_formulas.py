"""The papers' formulas give the papers' own numbers."""

from __future__ import annotations

import csv

import pytest
from benchmarks.papers.formulas import GPT, batch_seconds, bubble_fraction, idle_share

from slipstream.errors import SlipstreamError
from slipstream.schedule import make_schedule
from slipstream.simulator import simulate
from slipstream.simulator.costs import UnitCost
from support.paths import ROOT

TABLE_1 = ROOT / "benchmarks/papers/tables/megatron_table1_weak_scaling.csv"


def table_1() -> list[dict[str, str]]:
    lines = [line for line in TABLE_1.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


@pytest.mark.parametrize("row", table_1(), ids=lambda row: row["params_billions"])
def test_parameters_are_those_of_table_1(row: dict[str, str]) -> None:
    model = GPT(int(row["num_layers"]), int(row["hidden_size"]))
    assert model.num_parameters / 1e9 == pytest.approx(float(row["params_billions"]), abs=0.051)


def test_gpt3_has_175_billion_parameters() -> None:
    assert GPT(96, 12288).num_parameters / 1e9 == pytest.approx(174.6, abs=0.1)


def test_flops_are_the_matrix_products_of_the_appendix() -> None:
    batch, length, layers, hidden, vocabulary = 3, 64, 5, 32, 100
    qkv, scores_and_values, out = 6 * hidden**2, 4 * length * hidden, 2 * hidden**2
    layer = qkv + scores_and_values + out + 16 * hidden**2  # per token, the MLP last
    head = 2 * hidden * vocabulary
    model = GPT(layers, hidden, vocabulary, length)
    assert model.flops(batch) == batch * length * (4 * layers * layer + 3 * head)
    assert model.flops(batch, recompute=False) == batch * length * 3 * (layers * layer + head)
    eq_3 = 96 * batch * length * layers * hidden**2
    eq_3 *= 1 + length / (6 * hidden) + vocabulary / (16 * layers * hidden)
    assert model.flops(batch) == pytest.approx(eq_3)


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "slices", "stages"),
    [("gpipe", 4, 8, 1, 1), ("1f1b", 4, 8, 1, 1), ("gpipe", 3, 2, 4, 1), ("interleaved-1f1b", 4, 8, 1, 2)],
)
def test_the_simulator_idles_as_long_as_the_formula_says(
    name: str, ranks: int, microbatches: int, slices: int, stages: int
) -> None:
    timeline = simulate(make_schedule(name, ranks, microbatches, slices, stages), UnitCost(1, 2))
    assert timeline.idle_fraction == pytest.approx(idle_share(ranks, microbatches, slices, stages))
    seconds = batch_seconds(ranks, microbatches * slices, stages, 2 * stages, stages)
    assert timeline.makespan == pytest.approx(seconds)


def test_gpipes_examples_of_idle_time() -> None:
    assert idle_share(4, 4) == pytest.approx(3 / 7)
    assert idle_share(4, 32) == pytest.approx(3 / 35)


def test_counts_below_one_are_refused() -> None:
    with pytest.raises(SlipstreamError, match="num_microbatches=0: give a number above 0"):
        bubble_fraction(4, 0)
    with pytest.raises(SlipstreamError, match="hidden_size=0"):
        GPT(2, 0)
