"""Slipstream trains long-context language models over several devices by pipelining tokens inside a sequence."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.errors import SlipstreamError
    from slipstream.model.cut_tokens import CutTokens, causal_attention
    from slipstream.model.hf_sequence import sequence_of
    from slipstream.model.self_check import check_sliceable
    from slipstream.model.skips import Skip
    from slipstream.parallel.mesh import make_mesh
    from slipstream.pipeline.pipeline import Pipeline
    from slipstream.planner.partition import partition_layers
    from slipstream.planner.slicing import slice_tokens
    from slipstream.profiler.planning import plan
    from slipstream.schedule.action import Action, Op, Schedule
    from slipstream.schedule.dependencies import validate
    from slipstream.schedule.generators import gpipe, make_schedule, one_f_one_b
    from slipstream.simulator import simulate
    from slipstream.timeline import Timeline

__version__ = "0.1.0"

# Loaded on first use: schedules and simulation work, and the command line answers, without importing torch.
_HOMES = {
    "Action": "slipstream.schedule.action",
    "CutTokens": "slipstream.model.cut_tokens",
    "Op": "slipstream.schedule.action",
    "Pipeline": "slipstream.pipeline.pipeline",
    "Schedule": "slipstream.schedule.action",
    "Skip": "slipstream.model.skips",
    "SlipstreamError": "slipstream.errors",
    "Timeline": "slipstream.timeline",
    "causal_attention": "slipstream.model.cut_tokens",
    "check_sliceable": "slipstream.model.self_check",
    "gpipe": "slipstream.schedule.generators",
    "make_mesh": "slipstream.parallel.mesh",
    "make_schedule": "slipstream.schedule.generators",
    "one_f_one_b": "slipstream.schedule.generators",
    "partition_layers": "slipstream.planner.partition",
    "plan": "slipstream.profiler.planning",
    "sequence_of": "slipstream.model.hf_sequence",
    "simulate": "slipstream.simulator",
    "slice_tokens": "slipstream.planner.slicing",
    "validate": "slipstream.schedule.dependencies",
}

__all__ = [
    "Action",
    "CutTokens",
    "Op",
    "Pipeline",
    "Schedule",
    "Skip",
    "SlipstreamError",
    "Timeline",
    "causal_attention",
    "check_sliceable",
    "gpipe",
    "make_mesh",
    "make_schedule",
    "one_f_one_b",
    "partition_layers",
    "plan",
    "sequence_of",
    "simulate",
    "slice_tokens",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
