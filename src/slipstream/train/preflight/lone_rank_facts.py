"""The facts about a run of one rank on this machine: its slices, what a step holds, and the memory that is here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from slipstream.errors import SlipstreamError
from slipstream.machine_memory import machine_memory
from slipstream.parallel import Ranks
from slipstream.pipeline import CausalLMFamily, ExpectedBatch, LoneRankPlans, PipelineOptions
from slipstream.schedule import Schedule
from slipstream.train.config import Config
from slipstream.train.configured_pipeline import RunModel, source_of
from slipstream.train.device_choice import choose_device_type, memory_of_a_rank
from slipstream.train.training_step import compute_dtype
from slipstream.units import bytes_text


def lone_rank_facts(config: Config, model_config: Any) -> Iterator[tuple[str, str]]:
    """Yields the name and the text of each fact about a run of one rank; nothing about a run of several."""
    if config.num_processes > 1:
        return
    yield "slices", _slices(config, model_config)
    if choose_device_type(config) == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        yield "this GPU", f"{gpu.name}, {bytes_text(gpu.total_memory)}"
    machine = machine_memory()
    limited = "" if machine.limit is None else f", limited to {bytes_text(machine.limit)} (cgroup)"
    yield "this machine", f"{bytes_text(machine.total)}{limited}, {bytes_text(machine.free)} free"


def _slices(config: Config, model_config: Any) -> str:
    """Returns the slices that the run would take and what they hold, or what to type where none fit."""
    training = config.training
    rows = 1
    if config.data.packing == "fixed":
        rows = -(-training.batch_size // config.pipeline.num_microbatches)
    dtype = str(compute_dtype(config)).removeprefix("torch.")
    expected = ExpectedBatch(training.seq_len, rows, dtype=dtype, device_memory=memory_of_a_rank(config))
    options = PipelineOptions(**config.pipeline_options() | {"seq_len": expected})
    options = replace(options, runtime=config.runtime.model_copy(update={"self_check": False}))
    if options.is_measured or options.microbatches is not None or isinstance(options.schedule, Schedule):
        return "not counted: they are measured, or given with the order or the microbatches"
    try:
        family = CausalLMFamily(source_of(config, RunModel(model_config)), options, Ranks.of(), torch.device("cpu"))
        plans = family.counted_plans(options, 1)
        assert isinstance(plans, LoneRankPlans)
        return plans.report(options)
    except SlipstreamError as error:
        return str(error)
