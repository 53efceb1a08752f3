"""Plans one step of sequences that differ in length: microbatches, slices and order, with the stages as they are."""

from slipstream.planner.ragged.stage_rates import StageRates, fit_rates
from slipstream.planner.ragged.step_problem import StepMemory, StepPlan, StepProblem
