"""The plans of "auto": before the first step, or once the steps that ran have shown their costs."""

from slipstream.pipeline.tuning.first_steps import FirstSteps, HeldBytes
from slipstream.pipeline.tuning.row_plan import rates_of_rows
from slipstream.pipeline.tuning.start_plan import (
    StartRequest,
    held_bytes,
    is_free,
    measure_rates,
    plan_start,
    profile_of,
    seconds_after,
    with_plan,
)
from slipstream.pipeline.tuning.step_settings import StepSettings
