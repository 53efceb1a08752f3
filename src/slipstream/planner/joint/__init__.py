"""The joint search: where the model is cut, which rank has which stage, the slices, and the order of all actions."""

from slipstream.planner.joint.joint_search import (
    OutOfMemoryError,
    Vocabulary,
    find_joint_plan,
    find_vocabulary_plan,
    spread_costs,
)
from slipstream.planner.joint.problem import JointPlan, JointProblem
from slipstream.planner.joint.sliced_units import SlicedUnits, Tabulated
