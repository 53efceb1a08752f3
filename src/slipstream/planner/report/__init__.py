"""A plan for people: its wording, and the HTML report."""

from __future__ import annotations

from slipstream.planner.report.wording import bytes_text, configuration_text

__all__ = ["bytes_text", "configuration_text"]
