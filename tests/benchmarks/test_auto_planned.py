"""Plans are compared with the steps of the same start."""

from __future__ import annotations

import pytest
from benchmarks.auto_planned import COMPARED, row


def test_errors_of_starts_do_not_cancel() -> None:
    found = row("deep", [{"planned over measured": ratio} for ratio in (0.98, 1.02, 1.0)])
    assert found["planned over measured"] == 1.0
    assert found["mean error"] == pytest.approx(0.04 / 3)
    assert found["tokens"] == COMPARED["deep"].length
