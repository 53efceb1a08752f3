"""Decides before anything runs: degrees, stages, slices and order. Imports no torch."""

from slipstream.planner.plans import Plan
