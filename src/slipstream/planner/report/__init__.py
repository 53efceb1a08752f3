"""Presents a plan to people: its wording, and the HTML report."""

from slipstream.planner.report.wording import configuration_text
