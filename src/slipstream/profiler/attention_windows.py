"""Finds the windows of attention from the first keys that a few queries see."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slipstream.planner.costs import AttentionWindow, find_window


def find_windows(first_keys: Callable[[int], Sequence[int]], seq_len: int) -> list[AttentionWindow]:
    """Returns the window of every attention call, given what the query at a position sees first in each of them."""
    last = seq_len - 1
    probes = {position: first_keys(position) for position in (last, max(0, last - 1), last // 2, last // 3)}
    probes |= {first - 1: first_keys(first - 1) for first in probes[last] if first > 0}
    calls = range(len(probes[last]))
    return [find_window({position: firsts[call] for position, firsts in probes.items()}) for call in calls]
