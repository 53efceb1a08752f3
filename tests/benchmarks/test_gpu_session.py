"""The program for a short lease of a GPU: three parts within ten minutes each, files whatever becomes of a task."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from benchmarks.bare_machine import THERE, BareMachine, make_machine
from benchmarks.gpu_session import CARRIED, MOST_FILES, ON_A_GPU, TASKS, Task, run, take

from benchmarks import gpu_session
from support.parameters import first_of
from support.paths import ROOT

# Imports nothing but the standard library, as a Python does that has no packages; says what a task then can import
ALONE = """
import os, sys
sys.meta_path.insert(0, type("No", (), {"find_spec": lambda name, *_: exit(name) if name == "slipstream" else None}))
from benchmarks import gpu_session
sys.meta_path.pop(0)
from pathlib import Path
gpu_session.unpack(Path(sys.argv[1]), Path(sys.argv[2]))
import only_there
print(only_there.__file__, os.environ["PYTHONPATH"])
"""


@pytest.mark.parametrize("part", [1, 2, 3])
def test_a_part_fits_a_lease(part: int) -> None:
    assert sum(task.seconds for task in TASKS if task.part == part) <= 320
    assert len({task.name for task in TASKS}) == len(TASKS) <= MOST_FILES


def test_what_a_python_lacks_comes_from_wheels(tmp_path: Path) -> None:
    """And Slipstream from the sources; of packages that are there already the wheel isn't taken."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("only_there", "pytest"):
        with ZipFile(wheels / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "")
    found = subprocess.run(
        [sys.executable, "-c", ALONE, str(wheels), str(tmp_path / "packages")], capture_output=True, text=True, cwd=ROOT
    )
    assert found.returncode == 0, found.stderr
    *unpacked, paths = found.stdout.splitlines()
    assert unpacked == ["only_there 1.0 of wheels"]
    place, others = paths.split(" ", 1)
    assert place == str(tmp_path / "packages/only_there.py")
    assert others.startswith(f"{tmp_path / 'packages'}:{ROOT / 'src'}:{ROOT}")


def test_what_is_carried_is_in_the_lock() -> None:
    """And has all that tests need and that isn't there anyway."""
    lock = {line.partition("==")[0] for line in (ROOT / "requirements.lock").read_text().splitlines()}
    assert set(CARRIED) <= lock
    needed = {name for task in TASKS for name in task.needs}
    assert needed <= {name.replace("-", "_") for name in (*CARRIED, *THERE)}


def test_a_task_writes_its_file_as_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, home, out = (tmp_path / name for name in ("results", "home", "out"))
    for folder in (results, home, out):
        folder.mkdir()
    program = f"import json; open({str(results / 'found.json')!r}, 'w').write(json.dumps({{'a': 1}})); print('the end')"
    monkeypatch.setattr(gpu_session, "RESULTS", results)
    found = run(Task("one", 1, 60, ("-c", program), (), ("found",)), out)
    assert (found["outcome"], found["last line"], found["records"]) == ("passed", "the end", {"found": {"a": 1}})
    monkeypatch.setattr(gpu_session, "RESULTS", home)
    take(out)
    assert json.loads((home / "found.json").read_text()) == {"a": 1}


def test_a_task_that_hangs_or_fails_is_said_so(tmp_path: Path) -> None:
    slow = Task("slow", 1, 1, ("-c", "import time; print('begun', flush=True); time.sleep(600)"), ())
    found = run(slow, tmp_path)
    assert (found["outcome"], found["last line"]) == ("too long", "begun")
    assert json.loads((tmp_path / "slow.json").read_text())["printed"] == "begun\n"
    assert run(Task("bad", 1, 60, ("-c", "raise SystemExit(3)"), ()), tmp_path)["outcome"] == "failed"
    lacking = run(Task("lacking", 1, 60, (), (), needs=("a_package_that_nobody_has",)), tmp_path)
    assert "this machine lacks a_package_that_nobody_has" in lacking["printed"]


def test_a_task_without_its_record_has_failed(tmp_path: Path) -> None:
    found = run(Task("one", 1, 60, ("-c", "print('the end')"), (), ("never_written",)), tmp_path)
    assert (found["outcome"], found["last line"]) == ("failed", "no record never_written")


OFTEN = [task for task in TASKS if task.name == "gpu_tests"]


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> BareMachine:
    return make_machine(ROOT, tmp_path_factory.mktemp("machine"), CARRIED)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import trl", "No module named 'trl'"),  # it isn't carried, as no task needs it
        ("open('.venv/pyvenv.cfg')", "No such file"),  # git ignores it
        # what tests of training import late, and Slipstream itself from the copy
        ("import datasets, numba, peft, slipstream; print(slipstream.__file__)", "tree/src/slipstream"),
    ],
)
def test_the_stand_in_has_what_the_machine_has(stand_in: BareMachine, tmp_path: Path, program: str, said: str) -> None:
    found = run(Task("one", 1, 60, ("-c", program)), tmp_path, stand_in)
    assert said in found["printed"]


@pytest.mark.parametrize(
    "task",
    [*first_of(OFTEN, 0), *first_of([task for task in TASKS if task not in OFTEN], 0, "grid")],
    ids=lambda task: task.name,
)
def test_a_task_starts_without_a_gpu(stand_in: BareMachine, task: Task, tmp_path: Path) -> None:
    """At toy size and on a CPU, which runs all of it but CUDA's own calls."""
    found = run(task, tmp_path, stand_in)
    assert found["outcome"] == "passed", found["printed"]
    if task.name == "gpu_tests":  # the most valuable first
        files = [line.partition("::")[0] for line in found["printed"].splitlines() if "::" in line]
        assert [*dict.fromkeys(files)] == [*ON_A_GPU]
