"""Runs one rank's actions with real tensors and records when each ran."""

from __future__ import annotations

from slipstream.pipeline.execution.executor import Executor, LossFunction
from slipstream.pipeline.execution.run_ranks import run_together

__all__ = [
    "Executor",
    "LossFunction",
    "run_together",
]
