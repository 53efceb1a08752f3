"""The options of a Pipeline that a plan decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slipstream.options import Memory, Parallelism
from slipstream.pipeline.pipeline_options import PipelineOptions
from slipstream.planner import OPEN, Plan

# The ranks and the microbatches are there before a plan is made for them, and an order says how the head is kept.
_OF_STAGES = ("schedule", "slices", "stages_per_rank", "partition")


def decided_options(plan: Plan, memory: Memory, parallel: Parallelism) -> dict[str, Any]:
    """Returns the options that a plan decides, by their names.

    What is open in the plan is left out; `memory` and `parallel` have the settings beside its own. What is on the host,
    and how many tokens have logits at a time, is among these: no plan of stages and orders decides it.
    """
    sections = replace(plan, context=OPEN, optimizer=OPEN, loss_tokens=OPEN).settings()
    options = {name: sections["pipeline"][name] for name in _OF_STAGES if name in sections["pipeline"]}
    # Layers that take whole microbatches accept slices=1 only, and no list of lengths.
    if options.get("slices") == [1]:
        options["slices"] = 1
    if sections["memory"]:
        options["memory"] = memory.model_copy(update=sections["memory"])
    if "context_exchange" in sections["parallel"]:
        options["parallel"] = parallel.exchanging(sections["parallel"]["context_exchange"])
    return options


def with_plan(options: PipelineOptions, plan: Plan, names: Sequence[str] | None = None) -> PipelineOptions:
    """Returns the options in which a plan's decisions are given: all of them, or the fields with these names."""
    plan = plan if names is None else plan.only(names)
    return replace(options, **decided_options(plan, options.memory, options.parallel))
