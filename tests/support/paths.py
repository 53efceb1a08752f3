"""Where the repository's folders are, so that no test has to count how deep it lies."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
WORKERS = TESTS / "workers"  # programs that tests run in processes, in folders named after the tests that run them
