"""Decides before anything runs: degrees, stages, slices and order. Imports no torch."""

from slipstream.planner.plan import CHOICES, MESH, OPEN, PLAIN, Plan, placement_of
from slipstream.planner.plan_report import PlanReport
