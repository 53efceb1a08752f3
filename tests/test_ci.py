"""CI runs a failed test once more by itself, and says no other failure away."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

CASES = """
import os, pathlib, time
import pytest

MODE = os.environ["MODE"]
seen = pathlib.Path("seen")

@pytest.mark.more
def test_first(): pass

@pytest.mark.more
def test_changing():
    before = seen.exists()
    seen.touch()
    assert before or MODE in ("twice", "fine", "deselected")

@pytest.mark.more
def test_ending():
    if MODE == "crash": os._exit(0)
    if MODE == "timeout": time.sleep(1000)
    assert MODE != "twice"

@pytest.mark.more
def test_last(): pass

def test_unmarked(): assert MODE == "deselected"

if MODE == "unimportable": import no_such_module
"""
INI = "[pytest]\nmarkers = more\ntimeout = 30\ntimeout_method = thread\n"
TWO_WORKERS = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart=0"]
MODES = {"once": 0, "twice": 1, "fine": 0, "crash": 1, "timeout": 1, "unimportable": 2, "deselected": 5}
AT_ONCE, BY_WORKERS = ("once", "twice"), ("once", "crash", "timeout")


@pytest.mark.parametrize(
    ("mode", "workers"),
    [pytest.param(mode, [], marks=[pytest.mark.more] * (mode not in AT_ONCE), id=f"{mode}, here") for mode in MODES]
    + [
        pytest.param(mode, TWO_WORKERS, marks=pytest.mark.more if mode in BY_WORKERS else pytest.mark.grid, id=mode)
        for mode in MODES
    ],
)
def test_a_test_that_fails_once_is_named(mode: str, workers: list[str], tmp_path: Path) -> None:
    status, flaky = MODES[mode], ["test_changing"] if mode == "once" else []
    (tmp_path / "test_cases.py").write_text(CASES, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text(INI.replace("30", "2") if mode == "timeout" else INI, encoding="utf-8")
    names = tmp_path / "flaky.txt"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, ROOT / ".ci/run_tests.py", "-m", "nothing" if mode == "deselected" else "more", *workers],
        cwd=tmp_path,
        env={**environment, "MODE": mode, "FLAKY_TESTS": str(names)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    # With two workers an import error counts as a failed test.
    expected = {1, 2} if mode == "unimportable" else {status}
    assert done.returncode in expected, done.stdout + done.stderr
    assert ("Once more" in done.stdout) == (mode in ("once", "twice"))
    assert (names.read_text().split() if names.exists() else []) == [f"test_cases.py::{name}" for name in flaky]
    assert done.stdout.count("FLAKY") == len(flaky)
