"""Slipstream trains long-context language models over several devices by pipelining tokens inside a sequence."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.version import __version__

# Type checkers read these imports, and so does `_find_homes`: every name is loaded on its first use, so that schedules
# and simulation work, and the command line answers, without importing torch.
if TYPE_CHECKING:
    from slipstream.cluster_plans.plan_model import plan
    from slipstream.cost import load_cluster, load_profile
    from slipstream.errors import SlipstreamError
    from slipstream.extras.encoders import sequence_of
    from slipstream.model import check_sliceable, trust_remote_code
    from slipstream.options import Layers, Memory, Parallelism, Precision, Runtime
    from slipstream.parallel import ParameterShare, RankGroup, make_mesh
    from slipstream.pipeline import Pipeline, SequenceLoss
    from slipstream.planner import OPEN, Plan, PlanReport
    from slipstream.planner.order.order_search import find_order, step_lower_bound
    from slipstream.planner.partition import partition_layers
    from slipstream.planner.report import write_report
    from slipstream.planner.search import PlanOptions
    from slipstream.planner.slicing.equal_stage_slicing import (
        slice_batch,
        slice_batch_with_flushes,
        slice_tokens,
        slicing_frontier,
    )
    from slipstream.planner.slicing.schedule_slicing import schedule_costs, slice_for_schedule
    from slipstream.schedule.action import Action, Op, ScheduleError
    from slipstream.schedule.generators import (
        SCHEDULES,
        ScheduleKind,
        gpipe,
        interleaved_one_f_one_b,
        make_schedule,
        one_f_one_b,
    )
    from slipstream.schedule.lowering import add_communication, split_backwards
    from slipstream.schedule.passes import add_offload, add_recompute, in_flushes
    from slipstream.schedule.rules import predecessors
    from slipstream.schedule.schedule import Schedule
    from slipstream.schedule.validation import validate
    from slipstream.sequential.cut_tokens import CutTokens, causal_attention
    from slipstream.sequential.layer_list import Skip
    from slipstream.simulator import CostModel, MeasuredCost, MicrobatchCost, TableCost, UnitCost, simulate
    from slipstream.timeline.chrome_trace import load_trace, save_trace
    from slipstream.timeline.picture import draw_timelines
    from slipstream.timeline.spans import Cause, Span, Timeline, Wait, find_waits, idle_by_cause

__all__ = ["Layers", "Memory", "Parallelism", "Pipeline", "Precision", "Runtime"]
__all__ += ["SequenceLoss", "SlipstreamError"]
__all__ += ["CutTokens", "Skip", "causal_attention", "check_sliceable", "sequence_of", "trust_remote_code"]
__all__ += ["ParameterShare", "RankGroup", "make_mesh"]
__all__ += ["OPEN", "Plan", "PlanOptions", "PlanReport", "load_cluster", "load_profile", "partition_layers", "plan"]
__all__ += ["write_report"]
__all__ += ["slice_batch", "slice_batch_with_flushes", "slice_for_schedule", "slice_tokens"]
__all__ += ["find_order", "schedule_costs", "slicing_frontier", "step_lower_bound"]
__all__ += ["SCHEDULES", "ScheduleKind", "gpipe", "interleaved_one_f_one_b", "make_schedule", "one_f_one_b"]
__all__ += ["Action", "Op", "Schedule", "ScheduleError", "predecessors", "validate"]
__all__ += ["add_communication", "add_offload", "add_recompute", "in_flushes", "split_backwards"]
__all__ += ["CostModel", "MeasuredCost", "MicrobatchCost", "TableCost", "UnitCost", "simulate"]
__all__ += ["Cause", "Span", "Timeline", "Wait", "draw_timelines", "find_waits", "idle_by_cause"]
__all__ += ["load_trace", "save_trace"]


def _find_homes() -> dict[str, str]:
    """Returns the module of every public name, as the imports above have it."""
    statements = ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    imports = [(each.names, each.module) for each in statements if isinstance(each, ast.ImportFrom) and each.module]
    return {alias.name: module for names, module in imports for alias in names if alias.name in __all__}


_HOMES = _find_homes()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
