"""Decides before anything runs: degrees, stages, slices and order. Imports no torch."""

from __future__ import annotations

from slipstream.planner.plans import Plan

__all__ = ["Plan"]
