"""Searches all configurations for the plan with the shortest simulated step."""

from __future__ import annotations

from slipstream.planner.search.plan_options import PlanOptions, check_count, make_options
from slipstream.planner.search.plan_search import search_plans

__all__ = ["PlanOptions", "check_count", "make_options", "search_plans"]
