"""Replicas and ZeRO-1 in real processes have the gradients and the updates of one process."""

from __future__ import annotations

import subprocess

import pytest

from support.forked import launch
from support.paths import WORKERS

WORKER = WORKERS / "parallel/data_parallel.py"
CASES = [
    "sums_are_those_of_one_process",
    "missing_gradients_count_as_zeros",
    "three_steps_of_adamw",
    "sharded_and_replicated_to_the_bit",
    "calls_and_bytes_are_those_of_the_formulas",
    "reductions_run_beside_the_pipeline",
    "slices_are_added_in_float32",
    "masters_keep_small_updates",
    "tied_weights_are_delivered_whole",
    "partial_gradients_are_summed_over_tensor_ranks",
    "short_parameters_are_on_some_replicas",
    "all_ranks_skip_the_same_step",
    "scaled_losses_have_unscaled_gradients",
]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.more)])
def ended(request: pytest.FixtureRequest) -> subprocess.CompletedProcess[str]:
    """All cases in the same processes, which take longer to start than to run them; the first that fails ends them."""
    return launch(request.param, WORKER)


@pytest.mark.parametrize("case", CASES)
def test_replicas(ended: subprocess.CompletedProcess[str], case: str) -> None:
    assert f"passed {case}\n" in ended.stdout, ended.stderr[-3000:]
