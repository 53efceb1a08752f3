"""Finds where to cut a sequence into token slices (TeraPipe, sections 3.3 and 3.4)."""

from slipstream.planner.slicing.batch_slicing import (
    BatchSlicing,
    slice_batch,
    slice_batch_with_flushes,
)
from slipstream.planner.slicing.equal_stage_slicing import slice_tokens, slicing_frontier
from slipstream.planner.slicing.equal_time_cuts import equal_time_slices
from slipstream.planner.slicing.schedule_slicing import slice_for_schedule
from slipstream.planner.slicing.slice_costs import layer_sequence_costs, schedule_costs
from slipstream.planner.slicing.unequal_stage_slicing import slice_for_stages
