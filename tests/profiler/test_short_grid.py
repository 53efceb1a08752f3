"""The few points that are measured before a plan: they serve all slices of a search, even where time runs out."""

from __future__ import annotations

import pytest

from slipstream.profile.measurement_run import make_short_grid


@pytest.mark.parametrize(("seq_len", "granularity"), [(100, 6), (1000, 62), (2048, 64), (131072, 64)])
def test_what_is_measured_first_has_short_slices_and_late_ones(seq_len: int, granularity: int) -> None:
    points = make_short_grid(seq_len, seq_len // 2, granularity).points
    assert len(points) == len({*points})
    assert (seq_len // 2, 0) in points
    assert all(length + context <= seq_len for length, context in points)
    first = points[:8]
    assert min(length for length, _ in first) == 1
    assert len({length for length, context in first if context == 0}) >= 4
    assert len({context for _, context in first}) >= 4
