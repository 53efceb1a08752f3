"""Modules that earlier documentation named: importing one raises an error that says where its names are now."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec

NEW_NAMES = {
    "slipstream.cost": "slipstream.UnitCost, TableCost and MeasuredCost",
    "slipstream.memory": "slipstream.simulator.memory_of and MemoryTable",
    "slipstream.model.cut_tokens": "slipstream.CutTokens and causal_attention",
    "slipstream.model.hf_sequence": "slipstream.sequence_of",
    "slipstream.model.skips": "slipstream.Skip",
    "slipstream.parallel.group": "slipstream.RankGroup",
    "slipstream.parallel.mesh": "slipstream.make_mesh",
    "slipstream.parallel.shares": "slipstream.ParameterShare",
    "slipstream.picture": "slipstream.draw_timelines",
    "slipstream.pipeline.sequence_partition": "slipstream.pipeline.families.Balance",
    "slipstream.planner.batch_slicing": "slipstream.slice_batch and slice_batch_with_flushes",
    "slipstream.planner.configuration": "slipstream.Plan",
    "slipstream.planner.ordering": "slipstream.find_order and step_lower_bound",
    "slipstream.planner.schedule_slicing": "slipstream.slice_for_schedule and schedule_costs",
    "slipstream.planner.sequence_slices": "slipstream.layer_sequence_costs",
    "slipstream.planner.space": "slipstream.PlanOptions",
    "slipstream.planner.unequal_stages": "slipstream.slice_for_stages",
    "slipstream.profiler.planning": "slipstream.plan",
    "slipstream.trace": "slipstream.load_trace and save_trace",
    "slipstream.training.checkpoint": (
        "slipstream.checkpoint.Checkpoints, TensorShard, SavedCheckpoint and CheckpointReader"
    ),
    "slipstream.waits": "slipstream.find_waits and idle_by_cause",
}


class MovedModules(MetaPathFinder):
    """The first finder on `sys.meta_path`: it finds nothing, and explains why."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        if fullname in NEW_NAMES:
            raise ModuleNotFoundError(f"{fullname} has moved: use {NEW_NAMES[fullname]}", name=fullname)
        return None
