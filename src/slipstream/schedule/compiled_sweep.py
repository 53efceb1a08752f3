"""The functions of `slipstream.schedule.sweep`, compiled: importing this loads numba.

They take a hundredth of the time of `slipstream.simulate`, which knows sends, receives and exact numbers too.
"""

from __future__ import annotations

from slipstream.numba_jit import compiled_together
from slipstream.schedule import sweep

_compiled = compiled_together(
    in_place=(
        *(sweep._replay, sweep._priority_now, sweep._class_of, sweep._goes_first, sweep._choose, sweep._first_to_start),
        *(sweep._append, sweep._update_room, sweep._update_slots, sweep._taken, sweep._offer, sweep._offer_first),
        *(sweep._expect_all, sweep.sweep, sweep.makespan, sweep.peak),
    ),
    making_arrays=(
        *(sweep.no_progress, sweep.in_rows, sweep._by_priority),
        *(sweep.start_times, sweep.delayed_start_times, sweep.place_replays),
        *(sweep.place, sweep.place_due, sweep.fill_gaps),
    ),
)
start_times = _compiled(sweep.start_times)
delayed_start_times = _compiled(sweep.delayed_start_times)
place_replays = _compiled(sweep.place_replays)
place = _compiled(sweep.place)
place_due = _compiled(sweep.place_due)
fill_gaps = _compiled(sweep.fill_gaps)
makespan = _compiled(sweep.makespan)
peak = _compiled(sweep.peak)
