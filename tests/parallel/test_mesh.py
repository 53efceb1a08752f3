"""A mesh of four processes keeps its promises: bytes sent, exports, dropout, memory limits, refusals."""

from __future__ import annotations

from subprocess import CompletedProcess

import pytest

from support.forked import launch, selected_cases
from support.paths import WORKERS
from workers.parallel.mesh import CASES

IN_MAKE_TEST = {"dropout", "packed_rows", "refusals"}
LONG = {"auto", "planned_halves"}


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest, compiled_search: None) -> CompletedProcess[str]:
    """The selected cases in the same processes; the first that fails ends them."""
    return launch(4, WORKERS / "parallel/mesh.py", *selected_cases(request))


def mark(case: str) -> list[pytest.MarkDecorator]:
    if case in IN_MAKE_TEST:
        return []
    return [pytest.mark.grid if case in LONG else pytest.mark.more]


@pytest.mark.parametrize("case", [pytest.param(case, marks=mark(case)) for case in CASES])
def test_a_mesh_keeps_its_promises(ended: CompletedProcess[str], case: str) -> None:
    assert f"passed {case}\n" in ended.stdout, ended.stderr[-4000:]
