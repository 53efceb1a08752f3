"""The program for a short lease of a GPU: two parts within ten minutes each, files whatever becomes of a task."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.gpu_session import MOST_FILES, TASKS, Task, run, take

from benchmarks import gpu_session


@pytest.mark.parametrize("part", [1, 2])
def test_a_part_fits_a_lease(part: int) -> None:
    assert sum(task.seconds for task in TASKS if task.part == part) <= 320
    assert len({task.name for task in TASKS}) == len(TASKS) <= MOST_FILES


def test_a_task_writes_its_file_as_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, home, out = (tmp_path / name for name in ("results", "home", "out"))
    for folder in (results, home, out):
        folder.mkdir()
    program = f"import json; open({str(results / 'found.json')!r}, 'w').write(json.dumps({{'a': 1}})); print('the end')"
    monkeypatch.setattr(gpu_session, "RESULTS", results)
    found = run(Task("one", 1, 60, ("-c", program), (), ("found",)), out, dry=False)
    assert (found["outcome"], found["last line"], found["records"]) == ("passed", "the end", {"found": {"a": 1}})
    monkeypatch.setattr(gpu_session, "RESULTS", home)
    take(out)
    assert json.loads((home / "found.json").read_text()) == {"a": 1}


def test_a_task_that_hangs_or_fails_is_said_so(tmp_path: Path) -> None:
    slow = Task("slow", 1, 1, ("-c", "import time; print('begun', flush=True); time.sleep(600)"), ())
    found = run(slow, tmp_path, dry=False)
    assert (found["outcome"], found["last line"]) == ("too long", "begun")
    assert json.loads((tmp_path / "slow.json").read_text())["printed"] == "begun\n"
    assert run(Task("bad", 1, 60, ("-c", "raise SystemExit(3)"), ()), tmp_path, dry=False)["outcome"] == "failed"
    lacking = run(Task("lacking", 1, 60, (), (), needs=("a_package_that_nobody_has",)), tmp_path, dry=False)
    assert "this machine lacks a_package_that_nobody_has" in lacking["printed"]


@pytest.mark.more
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_task_starts_without_a_gpu(task: Task, tmp_path: Path) -> None:
    """At toy size and on a CPU, which runs all of it but CUDA's own calls."""
    if task.name == "nccl":
        pytest.skip("tests/parallel/test_nccl.py itself runs on a CPU")
    found = run(task, tmp_path, dry=True)
    assert found["outcome"] in ("passed", "failed" if task.name == "doctor" else "passed"), found["printed"]
