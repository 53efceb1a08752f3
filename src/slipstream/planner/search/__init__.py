"""Searches all configurations for the plan with the shortest simulated step."""

from __future__ import annotations

from slipstream.planner.search.plan_search import search_plans
from slipstream.planner.search.plan_space import PlanOptions

__all__ = ["PlanOptions", "search_plans"]
