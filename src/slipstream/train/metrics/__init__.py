"""Measures what a run computes, sends and holds, and writes it."""

from slipstream.train.metrics.records import SampleRecord, SaveRecord, StepRecord, ValidationRecord, check_trackers
from slipstream.train.metrics.reporter import Reporter
