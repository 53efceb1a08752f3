"""Measures what a run computes, sends and holds, and writes it."""

from slipstream.training.metrics.records import StepRecord, ValidationRecord
from slipstream.training.metrics.reporter import Reporter
from slipstream.training.metrics.trackers import check_trackers
