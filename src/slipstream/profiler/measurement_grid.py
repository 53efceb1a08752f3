"""Chooses which slice lengths and contexts are measured: the most informative first, in case time runs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

from slipstream.planner.costs import SlicePoint

_DENSE = 8  # the first multiples of the granularity are all in the grid
_RATIO = 2**0.5  # between longer lengths; times between two of them are interpolated
_SHORT_RATIO = 4  # the same where a few points are enough


@dataclass
class MeasurementGrid:
    """The points (slice length, context) to measure: `fitted` make the fit, `held_out` judge it; the extremes come
    first."""

    fitted: list[SlicePoint]
    held_out: list[SlicePoint] = field(default_factory=list)

    @property
    def points(self) -> list[SlicePoint]:
        """All points, one held out after every three fitted."""
        held_out = iter(self.held_out)
        mixed: list[SlicePoint] = []
        for number, point in enumerate(self.fitted, 1):
            mixed.append(point)
            mixed += [next(held_out, point)] if number % 3 == 0 else []
        return list(dict.fromkeys([*mixed, *held_out]))

    @property
    def sized(self) -> list[int]:
        """The slice lengths whose bytes are counted. In between these grow in proportion, or are below that."""
        lengths = sorted({length for length, _ in self.fitted})
        return lengths if self.held_out else sorted({*lengths[:2], lengths[-1]})

    def refine(self, off: Sequence[SlicePoint], seq_len: int) -> list[SlicePoint]:
        """Fits the points that were off, and holds out one near each instead. Returns the points to measure."""
        again: dict[SlicePoint, None] = {}
        for length, context in off:
            again |= {(length, 0): None, (length, context): None}
            nearby = (length, context // 2) if context > 1 else (max(1, length * 7 // 8), seq_len // 3)
            nearby = (min(nearby[0], seq_len - nearby[1]), nearby[1])
            if nearby not in self.points and nearby not in again:
                self.held_out.append(nearby)
                again[nearby] = None
            for point in ((length, 0), (length, context)):
                if point in self.held_out:
                    self.held_out.remove(point)
                if point not in self.fitted:
                    self.fitted.append(point)
        return list(again)


def make_grid(seq_len: int, longest_slice: int, granularity: int) -> MeasurementGrid:
    """Returns slice lengths, dense where slices are short, with contexts at about every eighth of the sequence.

    All lengths but 1 are multiples of `granularity`, as far as the longest is. Points in between are held out.
    """
    lengths = _lengths(longest_slice, granularity)
    contexts = (seq_len // 2, seq_len - longest_slice // 4, seq_len // 8, seq_len // 4, 3 * seq_len // 4)
    table = [(length, 0) for length in lengths]
    crossed = [(length, context) for context in contexts for length in lengths[1::2] if context > 0]
    between = _between(lengths, granularity)
    held_out = [(length, seq_len * part // 16) for length, part in zip(between, _scattered(len(between)), strict=True)]
    held_out += [
        (length, seq_len * (part + 5) // 32)
        for length, part in zip(lengths[2::2], _scattered(len(lengths)), strict=False)
    ]
    pairs = zip_longest(_extremes_first(table), _extremes_first([p for p in crossed if sum(p) <= seq_len]))
    fitted = dict.fromkeys(point for pair in pairs for point in pair if point is not None)
    unseen = [p for p in dict.fromkeys(held_out) if p not in fitted and p[1] > 0 and sum(p) <= seq_len]
    return MeasurementGrid(list(fitted), unseen)


def make_short_grid(seq_len: int, longest_slice: int, granularity: int) -> MeasurementGrid:
    """Returns a few points, all of them fitted: for a plan of this run, within seconds.

    Lengths are 1, for what remains of a sequence after multiples of the granularity, and in steps of four from the
    granularity to the longest: between them a slice's own scores are known to grow with the square, and all else in
    proportion. All but the first and the longest are measured twice after a context too, an eighth of what the longest
    takes: a context adds no more than four terms (`TimeFit`). Short ones come first, with and without a context: what
    is left where the time runs out has both.
    """
    lengths = [min(granularity, longest_slice)]
    while lengths[-1] < longest_slice:
        lengths.append(min(_SHORT_RATIO * lengths[-1], longest_slice))
    points = [(1, 0)]
    for number, length in enumerate(lengths):
        inner = length < longest_slice or len(lengths) == 1
        contexts = (0, seq_len // 4 if number % 2 else seq_len // 2, seq_len - length) if inner else (0,)
        points += [(length, context) for context in contexts if length + context <= seq_len]
    return MeasurementGrid([*dict.fromkeys(points)])


def _lengths(longest: int, granularity: int) -> list[int]:
    """Returns 1, the first multiples of the granularity, then lengths in equal ratios up to the longest."""
    lengths = [1, *range(granularity, _DENSE * granularity + 1, granularity)]
    while lengths[-1] < longest:
        lengths.append(max(round(lengths[-1] * _RATIO / granularity), 1) * granularity)
    return sorted({min(length, longest) for length in lengths})


def _between(lengths: Sequence[int], granularity: int) -> list[int]:
    """Returns a length off the middle between any two neighbours that leave room for one."""
    room = [(a, b) for a, b in pairwise(lengths) if a > 1 and b - a > granularity]
    return [a + max(1, (b - a) * 2 // 5 // granularity) * granularity for a, b in room]


def _scattered(count: int) -> list[int]:
    """Returns numbers from 1 to 15 in an irregular order."""
    return [(5 * k + 3) % 15 + 1 for k in range(count)]


def _extremes_first(points: Sequence[SlicePoint]) -> list[SlicePoint]:
    """Returns the last point, the first, and then the others from coarse to fine."""
    order = sorted(range(len(points)), key=lambda k: -(k & -k) if k else 0)
    ends = [len(points) - 1, 0] if points else []
    return [points[k] for k in dict.fromkeys([*ends, *order])]
