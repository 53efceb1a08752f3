"""Searches all configurations for the plan with the shortest simulated step."""

from __future__ import annotations

from slipstream.planner.search.configurations import Options
from slipstream.planner.search.plan_search import search

__all__ = [
    "Options",
    "search",
]
