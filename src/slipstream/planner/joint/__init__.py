"""The joint search: where the model is cut, which rank has which stage, the slices, and the order of all actions."""

from slipstream.planner.joint.joint_plan import JointPlan
from slipstream.planner.joint.problem import JointProblem
from slipstream.planner.joint.sliced_units import SlicedUnits, Tabulated
from slipstream.planner.joint.vocabulary_search import search_jointly, spread_costs
from slipstream.planner.room import OutOfMemoryError
