"""A mesh's axes are known by their roles: one that the sources don't know trains as one process does."""

from __future__ import annotations

from subprocess import CompletedProcess

import pytest

from support.forked import launch, selected_cases
from support.paths import ROOT, WORKERS
from workers.parallel.token_parts import CASES, NAME


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest) -> CompletedProcess[str]:
    """The selected cases in the same processes; the first that fails ends them."""
    return launch(2, WORKERS / "parallel/token_parts.py", *selected_cases(request))


@pytest.mark.parametrize("case", CASES)
def test_an_axis_that_splits_tokens_trains_as_one_process(ended: CompletedProcess[str], case: str) -> None:
    assert f"passed {case}\n" in ended.stdout, ended.stderr[-4000:]


def test_no_source_names_it() -> None:
    sources = (ROOT / "src" / "slipstream").rglob("*.py")
    assert [path for path in sources if f'"{NAME}"' in path.read_text(encoding="utf-8")] == []
