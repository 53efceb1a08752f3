"""Slices that take equal time, in closed form: where the search for a schedule's slices starts."""

from __future__ import annotations

from itertools import pairwise
from math import sqrt

from slipstream.errors import SlipstreamError


def equal_time_cuts(num_slices: int, attention_share: float) -> list[float]:
    """Where slices 1, 2, ... begin, as fractions of the sequence, so that all take equal time.

    Where attention has a share A of the whole sequence's time, the first x of it take (1-A)x + Ax²; the i-th of s
    cuts solves that for i/s. With A = 0 the slices have equal lengths.
    """
    if not 0 <= attention_share <= 1:
        raise SlipstreamError(f"attention_share={attention_share}: a fraction of the time, 0 to 1.")
    linear, square = 1 - attention_share, attention_share
    shares = [i / num_slices for i in range(1, num_slices)]
    # the root in the denominator: nothing cancels, and A = 0 needs no case of its own
    return [2 * share / (linear + sqrt(linear**2 + 4 * square * share)) for share in shares]


def equal_time_slices(length: int, num_slices: int, attention_share: float, granularity: int = 1) -> tuple[int, ...]:
    """Slice lengths in tokens for `equal_time_cuts`, each cut at the nearest multiple of `granularity`, none empty.

    Raises SlipstreamError if there are fewer multiples than slices.
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
