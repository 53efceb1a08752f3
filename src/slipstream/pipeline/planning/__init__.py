"""The plans of "auto": before the first step, or once the steps that ran have shown their costs."""

from slipstream.pipeline.planning.first_steps import FirstSteps, HeldBytes
from slipstream.pipeline.planning.plan_before_training import (
    StartRequest,
    held_bytes,
    is_free,
    measure_rates,
    plan_start,
    profile_of,
    seconds_after,
    with_plan,
)
from slipstream.pipeline.planning.step_settings import StepSettings
