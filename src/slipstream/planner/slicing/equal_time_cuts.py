"""Slices that take equal time, in closed form."""

from __future__ import annotations

from itertools import pairwise
from math import sqrt

from slipstream.errors import SlipstreamError


def equal_time_cuts(num_slices: int, attention_share: float) -> list[float]:
    """Returns where slices 1, 2, ... begin, as fractions of the sequence, so that all take equal time.

    If attention takes a share A of the whole sequence's time, the first fraction x of it takes (1-A)x + Ax²; the i-th
    of s cuts solves this for i/s. With A = 0 the slices have equal lengths.
    """
    if not 0 <= attention_share <= 1:
        raise SlipstreamError(f"attention_share={attention_share}: give a fraction of the time, 0 to 1.")
    linear, square = 1 - attention_share, attention_share
    shares = [i / num_slices for i in range(1, num_slices)]
    # with the root in the denominator nothing cancels, and A = 0 isn't a special case
    return [2 * share / (linear + sqrt(linear**2 + 4 * square * share)) for share in shares]


def equal_time_slices(length: int, num_slices: int, attention_share: float, granularity: int = 1) -> tuple[int, ...]:
    """Returns slice lengths in tokens that take equal time, cut at multiples of `granularity`, none of them empty.

    Raises:
        SlipstreamError: if there are fewer multiples than slices.
    """
    units = -(-length // granularity)
    if not 1 <= num_slices <= units:
        raise SlipstreamError(
            f"num_slices={num_slices} for {length} tokens at granularity {granularity}: use 1 to {units} slices."
        )
    cuts = [0]
    for i, fraction in enumerate(equal_time_cuts(num_slices, attention_share), start=1):
        nearest = round(fraction * length / granularity)
        cuts.append(min(max(nearest, cuts[-1] + 1), units - num_slices + i))
    bounds = [cut * granularity for cut in cuts] + [length]
    return tuple(b - a for a, b in pairwise(bounds))
