"""Data parallelism and ZeRO-1 through torchrun: real processes, gloo, and the sums of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)  # the first test of each fixture starts the processes and runs all cases
WORKER = Path(__file__).with_name("data_worker.py")
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


def torchrun(num_processes: int) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    environment = os.environ | {"PYTHONPATH": str(WORKER.parents[1]), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*launcher, str(WORKER)], capture_output=True, text=True, timeout=280, env=environment)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ended(request: pytest.FixtureRequest) -> subprocess.CompletedProcess[str]:
    """All cases in the same processes, which take longer to start than to run them; the first that fails ends them."""
    return torchrun(request.param)


@pytest.mark.parametrize("case", CASES)
def test_replicas(ended: subprocess.CompletedProcess[str], case: str) -> None:
    assert f"passed {case}\n" in ended.stdout, ended.stderr[-3000:]
