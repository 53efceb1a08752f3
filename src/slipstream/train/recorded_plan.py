"""The plan of what a run's configuration leaves open: asked for, written down, found again.

The Pipeline makes it: from measured costs where no schedule, slices, partition or stages a rank are named, else by
counted operations. Rows of one length run the plan. For documents of any length it has the cut and, where measured, its
stages' rates, by which each step is then planned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slipstream.checkpoint import SavedCheckpoint
from slipstream.cluster_plans.plan_file import plan_text, rounded
from slipstream.launch import Progress
from slipstream.number_format import PRECISIONS
from slipstream.options import Degrees
from slipstream.pipeline import (
    ExpectedBatch,
    Pipeline,
    PipelineOptions,
    decided_options,
    is_counted,
    is_free,
)
from slipstream.planner import OPEN, Plan, placement_of
from slipstream.planner.cuts import Cuts
from slipstream.planner.joint import JointPlan
from slipstream.planner.ragged import StageRates
from slipstream.planner.report import fused_advice
from slipstream.schedule import AUTOMATIC, SCHEDULES, USUAL_SCHEDULE, Schedule, placed_as
from slipstream.train.config import DECIDED_BY_PLAN, Config
from slipstream.train.data import BatchSize, TrainingSequences
from slipstream.train.device_choice import memory_of_a_rank
from slipstream.train.run_context import RunContext


def plan_obstacle(config: Config) -> str:
    """Returns a line about the settings that keep the run from planning itself, and its fallback.

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
    given = {
        f"{name}.{setting}={getattr(section, setting)}": getattr(section, setting)
        for name, section in sections.items()
        for setting in DECIDED_BY_PLAN[name]
        if setting in section.model_fields_set
    }
    # "auto" beside defaults keeps the run from planning itself too.
    names = [name for name, value in given.items() if value != "auto"] or [*given]
    are, them = ("is", "it") if len(names) == 1 else ("are", "them")
    choices = "schedule", "slices", "partition", "stages_per_rank"
    if is_counted_open(config) and not by_step:
        left = ", ".join(name for name in choices if getattr(pipeline, name) in (None, "auto"))
        return (
            f"{' and '.join(names)} {are} given, so the run measures nothing: what is left open ({left}) is planned by "
            f"counted operations. Leave {them} out for a plan from measured costs."
        )
    instead = "plans nothing before its first step"
    if by_step:
        instead = "plans each step by multiplications, not by measured times"
    settings = ", ".join(f"{name}={value}" for name in choices if (value := getattr(pipeline, name)) is not None)
    return f"{' and '.join(names)} {are} given, so the run {instead}: {settings}. Leave {them} out for a plan."


def fused_advice_of(config: Config) -> str:
    """Returns what fused kernels would gain by the account of the plan file that the configuration comes from, and what
    to type; "" where that is little or unknown, and where they run already."""
    gain = config.plan.predicted.get("fused_gain")
    if config.runtime.fused or not isinstance(gain, float):
        return ""
    return fused_advice(gain, "--runtime.fused=true")


def is_open(config: Config) -> bool:
    """Returns whether everything that a plan decides is left to it; documents of any length don't say how long."""
    options = PipelineOptions(**config.pipeline_options() | {"seq_len": config.training.seq_len})
    return is_free(options)


def is_counted_open(config: Config) -> bool:
    """Returns whether something is left open that the Pipeline plans by counted operations."""
    return is_counted(PipelineOptions(**config.pipeline_options()), config.pipeline.num_ranks)


def start_settings(run: RunContext, sequences: TrainingSequences, saved: SavedCheckpoint | None) -> dict[str, Any]:
    """Returns the arguments of `make_pipeline` by which it keeps the plan of the checkpoint that it resumes from, or
    else plans itself. Nothing where the configuration gives any of a plan's choices."""
    config = run.config
    chosen = None if saved is None else _chosen_before(config, saved.facts)
    if chosen is not None and (settings := chosen_settings(config, chosen)):
        return settings
    if not is_open(config):
        if not is_counted_open(config):
            return {}
        given_before = {} if saved is None else _given_before(config, saved.facts)
        return given_before or {"seq_len": expected_batch(config, sequences, run.progress)}
    if saved is not None and chosen is None and sequences.packing == "none":
        run.progress.warn("the checkpoint has no measured costs, so steps are planned by multiplications")
        return {}
    return {"seq_len": expected_batch(config, sequences, run.progress)}


def _chosen_before(config: Config, facts: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the choices in a checkpoint's facts; None where the run trains other parts of the model than before, for
    which another cut is best, and of which other stages have no backward."""
    frozen = facts["settings"]["model"]["freeze"]
    chosen: Mapping[str, Any] | None = facts["tuned"]
    return chosen if sorted(frozen) == sorted(config.model.freeze) else None


def _given_before(config: Config, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is open now and was settled in a checkpoint's configuration: by the defaults of an earlier version,
    1f1b in 8 slices, where it was open too. Nothing where it was planned."""
    before = facts["settings"]["pipeline"]
    now = config.pipeline
    if facts["mesh"].get("pp") != now.num_ranks:
        return {}
    settled = "schedule", "slices", "stages_per_rank"
    return {name: before[name] for name in settled if getattr(now, name) is None and before[name] is not None}


def chosen_settings(config: Config, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the choices, as `make_pipeline` takes them, where the configuration leaves them open; nothing where the
    run has other ranks, stages, microbatches or sequences now."""
    pipeline = config.pipeline
    memory = config.memory
    plan = recorded_plan(chosen)
    schedule = plan.schedule
    assert isinstance(schedule, Schedule), "a checkpoint has the order itself"
    rates = chosen.get("rates")
    # A single rank's slices follow from its memory, and its stages need no plan.
    if rates is None and config.data.packing == "none" and is_counted_open(config):
        return {} if pipeline.num_ranks == 1 else _counted_stages(config, plan)
    if (rates is None) != (config.data.packing == "fixed"):
        return {}
    counts = pipeline.num_microbatches, config.training.seq_len
    if rates is None and (schedule.num_microbatches, sum(plan.slices)) != counts:
        return {}
    if is_open(config):
        if schedule.num_ranks != pipeline.num_ranks:
            return {}
        now = config.parallel.degrees
        if now.exchange != "auto" or plan.degrees._replace(exchange="auto") != now:
            plan = replace(plan, context_exchange=OPEN)
        settings = decided_options(plan, memory, config.parallel)
        return settings if rates is None else settings | {"rates": StageRates.from_json(rates)}
    if rates is not None:
        return {}
    if is_counted_open(config):
        return _counted_settings(config, plan)
    if not (pipeline.schedule in AUTOMATIC or pipeline.slices == "auto"):
        return {}
    stages = pipeline.fewest_stages
    name = placed_as(pipeline.schedule or USUAL_SCHEDULE, stages)
    if schedule.placement != placement_of(name, pipeline.num_ranks, stages):
        return {}
    settings = decided_options(plan.only(["schedule", "slices"]), memory, config.parallel)
    return settings | {"memory": memory.model_copy(update={"num_flushes": 1})}


def _counted_stages(config: Config, plan: Plan) -> dict[str, Any]:
    """Returns the cut for documents of any length, where it is open and fits the ranks."""
    pipeline = config.pipeline
    schedule = plan.schedule
    assert isinstance(schedule, Schedule), "a checkpoint has the order itself"
    stages = len(schedule.placement) // pipeline.num_ranks
    is_open_cut = pipeline.partition == "auto" and pipeline.stages_per_rank in (None, stages)
    if schedule.num_ranks != pipeline.num_ranks or not is_open_cut:
        return {}
    of_stages = Plan(partition=plan.partition, stages_per_rank=stages)
    return decided_options(of_stages, config.memory, config.parallel)


def _counted_settings(config: Config, plan: Plan) -> dict[str, Any]:
    """Returns the choices of what is open, beside what is given; nothing where the two don't fit together."""
    pipeline = config.pipeline
    schedule = plan.schedule
    assert isinstance(schedule, Schedule), "a checkpoint has the order itself"
    stages = len(schedule.placement) // pipeline.num_ranks
    slices = [*plan.slices] if pipeline.slices is None else pipeline.slices
    num_slices = slices if isinstance(slices, int) else len(slices)
    is_other = pipeline.partition not in ("auto", [*plan.partition])
    if schedule.num_ranks != pipeline.num_ranks or schedule.num_slices != num_slices or is_other:
        return {}
    if pipeline.stages_per_rank not in (None, stages):
        return {}
    names = ["partition"]
    if pipeline.slices is None:
        names.append("slices")
    if config.memory.recompute == "none":
        names.append("recompute")
    decided = plan.only(names)
    if pipeline.schedule is None:
        memory = config.memory.model_copy(update={"num_flushes": 1})
        settings = decided_options(replace(decided, schedule=schedule), memory, config.parallel)
        return {"memory": memory} | settings
    if stages not in SCHEDULES[pipeline.schedule].stages_per_rank:
        return {}
    if schedule.placement != placement_of(pipeline.schedule, pipeline.num_ranks, stages):
        return {}
    return decided_options(replace(decided, stages_per_rank=stages), config.memory, config.parallel)


def recorded_plan(chosen: Mapping[str, Any]) -> Plan:
    """Returns the plan in a checkpoint's facts.

    Older ones have its fields next to each other, and the degrees as a list.
    """
    if "plan" in chosen:
        return Plan.load(chosen["plan"])
    pipeline = {name: chosen[name] for name in ("schedule", "slices", "partition")}
    degrees = Degrees(*chosen["degrees"])
    memory = {"recompute": chosen["recompute"]}
    return Plan.load({"pipeline": pipeline, "memory": memory, "parallel": degrees.settings})


def chosen_facts(pipe: Pipeline, sequences: TrainingSequences, rates: StageRates | None) -> dict[str, Any] | None:
    """Returns a checkpoint's record of the plan: order, slices, layers of each stage, and recomputation.

    Of documents of any length, each step of which is planned anew, it has the stages' `rates`, if these were measured.
    None where neither rates nor stages were planned, and while "auto" is still to plan.
    """
    is_by_step = sequences.packing == "none"
    recompute = pipe.layout.recompute
    if rates is None and not pipe.is_counted if is_by_step else pipe.is_tuning:
        return None
    plan = Plan(**pipe.degrees.choices, recompute="none" if recompute is None else str(recompute.setting)).closed(
        schedule=pipe.order,
        slices=OPEN if is_by_step else tuple(pipe.slices(sequences.seq_len)),
        partition=tuple(stage.stop - stage.start for stage in pipe.layout.layers),
    )
    return {"plan": plan.dump(), **({} if rates is None else {"rates": rates.to_json()})}


def expected_batch(config: Config, sequences: TrainingSequences, progress: Progress) -> ExpectedBatch:
    """Returns the batch that is planned for: rows of one length, or the cut for documents of the typical length."""
    pipeline = config.pipeline
    training = config.training
    replicas = config.parallel.data
    dtype = PRECISIONS[training.precision].measured
    say = progress.say
    memory = memory_of_a_rank(config)
    if sequences.packing == "fixed":
        rows = -(-training.batch_size // (replicas * pipeline.num_microbatches))
        return ExpectedBatch(training.seq_len, rows, dtype=dtype, say=say, device_memory=memory)
    step = Cuts.of_rows(training.seq_len).granularity
    typical = max(1, round(sequences.typical_length / step)) * step
    tokens = BatchSize.of(training).mean(sequences) * sequences.mean_length / replicas
    # More only fill the pipeline further, which changes no cut but takes long to search.
    num_documents = max(min(max(1, round(tokens / typical)), 2 * pipeline.num_ranks), pipeline.num_microbatches)
    return ExpectedBatch(
        min(typical, training.seq_len),
        num_microbatches=num_documents,
        longest=training.seq_len,
        dtype=dtype,
        say=say,
        device_memory=memory,
    )


def record_plan(run: RunContext, pipe: Pipeline, sequences: TrainingSequences) -> JointPlan | None:
    """Writes the plan that the Pipeline made before its first step to the run's folder, and returns it. Collective.

    None where it made none.
    """
    plan = pipe.plan
    if plan is None:
        return None
    run.progress.say(plan.table())
    if run.world.rank == 0:
        _write(run.config, plan, pipe.rates if sequences.packing == "none" else None)
    run.progress.say(f"wrote the plan to {run.folder.plan}, from which another run can start at once")
    return plan


def _write(config: Config, plan: JointPlan, rates: StageRates | None) -> None:
    """Writes the plan as a training configuration, without the text to train on and the folder for results; for
    documents of any length with the rates of its stages."""
    folder = config.folder
    training = config.training
    folder.listed.add(folder.plan, folder.planned_schedule)
    with folder.replaced(folder.planned_schedule) as part:
        part.write_text(f"{plan.schedule}\n", encoding="utf-8")
    predicted = {name: rounded(getattr(plan, name)) for name in ("seconds", "bound", "ideal")}
    size = "batch_size" if training.batch_tokens is None else "batch_tokens"
    parallel = config.parallel
    decided = plan.plan
    # With these rates, each step is sliced anew.
    if rates is not None:
        decided = replace(decided, slices=OPEN, num_microbatches=config.pipeline.num_microbatches)
    sections = decided.dump(folder.planned_schedule.name)
    sections["parallel"] = parallel.model_dump(mode="json", exclude_defaults=True) | sections["parallel"]
    settings = {
        "model": config.model.model_dump(mode="json", exclude_defaults=True),
        **sections,
        "training": {"seq_len": training.seq_len, size: getattr(training, size), "precision": training.precision},
        "plan": {"predicted": config.plan.predicted | predicted},
    }
    if config.lora is not None:
        settings["lora"] = config.lora.model_dump(mode="json", exclude_defaults=True)
    if rates is not None:
        settings["data"] = {"packing": config.data.packing}
        settings["plan"]["rates"] = rates.to_json()
    source = "corpus=python-stdlib"
    if config.preference is not None:
        settings["preference"] = config.preference.model_dump(mode="json")
        source = "dataset=pairs.jsonl"
    with folder.replaced(folder.plan) as part:
        part.write_text(plan_text(settings, folder.plan, "slipstream train", source), encoding="utf-8")
