"""Measures the seconds and bytes of a model's parts on the present hardware, and counts their operations."""

from slipstream.profile.cost_cache import find_costs, newest_costs
from slipstream.profile.counting import count_model
from slipstream.profile.measurement_run import FIT_TOLERANCE, TooLittleTimeError
from slipstream.profile.profile_run import (
    ProfileSettings,
    identify_hardware,
    identify_model,
    profile_model,
    versions,
    without_origin,
)
from slipstream.profile.stage_bench import MemoryMeter, memory_meter, seconds_of
