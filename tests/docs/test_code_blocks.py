"""Every Python block of the documentation runs; the blocks of a page share their names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.forked import launch
from support.paths import ROOT
from support.timeouts import LIMIT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[int, str]]:
    """The line and the code of each Python block."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, match.start()) + 2, match.group(1)) for match in BLOCK.finditer(text)]


WITH_CODE = [page for page in PAGES if blocks(page)]


def test_there_is_something_to_run() -> None:
    assert {page.name for page in WITH_CODE} >= {"README.md", "concepts.md", "own-loop.md", "data.md"}


PLANNING = ("auto.md", "long-sequences.md", "memory.md", "slicing.md")  # take the longest


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.name, marks=[pytest.mark.more] * (page.name in PLANNING)) for page in WITH_CODE]
)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where costs are kept
    names: dict[str, Any] = {"__name__": page.stem}
    for line, code in blocks(page):
        padded = "\n" * (line - 1) + code  # so that a traceback shows the page's own line
        exec(compile(padded, str(page), "exec"), names)


@pytest.mark.more
def test_the_loop_of_the_readme_runs_on_two_processes_that_torchrun_starts(tmp_path: Path) -> None:
    """As one pipeline of two ranks, not as two whole copies."""
    ((_, code),) = blocks(ROOT / "README.md")
    script = tmp_path / "loop.py"
    shown = "{pipe.num_ranks} ranks, {len(pipe.layout.stages_of([pipe.rank]))} here, {loss}"
    script.write_text(code + f'print(f"{shown}\\n", end="")')  # in one piece: both processes write to one pipe
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    result = subprocess.run(torchrun, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("2 ranks, 1 here, ")
    assert lines[0] == lines[1]


@pytest.mark.more
def test_the_own_loop_runs_on_two_processes() -> None:
    result = launch(2, ROOT / "examples" / "own_loop.py")
    assert result.returncode == 0, result.stderr
    losses = [float(line.split()[-1]) for line in result.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
