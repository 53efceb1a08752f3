"""The public names are these; one that comes or goes is a decision."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import slipstream
from support.forked import run_alone

NAMES = [
    "Action",
    "Cause",
    "CostModel",
    "CutTokens",
    "Layers",
    "MeasuredCost",
    "Memory",
    "MicrobatchCost",
    "OPEN",
    "Op",
    "Parallelism",
    "ParameterShare",
    "Pipeline",
    "Plan",
    "PlanOptions",
    "PlanReport",
    "Precision",
    "RankGroup",
    "Runtime",
    "SCHEDULES",
    "Schedule",
    "ScheduleError",
    "ScheduleKind",
    "SequenceLoss",
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
    "slice_tokens",
    "slicing_frontier",
    "split_backwards",
    "step_lower_bound",
    "trust_remote_code",
    "validate",
    "write_report",
]


def test_public_names() -> None:
    assert sorted(slipstream.__all__) == NAMES
    assert all(getattr(slipstream, name).__doc__ for name in NAMES)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'pipelines'"):
        _ = slipstream.pipelines


# What answers at once, in this order, and what has not been imported then.
AT_ONCE = [
    ("import slipstream.cli", "torch transformers numpy pydantic"),
    ("import slipstream.schedule, slipstream.simulator.simulation", "torch matplotlib numpy"),
    ("slipstream.simulate(slipstream.one_f_one_b(2, 1, 4), slipstream.UnitCost())", "torch"),
    ("slipstream.partition_layers([1, 2, 3], 2)", "torch"),
    ("import slipstream.planner", "torch numba"),
    ("slipstream.slice_tokens(lambda i, j: 1 + i * 1.0, 4096, 8, granularity=64)", "torch numba scipy"),
]


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    """Schedules, simulation, small plans and the command line's help answer without loading torch."""
    checked = [f"{code}\nassert not {{*{heavy.split()}}} & {{*sys.modules}}, {code!r}" for code, heavy in AT_ONCE]
    program = "\n".join(["import sys, slipstream", *checked])
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_a_rank_starts_without_packages_that_only_some_runs_need(tmp_path: Path) -> None:
    """PEFT and bitsandbytes would cost each a second; the process that is forked has loaded what ranks load."""
    program = tmp_path / "program.py"
    names = "{'slipstream.train.training_rank', 'peft', 'bitsandbytes'}"
    program.write_text(f"import sys\nprint({names} & {{*sys.modules}})\n")
    assert run_alone(program).stdout == "{'slipstream.train.training_rank'}\n"
