"""The joint search: where the model is cut, which rank has which stage, the slices, and the order of all actions."""

from slipstream.planner.joint.joint_problem import JointPlan, JointProblem
from slipstream.planner.joint.joint_search import OutOfMemoryError, find_joint_plan
from slipstream.planner.joint.unit_costs import AnalyticUnits, ProfileUnits, SlicedUnits, UnitCosts
from slipstream.planner.joint.vocabulary_choice import (
    UnitsWithoutHead,
    Vocabulary,
    find_vocabulary_plan,
    spread_costs,
)
