"""Measures a rank's memory, and keeps schedules within a memory limit."""

from slipstream.pipeline.memory.memory_limit import MemoryLimit
from slipstream.pipeline.memory.rehearsal import RehearsedStep, rehearse
