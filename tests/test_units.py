"""Seconds, bytes, counts and shares are printed in one way everywhere, and misspelt names are told the nearest."""

from __future__ import annotations

import pytest

from slipstream.errors import did_you_mean
from slipstream.units import (
    bytes_text,
    bytes_unit,
    count_text,
    duration_unit,
    long_duration_text,
    numbers_text,
    plural,
    seconds_text,
    share_text,
    table_text,
)


def test_short_durations() -> None:
    assert [seconds_text(s) for s in (0, 5e-10, 2.5e-6, 0.0125, 0.9999, 1, 1.5, 9.996, 99.96, 123.4, 4567)] == [
        "0 s",
        "0.50 ns",
        "2.50 µs",
        "12.5 ms",
        "1,000 ms",
        "1.00 s",
        "1.50 s",
        "10.0 s",
        "100 s",
        "123 s",
        "4,567 s",
    ]
    assert [duration_unit(seconds) for seconds in (0, 3e-6, 60)] == [(1, "s"), (1e6, "µs"), (1, "s")]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (34 * 86400, "34 days"),
        (3.5 * 3600, "3.5 hours"),
        (150, "2.5 minutes"),
        (90, "90 seconds"),
        (0.2, "0.2 seconds"),
    ],
)
def test_long_durations(seconds: float, text: str) -> None:
    assert long_duration_text(seconds) == text


def test_sizes() -> None:
    assert [bytes_text(n) for n in (0, 999, 1500, 61.24e9, 999.7e6, 5e15)] == [
        "0.00 B",
        "999 B",
        "1.50 kB",
        "61.2 GB",
        "1.00 GB",
        "5,000 TB",
    ]
    assert [bytes_unit(n) for n in (0, 1000, 2e9)] == [(1, "B"), (1e3, "kB"), (1e9, "GB")]


def test_numbers_and_their_nouns() -> None:
    assert [plural(number, "step") for number in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]
    assert [plural(2, noun) for noun in ("microbatch", "process")] == ["2 microbatches", "2 processes"]
    assert numbers_text([1, 2.5, 2e6]) == "1, 2.5, 2000000"
    assert numbers_text(range(81), " ") == "0 1 2 3 ... 78 79 80"


def test_tables_have_aligned_columns_and_no_blanks_at_the_end() -> None:
    rows = [("", "before", ""), ("mesh", "pp 2", "now")]
    assert table_text(rows) == "      before\nmesh  pp 2    now"
    assert table_text(rows, str.rjust) == "      before\nmesh    pp 2  now"


def test_counts_and_shares() -> None:
    assert [count_text(n) for n in (999.6, 64_475.2, 12_345_678)] == ["1,000", "64,475", "12.3 M"]
    assert [share_text(share) for share in (0.1234, None)] == ["12.3%", "-"]


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
