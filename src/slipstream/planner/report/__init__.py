"""Presents a plan to people: its wording, and the HTML report."""

from __future__ import annotations

from slipstream.planner.report.wording import configuration_text

__all__ = ["configuration_text"]
