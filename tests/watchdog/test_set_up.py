"""A rank that waits for another one while groups are made ends soon after that has died."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from support.forked import launch
from support.parameters import first_of
from support.paths import WORKERS
from support.timeouts import LIMIT, SOON


@pytest.mark.parametrize("group", first_of(["first", "mesh", "later"]))
def test_killed_in_set_up(tmp_path: Path, group: str) -> None:
    ended = launch(2, WORKERS / "parallel/killed_in_set_up.py", tmp_path, group)
    deadline = time.monotonic() + LIMIT
    while not (tmp_path / "seconds").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert float((tmp_path / "seconds").read_text()) < SOON  # less than any limit
    assert "rank 1 (" in ended.stderr
    assert "has ended without a word" in ended.stderr


def test_a_mesh_is_watched_for_deaths_until_the_pipeline_says_how_long_ranks_may_wait() -> None:
    ended = launch(2, WORKERS / "parallel/watched_mesh.py")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["watched"] * 2
    assert "error" not in ended.stderr
