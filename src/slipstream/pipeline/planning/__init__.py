"""The plans of what is "auto" or left open: by measured costs, by the steps that ran, or by counted operations."""

from slipstream.pipeline.planning.context_place import UNCOUNTABLE, ContextPlace, context_place
from slipstream.pipeline.planning.counted_plans import (
    NOMINAL_LENGTH,
    CountedPlans,
    LayerUnits,
    is_counted,
    with_usual,
)
from slipstream.pipeline.planning.decided_options import decided_options, with_plan
from slipstream.pipeline.planning.first_steps import FirstSteps, HeldBytes
from slipstream.pipeline.planning.lone_rank import LoneRankPlans, NoRoomError, RankRoom
from slipstream.pipeline.planning.plan_before_training import (
    StartRequest,
    held_beside,
    is_free,
    measure_rates,
    plan_start,
)
from slipstream.pipeline.planning.step_settings import RowOrder, StepSettings, may_split, usual_order
