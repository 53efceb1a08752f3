"""Measures what a run computes, sends and holds, and writes it."""

from slipstream.training.metrics.disk_trouble import DiskTrouble
from slipstream.training.metrics.records import SaveRecord, StepRecord, ValidationRecord
from slipstream.training.metrics.reporter import Reporter
from slipstream.training.metrics.trackers import check_trackers
