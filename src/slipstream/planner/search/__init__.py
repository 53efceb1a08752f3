"""Searches all configurations for the plan with the shortest simulated step."""

from slipstream.planner.search.cluster_problem import ClusterProblem
from slipstream.planner.search.evaluate import Evaluation, GlobalBatch, evaluate
from slipstream.planner.search.placed_partition import balanced_partition
from slipstream.planner.search.plan_options import PlanOptions, check_count
from slipstream.planner.search.plan_space import PlanSpace
from slipstream.planner.search.smallest import MemorySearch, longest_that_fits
