"""A Pipeline whose parameters FSDP2 shards trains as the whole model, and sends what ZeRO-3's formula says."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from support.forked import launch, selected_cases
from support.paths import ROOT, WORKERS
from workers.parallel.zero3 import CASES


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.grid)])
def ended(request: pytest.FixtureRequest) -> subprocess.CompletedProcess[str]:
    """All cases in the same processes; the first that fails ends them."""
    return launch(request.param, WORKERS / "parallel/zero3.py", *selected_cases(request))


IN_MAKE_TEST = {"sharded_parameters_train_as_the_whole_model", "what_cant_be_sharded_is_refused"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.more] * (case not in IN_MAKE_TEST)) for case in CASES]
)
def test_zero3(ended: subprocess.CompletedProcess[str], case: str) -> None:
    assert f"passed {case}\n" in ended.stdout, ended.stderr[-3000:]


@pytest.fixture(scope="module")
def predicted() -> list[dict[str, Any]]:
    report = json.loads((ROOT / "benchmarks" / "results" / "papers.json").read_text())
    rows: list[dict[str, Any]] = report["megatron table 2"]["rows"]
    return rows


def test_zero3_in_the_paper_lies_between_all_and_no_overlap(predicted: list[dict[str, Any]]) -> None:
    rows = [row for row in predicted if row["scheme"] == "zero3"]
    assert len(rows) == 6
    for row in rows:
        assert row["seconds"] < row["paper seconds"] < row["seconds without overlap"]


def test_zero3_sends_as_much_on_any_number_of_gpus_and_ptdp_less(predicted: list[dict[str, Any]]) -> None:
    """3 (n-1)/n of the parameters' bytes; and the order of the two systems is the paper's in every pair of rows."""
    zero3, ptdp = ([row for row in predicted if row["scheme"] == scheme] for scheme in ("zero3", "ptdp"))
    for row in zero3:
        assert row["sent"] == pytest.approx(6 * row["parameters"] * (row["gpus"] - 1) / row["gpus"], rel=1e-12)
    for one, other in zip(zero3, ptdp, strict=True):
        assert other["out of a node"] < one["out of a node"] / 5
        if one["gpus"] >= 768:
            assert other["predicted"] > one["predicted"]
            assert other["paper"] > one["paper"]
