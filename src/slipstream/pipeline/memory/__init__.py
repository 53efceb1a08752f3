"""Measures what a rank holds, and keeps schedules within a memory limit."""

from __future__ import annotations

from slipstream.pipeline.memory.memory_limit import MemoryLimit

__all__ = [
    "MemoryLimit",
]
