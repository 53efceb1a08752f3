"""The sentences of docs/benchmarks.md about the time of finding a plan, from `plan_search` and `plan_lengths`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def text(cases: Row, lengths: Row) -> str:
    """Returns the sentences about both records, as Markdown."""
    return f"{_of_cases(cases['rows'], cases['setting']['cpu'])}\n{_of_lengths(lengths['rows'])}\n"


def _of_cases(rows: Sequence[Row], cpu: str) -> str:
    """Returns how many configurations are bounded in a second, and how long whole searches take."""
    rates = [round(row["configurations per second"], -2) for row in rows]
    searches = [
        f"{row['seconds of the search']:.0f} s for {row['model']} on {row['devices']} GPUs of `{row['cluster']}` with "
        f"sequences of {row['tokens']:,} tokens ({row['configurations']:,} configurations)"
        for row in rows
    ]
    return (
        f"**Finding a plan.** One core ({cpu}) computes bounds for {min(rates):,.0f} to {max(rates):,.0f} "
        f"configurations a second. The whole search takes {', '.join(searches[:-1])} and {searches[-1]} "
        "(`plan_search`)."
    )


def _of_lengths(rows: Sequence[Row]) -> str:
    """Returns how long searches for large models take, and the memory that they need."""
    seconds = [row["seconds"] for row in rows]
    longest = max(rows, key=lambda row: float(row["seconds"]))
    tokens, devices = ([row[name] for row in rows] for name in ("tokens", "devices"))
    return (
        f"For the {len({row['model'] for row in rows})} large models of `plan_lengths` at {min(tokens):,} to "
        f"{max(tokens):,} tokens on {min(devices):,} to {max(devices):,} H100, {len(rows)} cases, half of the searches "
        f"end, or refuse, within {statistics.median(seconds):.0f} s of one core, and the longest takes "
        f"{max(seconds):.0f} s ({longest['model']}, {longest['tokens']:,} tokens, {longest['devices']:,} GPUs). They "
        f"need {max(row['bytes'] for row in rows) / 1e9:.2f} GB at most."
    )
