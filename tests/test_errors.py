"""A misspelt name is answered with the nearest known one."""

from __future__ import annotations

import pytest

from slipstream.errors import did_you_mean


@pytest.mark.parametrize(
    ("name", "prefix", "hint"),
    [
        ("gpip", "", "; did you mean 'gpipe'?"),
        ("GPIPE", "", "; did you mean 'gpipe'?"),
        ("1f2b", "schedule.", "; did you mean 'schedule.1f1b'?"),
        ("xyz", "", "."),
    ],
)
def test_the_nearest_name_ends_the_sentence(name: str, prefix: str, hint: str) -> None:
    assert did_you_mean(name, ("gpipe", "1f1b"), prefix) == hint
