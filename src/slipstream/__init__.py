"""Slipstream trains long-context language models over several devices by pipelining tokens inside a sequence."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.errors import SlipstreamError
    from slipstream.model.hf_sequential.planned_sequence import sequence_of
    from slipstream.model.self_check import check_sliceable
    from slipstream.model.sequential.cut_tokens import CutTokens, causal_attention
    from slipstream.model.sequential.skip_connections import Skip
    from slipstream.options import Layers, Memory, Parallelism, Precision, Runtime
    from slipstream.parallel.device_mesh import make_mesh
    from slipstream.pipeline.pipeline import Pipeline
    from slipstream.planner import Plan
    from slipstream.planner.costs import load_cluster, load_profile
    from slipstream.planner.order.best_order import find_order, step_lower_bound
    from slipstream.planner.partition import partition_layers
    from slipstream.planner.report.html_page import write_report
    from slipstream.planner.search import PlanOptions
    from slipstream.planner.slicing import (
        layer_sequence_costs,
        schedule_costs,
        slice_batch,
        slice_batch_with_flushes,
        slice_for_schedule,
        slice_for_stages,
        slice_tokens,
        slicing_frontier,
    )
    from slipstream.planning.plan_model import plan
    from slipstream.schedule import (
        GENERATORS,
        STAGES_PER_RANK,
        Action,
        Op,
        Schedule,
        ScheduleError,
        add_communication,
        add_offload,
        add_recompute,
        gpipe,
        in_flushes,
        interleaved_one_f_one_b,
        make_schedule,
        one_f_one_b,
        predecessors,
        split_backwards,
        validate,
    )
    from slipstream.simulator import CostModel, MeasuredCost, TableCost, UnitCost, simulate
    from slipstream.timeline import (
        Cause,
        Span,
        Timeline,
        Wait,
        draw_timelines,
        find_waits,
        idle_by_cause,
        load_trace,
        save_trace,
    )

from slipstream.version import __version__ as __version__

# Loaded on first use: schedules and simulation work, and the command line answers, without importing torch.
_HOMES = {
    "Action": "slipstream.schedule",
    "Cause": "slipstream.timeline",
    "CostModel": "slipstream.simulator",
    "CutTokens": "slipstream.model.sequential.cut_tokens",
    "GENERATORS": "slipstream.schedule",
    "Layers": "slipstream.options",
    "MeasuredCost": "slipstream.simulator",
    "Memory": "slipstream.options",
    "Op": "slipstream.schedule",
    "Parallelism": "slipstream.options",
    "Pipeline": "slipstream.pipeline.pipeline",
    "Plan": "slipstream.planner",
    "PlanOptions": "slipstream.planner.search",
    "Precision": "slipstream.options",
    "Runtime": "slipstream.options",
    "STAGES_PER_RANK": "slipstream.schedule",
    "Schedule": "slipstream.schedule",
    "ScheduleError": "slipstream.schedule",
    "Skip": "slipstream.model.sequential.skip_connections",
    "SlipstreamError": "slipstream.errors",
    "Span": "slipstream.timeline",
    "TableCost": "slipstream.simulator",
    "Timeline": "slipstream.timeline",
    "UnitCost": "slipstream.simulator",
    "Wait": "slipstream.timeline",
    "add_communication": "slipstream.schedule",
    "add_offload": "slipstream.schedule",
    "add_recompute": "slipstream.schedule",
    "causal_attention": "slipstream.model.sequential.cut_tokens",
    "check_sliceable": "slipstream.model.self_check",
    "draw_timelines": "slipstream.timeline",
    "find_order": "slipstream.planner.order.best_order",
    "find_waits": "slipstream.timeline",
    "gpipe": "slipstream.schedule",
    "idle_by_cause": "slipstream.timeline",
    "in_flushes": "slipstream.schedule",
    "interleaved_one_f_one_b": "slipstream.schedule",
    "layer_sequence_costs": "slipstream.planner.slicing",
    "load_cluster": "slipstream.planner.costs",
    "load_profile": "slipstream.planner.costs",
    "load_trace": "slipstream.timeline",
    "make_mesh": "slipstream.parallel.device_mesh",
    "make_schedule": "slipstream.schedule",
    "one_f_one_b": "slipstream.schedule",
    "partition_layers": "slipstream.planner.partition",
    "plan": "slipstream.planning.plan_model",
    "predecessors": "slipstream.schedule",
    "save_trace": "slipstream.timeline",
    "schedule_costs": "slipstream.planner.slicing",
    "sequence_of": "slipstream.model.hf_sequential.planned_sequence",
    "simulate": "slipstream.simulator",
    "slice_batch": "slipstream.planner.slicing",
    "slice_batch_with_flushes": "slipstream.planner.slicing",
    "slice_for_schedule": "slipstream.planner.slicing",
    "slice_for_stages": "slipstream.planner.slicing",
    "slice_tokens": "slipstream.planner.slicing",
    "slicing_frontier": "slipstream.planner.slicing",
    "split_backwards": "slipstream.schedule",
    "step_lower_bound": "slipstream.planner.order.best_order",
    "validate": "slipstream.schedule",
    "write_report": "slipstream.planner.report.html_page",
}

__all__ = [
    "GENERATORS",
    "STAGES_PER_RANK",
    "Action",
    "Cause",
    "CostModel",
    "CutTokens",
    "Layers",
    "MeasuredCost",
    "Memory",
    "Op",
    "Parallelism",
    "Pipeline",
    "Plan",
    "PlanOptions",
    "Precision",
    "Runtime",
    "Schedule",
    "ScheduleError",
    "Skip",
    "SlipstreamError",
    "Span",
    "TableCost",
    "Timeline",
    "UnitCost",
    "Wait",
    "add_communication",
    "add_offload",
    "add_recompute",
    "causal_attention",
    "check_sliceable",
    "draw_timelines",
    "find_order",
    "find_waits",
    "gpipe",
    "idle_by_cause",
    "in_flushes",
    "interleaved_one_f_one_b",
    "layer_sequence_costs",
    "load_cluster",
    "load_profile",
    "load_trace",
    "make_mesh",
    "make_schedule",
    "one_f_one_b",
    "partition_layers",
    "plan",
    "predecessors",
    "save_trace",
    "schedule_costs",
    "sequence_of",
    "simulate",
    "slice_batch",
    "slice_batch_with_flushes",
    "slice_for_schedule",
    "slice_for_stages",
    "slice_tokens",
    "slicing_frontier",
    "split_backwards",
    "step_lower_bound",
    "validate",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
