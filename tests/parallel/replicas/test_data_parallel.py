"""Replicas and ZeRO-1 in real processes have the gradients and the updates of one process."""

from __future__ import annotations

from subprocess import CompletedProcess

import pytest

from support.forked import launch, selected_cases
from support.paths import WORKERS
from workers.parallel.data_parallel import CASES


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.more)])
def ended(request: pytest.FixtureRequest) -> CompletedProcess[str]:
    """All cases in the same processes, which take longer to start than to run them; the first that fails ends them."""
    return launch(request.param, WORKERS / "parallel/data_parallel.py", *selected_cases(request))


@pytest.mark.parametrize("case", CASES)
def test_replicas(ended: CompletedProcess[str], case: str) -> None:
    assert f"passed {case}\n" in ended.stdout, ended.stderr[-3000:]
