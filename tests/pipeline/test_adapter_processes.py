"""Adapters over processes: a pipeline whose first rank has nothing to train, and replicas."""

from __future__ import annotations

import pytest

from support.forked import launch
from support.paths import ROOT


@pytest.mark.more
def test_ranks_and_replicas_have_exact_gradients() -> None:
    result = launch(2, ROOT / "tests" / "workers" / "pipeline" / "adapters.py")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("exact: ") == 2 * 6
