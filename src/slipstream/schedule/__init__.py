"""The order of actions: schedules as data, their rules, generators and passes. Imports no torch."""

from slipstream.schedule.action import BACKWARDS, COMMUNICATION, RECEIVES, SENDS, VOCABULARY, Action, Op, ScheduleError
from slipstream.schedule.far_messages import (
    StageSkip,
    far_channels,
    far_inputs,
    far_sends,
    is_here,
    settlements,
    user_of,
    with_far_messages,
)
from slipstream.schedule.generators import (
    AUTOMATIC,
    SCHEDULES,
    USUAL_SCHEDULE,
    USUAL_SLICES,
    ScheduleKind,
    breadth_first,
    check_name,
    fewest_stages,
    gpipe,
    interleaved_one_f_one_b,
    make_schedule,
    one_f_one_b,
    placed_as,
    schedule_hint,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)
from slipstream.schedule.lowering import (
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
    send_window,
    send_windows,
    split_backwards,
    unit_seconds,
    without_communication,
)
from slipstream.schedule.passes import add_offload, add_recompute, in_flushes, spread_vocabulary
from slipstream.schedule.rules import (
    OPERATIONS,
    Held,
    Lane,
    Operation,
    add_operation,
    awaited_send,
    input_gradient,
    operations_on,
    predecessors,
    report_wait,
    sending,
    sent_result,
)
from slipstream.schedule.schedule import (
    Schedule,
    SliceCounts,
    SlicedMicrobatch,
    check_microbatches,
    given_microbatches,
    slice_lengths,
)
from slipstream.schedule.validation import running_order, validate
