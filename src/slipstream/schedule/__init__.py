"""What runs, in which order: schedules as data, their rules, generators and passes."""

from slipstream.schedule.action import Action, Op, Schedule, ScheduleError
from slipstream.schedule.dependencies import predecessors, running_order, validate
from slipstream.schedule.generators import GENERATORS, gpipe, one_f_one_b
from slipstream.schedule.lowering import (
    Channel,
    add_communication,
    channel,
    check_communication,
    forward_only,
    receives_in_flight,
    split_backwards,
)

__all__ = [
    "GENERATORS",
    "Action",
    "Channel",
    "Op",
    "Schedule",
    "ScheduleError",
    "add_communication",
    "channel",
    "check_communication",
    "forward_only",
    "gpipe",
    "one_f_one_b",
    "predecessors",
    "receives_in_flight",
    "running_order",
    "split_backwards",
    "validate",
]
