"""The plan of a run whose configuration names no schedule, slices or partition: made, written down, and found again.

Rows of one length run the plan. For documents of any length it says the cut and what its stages cost, by which each
step is then planned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import yaml
from transformers import AutoConfig

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.model import find_anatomy, meta_model
from slipstream.model.adapters import Adapter, TrainedWeights, find_frozen
from slipstream.parallel import Ranks
from slipstream.pipeline.families import planned_vocabulary
from slipstream.pipeline.pipeline_options import PipelineOptions
from slipstream.pipeline.tuning import StartRequest, is_free, plan_start, with_plan
from slipstream.planner.joint import JointPlan, OutOfMemoryError
from slipstream.planner.steps import StageRates
from slipstream.schedule import AUTOMATIC, Schedule
from slipstream.training.config import Config
from slipstream.training.configured_pipeline import make_mesh_of
from slipstream.training.data import BatchSize, TrainingSequences
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

    It is empty where the run is planned, for one rank, and where order and slices are both given, so that nothing falls
    back to a default; but how steps on documents of any length are planned without measured costs is said then, too.
    """
    pipeline = config.pipeline
    by_step = config.data.packing == "none" and config.pipeline_options()["rates"] is None
    gives_slices = not {"slices", "microbatches"}.isdisjoint(pipeline.model_fields_set) and pipeline.slices != "auto"
    is_given = "schedule" in pipeline.model_fields_set and pipeline.schedule not in AUTOMATIC and gives_slices
    if (is_given and not by_step) or pipeline.num_ranks == 1 or is_open(config):
        return ""
    sections = {"pipeline": pipeline, "memory": config.memory}
    given = [
        f"{name}.{setting}={getattr(section, setting)}"
        for name, section in sections.items()
        for setting in _DECIDED[name]
        if setting in section.model_fields_set and getattr(section, setting) != "auto"
    ]
    are, them = ("is", "it") if len(given) == 1 else ("are", "them")
    instead = "plans each step by multiplications, not by measured times"
    if not by_step:
        instead = "plans nothing before its first step"
    return (
        f"{' and '.join(given)} {are} given, so the run {instead}: schedule="
        f"{pipeline.schedule}, slices={pipeline.slices}, partition={pipeline.partition}. Leave {them} out for a plan."
    )


def is_open(config: Config) -> bool:
    """Returns whether everything that a plan decides is left to it; documents of any length don't say how long."""
    return is_free(PipelineOptions(**config.pipeline_options() | {"seq_len": config.training.seq_len}))


def start_settings(
    config: Config,
    sequences: TrainingSequences,
    device: torch.device,
    progress: Progress,
    earlier: Mapping[str, Any] | None,
    resumes: bool,
    planned: Callable[[JointPlan], None] = lambda plan: None,
) -> dict[str, Any]:
    """Returns the schedule, slices and partition, the memory settings, and for documents of any length the rates of the
    stages, as `make_pipeline` takes them. Collective.

    They are those of `earlier`, what the checkpoint says that the run resumes from: it neither measures nor searches.
    Else they are planned from measured costs, and written to the run's folder. Nothing where the configuration gives
    any of them; where the model can't be measured, 1f1b with 8 slices, for documents nothing, and a line that says why.
    `planned` gets the plan of rows, where one is made.

    Raises OutOfMemoryError where nothing fits the memory limit.
    """
    options = PipelineOptions(**config.pipeline_options())
    are_documents = sequences.packing == "none"
    if not is_open(config) or config.pipeline.num_ranks == 1:
        return {}
    otherwise = "steps are planned by multiplications" if are_documents else "the run uses schedule=1f1b with 8 slices"
    if earlier is not None and (found := _found_again(config, earlier)):
        return found
    if resumes and earlier is None and are_documents:
        progress.warn(f"the checkpoint has no measured costs, so {otherwise}")
        return {}
    try:
        plan, rates = _plan(config, _request(config, sequences), options, device, progress)
    except OutOfMemoryError:
        raise
    except SlipstreamError as error:
        progress.warn(f"no plan could be made, so {otherwise}: {error}")
        return {} if are_documents else dict(_FALLBACK)
    progress.say(plan.table())
    if not are_documents:
        planned(plan)
    folder = RunFolder(config.training.output)
    if Ranks.of().leads:
        _write(config, plan, rates if are_documents else None, folder)
    progress.say(f"wrote the plan to {folder.plan}, from which another run can start at once")
    chosen = with_plan(options, plan)
    settings = {name: getattr(chosen, name) for name in ("schedule", "slices", "partition", "memory")}
    return settings | ({"slices": len(plan.slices), "rates": rates} if are_documents else {})


def _request(config: Config, sequences: TrainingSequences) -> StartRequest:
    """Returns what is planned for: rows of one length, or the cut for documents of the typical length."""
    pipeline, training, replicas = config.pipeline, config.training, config.parallel.data
    request = StartRequest(
        seq_len=training.seq_len,
        microbatch_size=-(-(training.batch_size // replicas) // pipeline.num_microbatches),
        num_microbatches=pipeline.num_microbatches,
        num_ranks=pipeline.num_ranks,
        dtype=_DTYPES.get(training.precision, "float32"),
        memory_limit=config.memory.limit,
        parallel=config.parallel,
    )
    if sequences.packing == "fixed":
        return request
    step = request.granularity
    typical = max(1, round(sequences.typical_length / step)) * step
    tokens = BatchSize(training.batch_size, training.batch_tokens).mean(sequences) * sequences.mean_length / replicas
    # More only fill the pipeline further, which changes no cut but takes long to search.
    number = min(max(1, round(tokens / typical)), 2 * pipeline.num_ranks)
    return replace(
        request,
        seq_len=min(typical, training.seq_len),
        microbatch_size=1,
        num_microbatches=max(number, pipeline.num_microbatches),
        longest=training.seq_len,
    )


def _plan(
    config: Config, request: StartRequest, options: PipelineOptions, device: torch.device, progress: Progress
) -> tuple[JointPlan, StageRates]:
    model_config = AutoConfig.from_pretrained(RunFolder(config.training.output).inputs, trust_remote_code=False)
    ranks, num_ranks = Ranks.of(make_mesh_of(config, device)), config.pipeline.num_ranks
    anatomy = ranks.decided(lambda: find_anatomy(model_config))
    vocabulary = ranks.decided(
        lambda: planned_vocabulary(model_config, anatomy, num_ranks, config.parallel.tensor, options)
    )
    trained = ranks.decided(lambda: _trained_weights(config, model_config))
    request = replace(request, vocabulary=vocabulary, tied=bool(anatomy.tied), trained=trained)
    with progress.waiting("planning: what the model's parts cost, then the search"):
        return plan_start(model_config, request, ranks, device, progress.say)


def _trained_weights(config: Config, model_config: Any) -> TrainedWeights:
    """Returns what the run trains."""
    if config.lora is not None:
        return TrainedWeights(adapter=Adapter("default", config.lora.peft_config(str(config.model.path))))
    return TrainedWeights(find_frozen(meta_model(model_config), config.model.freeze, "model.freeze"))


def facts_of_documents(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns what a checkpoint keeps of `start_settings` for documents of any length; None where it has no rates."""
    if "rates" not in settings:
        return None
    return {
        "schedule": str(settings["schedule"]),
        "slices": settings["slices"],
        "partition": settings["partition"],
        "recompute": settings["memory"].recompute,
        "rates": settings["rates"].to_json(),
    }


def earlier_choices(config: Config, facts: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the schedule and slices that a checkpoint's facts say; None where the run trains other parts of the model
    than before, for which another cut is best, and of which other stages have no backward."""
    before = (facts.get("settings") or {}).get("model", {}).get("freeze", [])
    tuned: Mapping[str, Any] | None = facts["tuned"]
    return tuned if sorted(before) == sorted(config.model.freeze) else None


def _found_again(config: Config, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what an earlier run chose; nothing where this run has other ranks, microbatches or sequences."""
    schedule = Schedule.parse(earlier["schedule"])
    pipeline, rates = config.pipeline, earlier.get("rates")
    if schedule.num_ranks != pipeline.num_ranks or (rates is None) != (config.data.packing == "fixed"):
        return {}
    if rates is None:
        counts = schedule.num_microbatches, sum(earlier["slices"])
        if counts != (pipeline.num_microbatches, config.training.seq_len):
            return {}
    # Older checkpoints say neither: their layers were balanced, and kept all activations.
    chosen = {"partition": earlier.get("partition", "auto"), "slices": earlier["slices"]}
    memory = config.memory.model_copy(update={"recompute": earlier.get("recompute", "none")})
    measured = {} if rates is None else {"rates": StageRates.from_json(rates)}
    return {"schedule": schedule, "memory": memory, **chosen, **measured}


def _write(config: Config, plan: JointPlan, rates: StageRates | None, folder: RunFolder) -> None:
    """Writes the plan as a training configuration, without the text to train on and the folder for results; for
    documents of any length with the rates of its stages."""
    folder.listed.add(folder.plan, folder.planned_schedule)
    with folder.replaced(folder.planned_schedule) as part:
        part.write_text(f"{plan.schedule}\n", encoding="utf-8")
    training = config.training
    settings = {
        "model": config.model.model_dump(mode="json", exclude_defaults=True),
        "pipeline": {
            "num_ranks": config.pipeline.num_ranks,
            "num_microbatches": config.pipeline.num_microbatches,
            "schedule": folder.planned_schedule.name,
            "slices": list(plan.slices) if rates is None else len(plan.slices),
            "partition": list(plan.partition),
            "vocabulary": plan.head,
        },
        "memory": {"recompute": "full" if plan.recompute else "none"},
        "parallel": {"data": 1, **config.parallel.model_dump(mode="json", exclude_defaults=True)},
        "training": {"seq_len": training.seq_len, **_batch(config), "precision": training.precision},
        "plan": {"predicted": {name: float(f"{getattr(plan, name):.6g}") for name in ("seconds", "bound", "ideal")}},
    }
    if config.lora is not None:
        settings["lora"] = config.lora.model_dump(mode="json", exclude_defaults=True)
    if rates is not None:
        settings["data"] = {"packing": config.data.packing}
        settings["plan"]["rates"] = rates.to_json()
    source = "corpus=python-stdlib"
    if config.preference is not None:
        settings["preference"], source = config.preference.model_dump(mode="json"), "dataset=pairs.jsonl"
    text = yaml.safe_dump(settings, sort_keys=False, default_flow_style=None, width=120)
    train = f"slipstream train {folder.plan} --data.{source} --training.output=runs/x --training.steps=10"
    with folder.replaced(folder.plan) as part:
        part.write_text(f"# Written by `slipstream train`.\n# {train}\n{text}", encoding="utf-8")


def _batch(config: Config) -> dict[str, int]:
    """Returns what a step takes, as it was given."""
    training = config.training
    if training.batch_tokens is not None:
        return {"batch_tokens": training.batch_tokens}
    return {"batch_size": training.batch_size}
