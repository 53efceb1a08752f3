"""Where to cut a sequence into token slices (TeraPipe, sections 3.3 and 3.4)."""

from __future__ import annotations

from slipstream.planner.slicing.equal_time_cuts import equal_time_slices

__all__ = ["equal_time_slices"]
