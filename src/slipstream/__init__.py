"""Slipstream trains long-context language models over several devices by pipelining tokens inside a sequence."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.errors import SlipstreamError as SlipstreamError
    from slipstream.model.hf_sequential.planned_sequence import sequence_of as sequence_of
    from slipstream.model.self_check import check_sliceable as check_sliceable
    from slipstream.model.sequential.cut_tokens import CutTokens as CutTokens
    from slipstream.model.sequential.cut_tokens import causal_attention as causal_attention
    from slipstream.model.sequential.skip_connections import Skip as Skip
    from slipstream.options import Layers as Layers
    from slipstream.options import Memory as Memory
    from slipstream.options import Parallelism as Parallelism
    from slipstream.options import Precision as Precision
    from slipstream.options import Runtime as Runtime
    from slipstream.parallel import ParameterShare as ParameterShare
    from slipstream.parallel import RankGroup as RankGroup
    from slipstream.parallel import make_mesh as make_mesh
    from slipstream.pipeline.pipeline import Pipeline as Pipeline
    from slipstream.planner import Plan as Plan
    from slipstream.planner.costs import load_cluster as load_cluster
    from slipstream.planner.costs import load_profile as load_profile
    from slipstream.planner.order.best_order import find_order as find_order
    from slipstream.planner.order.best_order import step_lower_bound as step_lower_bound
    from slipstream.planner.partition import partition_layers as partition_layers
    from slipstream.planner.report.html_page import write_report as write_report
    from slipstream.planner.search import PlanOptions as PlanOptions
    from slipstream.planner.slicing import layer_sequence_costs as layer_sequence_costs
    from slipstream.planner.slicing import schedule_costs as schedule_costs
    from slipstream.planner.slicing import slice_batch as slice_batch
    from slipstream.planner.slicing import slice_batch_with_flushes as slice_batch_with_flushes
    from slipstream.planner.slicing import slice_for_schedule as slice_for_schedule
    from slipstream.planner.slicing import slice_for_stages as slice_for_stages
    from slipstream.planner.slicing import slice_tokens as slice_tokens
    from slipstream.planner.slicing import slicing_frontier as slicing_frontier
    from slipstream.planning.plan_model import plan as plan
    from slipstream.schedule import GENERATORS as GENERATORS
    from slipstream.schedule import STAGES_PER_RANK as STAGES_PER_RANK
    from slipstream.schedule import Action as Action
    from slipstream.schedule import Op as Op
    from slipstream.schedule import Schedule as Schedule
    from slipstream.schedule import ScheduleError as ScheduleError
    from slipstream.schedule import add_communication as add_communication
    from slipstream.schedule import add_offload as add_offload
    from slipstream.schedule import add_recompute as add_recompute
    from slipstream.schedule import gpipe as gpipe
    from slipstream.schedule import in_flushes as in_flushes
    from slipstream.schedule import interleaved_one_f_one_b as interleaved_one_f_one_b
    from slipstream.schedule import make_schedule as make_schedule
    from slipstream.schedule import one_f_one_b as one_f_one_b
    from slipstream.schedule import predecessors as predecessors
    from slipstream.schedule import split_backwards as split_backwards
    from slipstream.schedule import validate as validate
    from slipstream.simulator import CostModel as CostModel
    from slipstream.simulator import MeasuredCost as MeasuredCost
    from slipstream.simulator import TableCost as TableCost
    from slipstream.simulator import UnitCost as UnitCost
    from slipstream.simulator import simulate as simulate
    from slipstream.timeline import Cause as Cause
    from slipstream.timeline import Span as Span
    from slipstream.timeline import Timeline as Timeline
    from slipstream.timeline import Wait as Wait
    from slipstream.timeline import draw_timelines as draw_timelines
    from slipstream.timeline import find_waits as find_waits
    from slipstream.timeline import idle_by_cause as idle_by_cause
    from slipstream.timeline import load_trace as load_trace
    from slipstream.timeline import save_trace as save_trace

from slipstream.moved_modules import MovedModules as _MovedModules
from slipstream.version import __version__ as __version__

# Loaded on first use: schedules and simulation work, and the command line answers, without importing torch.
_NAMES = {
    "slipstream.errors": "SlipstreamError",
    "slipstream.model.hf_sequential.planned_sequence": "sequence_of",
    "slipstream.model.self_check": "check_sliceable",
    "slipstream.model.sequential.cut_tokens": "CutTokens causal_attention",
    "slipstream.model.sequential.skip_connections": "Skip",
    "slipstream.options": "Layers Memory Parallelism Precision Runtime",
    "slipstream.parallel": "ParameterShare RankGroup make_mesh",
    "slipstream.pipeline.pipeline": "Pipeline",
    "slipstream.planner": "Plan",
    "slipstream.planner.costs": "load_cluster load_profile",
    "slipstream.planner.order.best_order": "find_order step_lower_bound",
    "slipstream.planner.partition": "partition_layers",
    "slipstream.planner.report.html_page": "write_report",
    "slipstream.planner.search": "PlanOptions",
    "slipstream.planner.slicing": (
        "layer_sequence_costs schedule_costs slice_batch slice_batch_with_flushes slice_for_schedule slice_for_stages "
        "slice_tokens slicing_frontier"
    ),
    "slipstream.planning.plan_model": "plan",
    "slipstream.schedule": (
        "GENERATORS STAGES_PER_RANK Action Op Schedule ScheduleError add_communication add_offload add_recompute "
        "gpipe in_flushes interleaved_one_f_one_b make_schedule one_f_one_b predecessors split_backwards validate"
    ),
    "slipstream.simulator": "CostModel MeasuredCost TableCost UnitCost simulate",
    "slipstream.timeline": "Cause Span Timeline Wait draw_timelines find_waits idle_by_cause load_trace save_trace",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)

sys.meta_path.append(_MovedModules())


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
