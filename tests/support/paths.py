"""Where the repository's folders are, so that no test has to count how deep it lies."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
WORKERS = TESTS / "workers"  # programs that tests run in processes, in folders named after the tests that run them


def with_path(*folders: Path) -> dict[str, str]:
    """The environment of a new Python process that imports from these folders too."""
    folders_before = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, folders), *folders_before])}
