"""The plan of a run whose configuration names no schedule, slices or partition: made, written down, and found again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import yaml
from transformers import AutoConfig

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.model import find_anatomy
from slipstream.parallel import Ranks
from slipstream.pipeline.families import planned_vocabulary
from slipstream.pipeline.pipeline_options import PipelineOptions
from slipstream.pipeline.tuning import StartRequest, is_free, plan_start, with_plan
from slipstream.planner.joint import JointPlan
from slipstream.schedule import AUTOMATIC, Schedule
from slipstream.training.config import Config
from slipstream.training.configured_pipeline import make_mesh_of
from slipstream.training.run_folder import RunFolder

# The settings by section that a plan decides, or keeps as they are by default
_DECIDED = {
    "pipeline": ("schedule", "slices", "microbatches", "partition", "stages_per_rank"),
    "memory": ("recompute", "offload", "num_flushes"),
}
_FALLBACK = {"schedule": "1f1b", "slices": 8}
_DTYPES = {"bf16-weights": "bfloat16", "bf16": "bf16"}  # in which layers are measured, by training.precision


def what_prevents_a_plan(config: Config) -> str:
    """Returns a line about the settings that keep the run from planning itself, and what it does instead.

    It is empty where the run is planned, where order and slices are both given, so that nothing falls back to a
    default, for one rank, and for sequences of different lengths, of which each step has its own plan.
    """
    pipeline, has_lengths = config.pipeline, config.data.packing == "none"
    gives_slices = not {"slices", "microbatches"}.isdisjoint(pipeline.model_fields_set) and pipeline.slices != "auto"
    is_given = "schedule" in pipeline.model_fields_set and pipeline.schedule not in AUTOMATIC and gives_slices
    if is_given or pipeline.num_ranks == 1 or has_lengths or is_free(PipelineOptions(**config.pipeline_options())):
        return ""
    sections = {"pipeline": pipeline, "memory": config.memory}
    given = [
        f"{name}.{setting}={getattr(section, setting)}"
        for name, section in sections.items()
        for setting in _DECIDED[name]
        if setting in section.model_fields_set and getattr(section, setting) != "auto"
    ]
    are, them = ("is", "it") if len(given) == 1 else ("are", "them")
    return (
        f"{' and '.join(given)} {are} given, so the run plans nothing before its first step: schedule="
        f"{pipeline.schedule}, slices={pipeline.slices}, partition={pipeline.partition}. Leave {them} out for a plan."
    )


def start_settings(
    config: Config, device: torch.device, progress: Progress, earlier: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns the schedule, slices and partition, and the memory settings, as `make_pipeline` takes them. Collective.

    They are those of `earlier`, what the checkpoint says that the run resumes from: it neither measures nor searches.
    Else they are planned from measured costs, and written to the run's folder. Nothing where the configuration gives
    any of them; where the model can't be measured, 1f1b with 8 slices, and a line that says why.
    """
    options = PipelineOptions(**config.pipeline_options())
    if not is_free(options) or config.pipeline.num_ranks == 1:
        return {}
    if earlier is not None and (found := _found_again(config, earlier)):
        return found
    try:
        plan = _plan(config, options, device, progress)
    except SlipstreamError as error:
        progress.say(f"no plan could be made, so the run uses schedule=1f1b with 8 slices: {error}")
        return dict(_FALLBACK)
    progress.say(plan.table())
    folder = RunFolder(config.training.output)
    if Ranks.of().leads:
        _write(config, plan, folder)
    progress.say(f"wrote the plan to {folder.plan}, from which another run can start at once")
    planned = with_plan(options, plan)
    return {name: getattr(planned, name) for name in ("schedule", "slices", "partition", "memory")}


def _plan(config: Config, options: PipelineOptions, device: torch.device, progress: Progress) -> JointPlan:
    model_config = AutoConfig.from_pretrained(RunFolder(config.training.output).inputs)
    ranks = Ranks.of(make_mesh_of(config, device))
    anatomy = ranks.decided(lambda: find_anatomy(model_config))
    num_ranks = config.pipeline.num_ranks
    rows = config.training.batch_size // config.parallel.data
    request = StartRequest(
        seq_len=config.training.seq_len,
        microbatch_size=-(-rows // config.pipeline.num_microbatches),
        num_microbatches=config.pipeline.num_microbatches,
        num_ranks=num_ranks,
        dtype=_DTYPES.get(config.training.precision, "float32"),
        memory_limit=config.memory.limit,
        vocabulary=ranks.decided(
            lambda: planned_vocabulary(model_config, anatomy, num_ranks, config.parallel.tensor, options)
        ),
        tied=bool(anatomy.tied),
        parallel=config.parallel,
    )
    with progress.waiting("planning: measuring what the model's parts cost, then searching"):
        plan, _ = plan_start(model_config, request, ranks, device, progress.say)
    return plan


def _found_again(config: Config, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what an earlier run chose; nothing where this run has other ranks, microbatches or sequences."""
    schedule = Schedule.parse(earlier["schedule"])
    pipeline = config.pipeline
    counts = schedule.num_ranks, schedule.num_microbatches, sum(earlier["slices"])
    if counts != (pipeline.num_ranks, pipeline.num_microbatches, config.training.seq_len):
        return {}
    # Older checkpoints say neither: their layers were balanced, and kept all activations.
    chosen = {"partition": earlier.get("partition", "auto"), "slices": earlier["slices"]}
    memory = config.memory.model_copy(update={"recompute": earlier.get("recompute", "none")})
    return {"schedule": schedule, "memory": memory, **chosen}


def _write(config: Config, plan: JointPlan, folder: RunFolder) -> None:
    """Writes the plan as a training configuration, without the text to train on and the folder for results."""
    folder.planned_schedule.write_text(f"{plan.schedule}\n", encoding="utf-8")
    training = config.training
    settings = {
        "model": config.model.model_dump(mode="json", exclude_defaults=True),
        "pipeline": {
            "num_ranks": config.pipeline.num_ranks,
            "num_microbatches": config.pipeline.num_microbatches,
            "schedule": folder.planned_schedule.name,
            "slices": list(plan.slices),
            "partition": list(plan.partition),
            "vocabulary": plan.head,
        },
        "memory": {"recompute": "full" if plan.recompute else "none"},
        "parallel": {"data": 1, **config.parallel.model_dump(mode="json", exclude_defaults=True)},
        "training": {
            "seq_len": training.seq_len,
            "batch_size": training.batch_size,
            "precision": training.precision,
        },
        "plan": {"predicted": {name: float(f"{getattr(plan, name):.6g}") for name in ("seconds", "bound", "ideal")}},
    }
    text = yaml.safe_dump(settings, sort_keys=False, default_flow_style=None, width=120)
    train = f"slipstream train {folder.plan} --data.corpus=python-stdlib --training.output=runs/x --training.steps=10"
    folder.plan.write_text(f"# Written by `slipstream train`.\n# {train}\n{text}", encoding="utf-8")
