"""Runs a schedule with real tensors: the public Pipeline and the parts it is built from."""

from __future__ import annotations

from slipstream.pipeline.pipeline import Pipeline
from slipstream.pipeline.ranks import Ranks

__all__ = [
    "Pipeline",
    "Ranks",
]
