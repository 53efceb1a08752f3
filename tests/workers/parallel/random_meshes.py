"""Random cases on meshes whose ranks share slices or have different experts: three steps are those of one process."""

from __future__ import annotations

import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path

import torch.distributed as dist
from benchmarks.random_exactness.__main__ import outcome
from benchmarks.random_exactness.cuts import place_of

from slipstream.model.toy import float64_masks, quiet_transformers
from support.parallel.group_cases import Case, run_cases

# By the number of processes. `make test` has a mesh of two and three of four: ranks that share slices, layers and
# experts, and experts that two ranks have each; `make test-all` has the others. `make exactness` draws two hundred.
AT_ONCE = {"mesh-10", "mesh-17", "mesh-18", "mesh-48"}
OF_TWO = (18, 42, 47, 57, 118, 335)
OF_FOUR = (10, 17, 48, 11, 31, 50, 51, 60, 113, 150, 187, 226, 353, 387)


def run(seed: str) -> None:
    """Losses, gradients, norms and weights are those of the unsplit model."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    with warnings.catch_warnings(), float64_masks(), quiet_transformers():
        warnings.simplefilter("ignore")
        found = outcome(seed, place_of(seed), dist.get_rank(), str(Path(folder[0], seed)), lambda _: None)
    assert found["verdict"] == "exact", found


def cases(numbers: tuple[int, ...]) -> dict[str, Case]:
    return {(seed := f"mesh-{number}"): partial(run, seed) for number in numbers}


CASES = cases(OF_TWO + OF_FOUR)

if __name__ == "__main__":
    run_cases(CASES, sys.argv[1:])
