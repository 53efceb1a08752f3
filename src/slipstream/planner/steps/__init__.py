"""Plans one step of sequences that differ in length: microbatches, slices and order, with the stages as they are."""

from slipstream.planner.steps.step_plan import StepPlan
