"""Finds where to cut a sequence into token slices (TeraPipe, sections 3.3 and 3.4)."""

from slipstream.planner.slicing.equal_stage_slicing import (
    BatchSlicing,
    equal_time_slices,
    slice_batch,
    slice_batch_with_flushes,
    slice_tokens,
    slicing_frontier,
)
from slipstream.planner.slicing.schedule_slicing import schedule_costs, slice_for_schedule
