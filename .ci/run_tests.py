"""Run pytest, then the tests that failed once more by themselves: one that passes then is named as flaky.

    python .ci/run_tests.py ARGUMENTS_OF_PYTEST

The exit status is 0 where every test passed, the first time or the second. A run that isn't complete (pytest or a
worker crashed, a test timed out, a module can't be imported, there are no tests) is not tried again and never 0. Where
the environment has FLAKY_TESTS, the names of flaky tests are added to that file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

# So many failures at once aren't chance, and to run them again one after the other could take an hour.
MOST_TRIED_AGAIN = 10


class Outcomes:
    """Write down which tests were collected, which of them ended, in whatever process, and which failed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ended: set[str] = set()
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.ended.add(nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # A crashed worker leaves its other tests undone, and pytest-xdist says no more than that one has failed.
        complete = len(self.ended) == session.testscollected
        self.path.write_text(json.dumps({"complete": complete, "failed": sorted(self.failed)}), encoding="utf-8")


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as cache:
        path = Path(cache, "outcomes.json")
        # A cache of its own, or failures of another run would be tried again.
        arguments = [*arguments, "-o", f"cache_dir={cache}"]
        status = subprocess.run([sys.executable, __file__, "--outcomes", path, *arguments]).returncode
        outcomes = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"complete": False}
        if not outcomes["complete"]:
            return status or int(pytest.ExitCode.TESTS_FAILED)
        failed = outcomes["failed"]
        if status != pytest.ExitCode.TESTS_FAILED or not 0 < len(failed) <= MOST_TRIED_AGAIN:
            return status
        print(f"\nOnce more, by themselves: {len(failed)} failed", flush=True)
        again = ["-n", "0", "--last-failed", "--last-failed-no-failures", "none"]
        status = subprocess.run([sys.executable, "-m", "pytest", *arguments, *again]).returncode
        failed_twice = json.loads(Path(cache, "v/cache/lastfailed").read_text(encoding="utf-8"))
    flaky = [name for name in failed if name not in failed_twice]
    for name in flaky:
        print(f"FLAKY {name}: failed, then passed by itself")
    if "FLAKY_TESTS" in os.environ:
        with open(os.environ["FLAKY_TESTS"], "a", encoding="utf-8") as names:
            names.writelines(f"{name}\n" for name in flaky)
    return status or int(bool(failed_twice))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--outcomes"]:
        sys.exit(pytest.main(sys.argv[3:], plugins=[Outcomes(Path(sys.argv[2]))]))
    sys.exit(main(sys.argv[1:]))
