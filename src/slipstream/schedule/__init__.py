"""What runs in which order: schedules as data, their rules, generators and passes. Imports no torch."""

from slipstream.schedule.action import BACKWARDS, COMMUNICATION, RECEIVES, SENDS, VOCABULARY, Action, Op, ScheduleError
from slipstream.schedule.dependencies import awaited_send, gradients_before, input_gradient, predecessors, sending
from slipstream.schedule.generators import AUTOMATIC, GENERATORS, STAGES_PER_RANK, check_name, make_schedule, placed_as
from slipstream.schedule.hang import report_wait
from slipstream.schedule.interleaved import breadth_first, interleaved_one_f_one_b
from slipstream.schedule.lowering import (
    NARROWEST_WINDOW,
    Channel,
    Direction,
    add_communication,
    add_reductions,
    channel,
    check_communication,
    forward_only,
    freeze_stages,
    join_backwards,
    receives_in_flight,
    send_windows,
    split_backwards,
)
from slipstream.schedule.memory_passes import add_offload, add_recompute, in_flushes
from slipstream.schedule.one_stage_per_rank import gpipe, one_f_one_b, zb_h1, zb_h2
from slipstream.schedule.schedule import Schedule, SliceCounts
from slipstream.schedule.sliced_microbatch import SlicedMicrobatch
from slipstream.schedule.v_shape import v_half, v_min, zb_v
from slipstream.schedule.validation import running_order, validate
from slipstream.schedule.vocabulary_pass import spread_vocabulary
