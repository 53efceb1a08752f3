"""Slices of equal work in several rows at once, however the work is spread over a row's tokens."""

from __future__ import annotations

import numpy as np

from slipstream.array_types import Floats, Ints


def equal_work_cuts(places: Ints, firsts: Ints, work: Floats, counts: Ints) -> Ints:
    """Returns where slices begin that have equal work, as nearly as there are places to cut, and the last one's end.

    Args:
        places: where rows that are laid one after the other may be cut, and the last one's end, (places + 1,).
        firsts: the number of each row's first place, and of all places, (rows + 1,).
        work: up to each place, (places + 1,).
        counts: the slices of each row; fewer where it has fewer places.
    """
    counts = np.clip(counts, 1, np.diff(firsts))
    row = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    wanted = work[firsts[row]] + index / counts[row] * np.diff(work[firsts])[row]
    nearest = np.clip(np.searchsorted(work, wanted), 1, len(work) - 1)
    nearest -= wanted - work[nearest - 1] < work[nearest] - wanted
    # At least one place for each slice before and after a cut.
    latest = np.minimum(nearest, firsts[row + 1] - counts[row] + index)
    strict = np.maximum.accumulate(np.maximum(latest, firsts[row] + index) - np.arange(len(row)))
    return np.append(places[strict + np.arange(len(row))], places[-1])
