"""Measures what the parts of a model cost on the present hardware, and counts their operations."""

from slipstream.profiler.cost_cache import find_costs
from slipstream.profiler.kept_costs import newest_costs
from slipstream.profiler.layer_kinds import why_layers_stay_whole
from slipstream.profiler.live_memory import MemoryMeter, memory_meter
from slipstream.profiler.measurement_run import FIT_TOLERANCE
from slipstream.profiler.model_counting import count_model
from slipstream.profiler.profile_identity import identify_hardware, identify_model, versions, without_origin
from slipstream.profiler.profile_run import ProfileSettings, profile_model
