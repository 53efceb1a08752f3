"""schedule="auto" and slices="auto": measures the first steps and chooses from them."""

from slipstream.pipeline.tuning.start_plan import StartRequest, is_free, plan_start, with_plan
from slipstream.pipeline.tuning.trials import Trial, TrialMemory, TrialRequest, TrialResult, holdings_of
from slipstream.pipeline.tuning.tuner import Tuner
