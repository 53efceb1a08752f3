"""Slipstream trains long-context language models over several devices by pipelining tokens inside a sequence."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.errors import SlipstreamError
    from slipstream.model.hf_sequence.planned_sequence import sequence_of
    from slipstream.model.self_check import check_sliceable
    from slipstream.model.sequence.cut_tokens import CutTokens, causal_attention
    from slipstream.model.sequence.skips import Skip
    from slipstream.parallel.mesh import make_mesh
    from slipstream.pipeline.pipeline import Pipeline
    from slipstream.planner.partition.layers_to_stages import partition_layers
    from slipstream.planner.slicing.equal_stages import slice_tokens
    from slipstream.planning.plan_model import plan
    from slipstream.schedule.action import Action, Op, Schedule
    from slipstream.schedule.dependencies import validate
    from slipstream.schedule.generators import gpipe, make_schedule, one_f_one_b
    from slipstream.simulator.simulation import simulate
    from slipstream.timeline.spans import Timeline

from slipstream.version import __version__ as __version__

# Loaded on first use: schedules and simulation work, and the command line answers, without importing torch.
_HOMES = {
    "Action": "slipstream.schedule.action",
    "CutTokens": "slipstream.model.sequence.cut_tokens",
    "Op": "slipstream.schedule.action",
    "Pipeline": "slipstream.pipeline.pipeline",
    "Schedule": "slipstream.schedule.action",
    "Skip": "slipstream.model.sequence.skips",
    "SlipstreamError": "slipstream.errors",
    "Timeline": "slipstream.timeline.spans",
    "causal_attention": "slipstream.model.sequence.cut_tokens",
    "check_sliceable": "slipstream.model.self_check",
    "gpipe": "slipstream.schedule.generators",
    "make_mesh": "slipstream.parallel.mesh",
    "make_schedule": "slipstream.schedule.generators",
    "one_f_one_b": "slipstream.schedule.generators",
    "partition_layers": "slipstream.planner.partition.layers_to_stages",
    "plan": "slipstream.planning.plan_model",
    "sequence_of": "slipstream.model.hf_sequence.planned_sequence",
    "simulate": "slipstream.simulator.simulation",
    "slice_tokens": "slipstream.planner.slicing.equal_stages",
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
