"""Measures a rank's memory, and keeps schedules within a memory limit."""

from slipstream.pipeline.memory.memory_limit import MemoryLimit, less_on_host
from slipstream.pipeline.memory.rehearsal import RehearsedStep, rehearse
