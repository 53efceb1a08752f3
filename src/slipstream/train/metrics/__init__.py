"""Measures a run's computing, traffic and memory, and writes them."""

from slipstream.train.metrics.records import SampleRecord, SaveRecord, StepRecord, ValidationRecord, check_trackers
from slipstream.train.metrics.reporter import Reporter
