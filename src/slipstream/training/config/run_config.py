"""The configuration of a whole training run: its sections, and whether they fit together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import model_validator

from slipstream.errors import SlipstreamError
from slipstream.model import ALLOWED_LAYER_COUNTS, are_allowed_layer_counts
from slipstream.options import Memory, Precision, Record, Runtime
from slipstream.pipeline.microbatches import check_microbatches, given_microbatches
from slipstream.planner.steps import StageRates
from slipstream.schedule import AUTOMATIC, Schedule, ScheduleError, check_name, make_schedule, placed_as, validate
from slipstream.training.config import sections
from slipstream.training.config.data_section import DataSection
from slipstream.training.config.lora_section import LoraSection
from slipstream.training.config.optimizer_section import OptimizerSection
from slipstream.training.config.other_names import OTHER_NAMES, OTHER_VALUES
from slipstream.training.config.preference_section import PreferenceSection, check_preference
from slipstream.training.config.validation_rules import check_validations

_LEAST_MEMORY = 10_000  # bytes; a smaller number was meant as megabytes or gigabytes
# Of a section and of a Pipeline
_PIPELINE_OPTIONS = ("num_microbatches", "slices", "stages_per_rank", "partition", "vocabulary", "router_loss")
# The Pipeline's dtypes by training.precision
_PRECISIONS = {"bf16-weights": Precision(dtype="bfloat16", master_dtype="float32")}


def precision_named(name: str) -> Precision:
    """Returns the dtypes of the Pipeline by what `training.precision` says."""
    return _PRECISIONS.get(name, Precision(dtype="float32"))


class Config(Record):
    """A whole training run."""

    other_names: ClassVar = OTHER_NAMES
    other_values: ClassVar = OTHER_VALUES

    model: sections.ModelSection
    data: DataSection
    pipeline: sections.PipelineSection = sections.PipelineSection()
    memory: Memory = Memory()
    parallel: sections.ParallelSection = sections.ParallelSection()
    runtime: Runtime = Runtime()
    lora: LoraSection | None = None
    preference: PreferenceSection | None = None
    optimizer: OptimizerSection = OptimizerSection()
    training: sections.TrainingSection
    checkpoint: sections.CheckpointSection = sections.CheckpointSection()
    tracking: sections.TrackingSection = sections.TrackingSection()
    sample: sections.SampleSection = sections.SampleSection()
    plan: sections.PlanSection = sections.PlanSection()

    @model_validator(mode="before")
    @classmethod
    def _leave_open_what_is_not_named(cls, values: Any) -> Any:
        """Leaves order, slices and cut to a plan where the configuration names none of what a plan decides."""
        if not isinstance(values, dict):
            return values
        pipeline, memory = ((values.get(name) or {}) for name in ("pipeline", "memory"))
        if not all(isinstance(section, dict) for section in (pipeline, memory)):
            return values
        named = {"schedule", "slices", "microbatches", "partition", "stages_per_rank"} & pipeline.keys()
        named |= {"recompute", "offload", "num_flushes"} & memory.keys()
        if named or pipeline.get("num_ranks") == 1:
            return values
        return values | {"pipeline": pipeline | {"schedule": "auto", "slices": "auto"}}

    @model_validator(mode="before")
    @classmethod
    def _keep_answers_apart(cls, values: Any) -> Any:
        """Takes answers as long as they are, unless the configuration asks for something else."""
        if isinstance(values, dict) and values.get("preference") is not None and isinstance(values.get("data"), dict):
            return values | {"data": {"packing": "none"} | values["data"]}
        return values

    @model_validator(mode="after")
    def _preference_fits(self) -> Self:
        if self.preference is not None:
            check_preference(self.data, self.pipeline)
        return self

    @model_validator(mode="after")
    def _adapter_fits(self) -> Self:
        if self.lora is None:
            return self
        if self.model.freeze:
            raise ValueError(
                f"model.freeze={self.model.freeze} with lora, which freezes all of the model's weights; leave "
                "model.freeze out, and choose what gets an adapter by lora.target_modules and lora.layers_to_transform"
            )
        if not self.model.pretrained:
            raise ValueError("lora trains an adapter of given weights; give model.path, and no model.init=random")
        if self.parallel.shard_parameters:
            raise ValueError(
                "lora with parallel.shard_parameters=true, which hasn't been shown to be exact; leave it out"
            )
        if self.training.single_process_steps:
            raise ValueError("training.single_process_steps compares with training all weights; leave it out with lora")
        if self.lora.export == "adapter" and self.sample.prompt is not None:
            raise ValueError("sample.prompt needs the merged model; give lora.export=both, or leave sample.prompt out")
        return self

    @model_validator(mode="after")
    def _lengths_add_up(self) -> Self:
        self.runtime.refuse(["stall_limit"], "a run takes it as training.stall_limit.")
        if self.memory.limit is not None and self.memory.limit < _LEAST_MEMORY:
            given = self.memory.limit
            raise ValueError(
                f"memory.limit={given:g} is in bytes, of which no model trains in so few; give "
                f"--memory.limit={given:g}e9 if gigabytes were meant"
            )
        if self.training.bad_numbers == "rollback" and not self.checkpoint.every:
            raise ValueError(
                "training.bad_numbers=rollback needs checkpoints to go back to; give --checkpoint.every=100, or skip"
            )
        if self.data.streaming:
            _check_stream(self)
        check_validations(self.training, self.checkpoint, self.data)
        if self.training.batch_tokens is None:
            _check_batch(self.training.batch_size, self.parallel.data, self.pipeline.num_microbatches)
        else:
            _check_batch_tokens(self.training.batch_tokens, self)
        try:
            self._check_pipeline()
        except ValueError as error:
            if not self.plan.predicted or self.pipeline.stages_per_rank > 1:
                raise
            anew = "--pipeline.schedule=auto --pipeline.slices=auto --pipeline.partition=auto"
            anew += " --memory.recompute=none" if self.memory.recompute != "none" else ""
            raise ValueError(f"{error}. The configuration is a plan for others; to plan for these: {anew}") from None
        return self

    def _check_pipeline(self) -> None:
        """Raises ValueError where slices, order and cut don't fit the sequences, the ranks or each other."""
        pipeline, training = self.pipeline, self.training
        if pipeline.microbatches is None:
            _check_slices(pipeline.slices, training.seq_len)
        else:
            _check_microbatches(pipeline.microbatches, training.batch_size // self.parallel.data, training.seq_len)
        if self.data.packing == "none":
            _check_unpacked(self)
        _check_partition(pipeline)
        _check_schedule(pipeline, self.memory.num_flushes, places_only=self._given_rates() is not None)

    def pipeline_options(self) -> dict[str, Any]:
        """Returns the arguments of the Pipeline that the configuration gives."""
        microbatches = self.pipeline.microbatches
        given = {name: getattr(self.pipeline, name) for name in _PIPELINE_OPTIONS}
        if microbatches is not None:
            given |= {"microbatches": microbatches, "num_microbatches": 1, "slices": None}
        if self.preference is not None:  # `spread` is refused, and a plan mustn't choose it
            given["vocabulary"] = "whole"
        return {
            **given,
            "schedule": named_schedule(self.pipeline),
            # Of sequences of any length the cut is by weights alone, unless a plan is made for the typical one.
            "seq_len": self.training.seq_len if self.data.packing == "fixed" else None,
            "rates": self._given_rates(),
            "memory": self.memory,
            "parallel": self.parallel,
            "precision": precision_named(self.training.precision),
            "runtime": self.runtime,
        }

    def _given_rates(self) -> StageRates | None:
        """Returns what the stages cost, where the configuration is a plan for documents of any length."""
        if self.plan.rates is None or self.data.packing == "fixed" or not self.pipeline.schedule.endswith(".txt"):
            return None
        try:
            return StageRates.from_json(self.plan.rates)
        except SlipstreamError as error:
            raise ValueError(f"plan.rates: {error}") from None

    @property
    def num_processes(self) -> int:
        """Ranks of the whole mesh."""
        return self.pipeline.num_ranks * self.parallel.data * self.parallel.tensor

    @property
    def mesh_text(self) -> str:
        """The mesh as it is typed."""
        return f"--pp={self.pipeline.num_ranks} --dp={self.parallel.data} --tp={self.parallel.tensor}"


def _check_batch(batch_size: int, replicas: int, num_microbatches: int) -> None:
    if batch_size % replicas:
        below = batch_size - batch_size % replicas
        raise ValueError(
            f"training.batch_size={batch_size} doesn't divide into parallel.data={replicas} equal parts; choose "
            + (f"{below} or {below + replicas}" if below else f"{replicas}")
        )
    each = batch_size // replicas
    if each < num_microbatches:
        of_each = "" if replicas == 1 else f" of {each} for each of parallel.data={replicas} replicas"
        raise ValueError(
            f"training.batch_size={batch_size}{of_each} can't be cut into "
            f"pipeline.num_microbatches={num_microbatches} parts; choose 1 to {each}, or a larger batch"
        )


def _check_batch_tokens(batch_tokens: int, config: Config) -> None:
    """Raises ValueError where a step takes no documents of any length, or may have none for a replica."""
    replicas, are_pairs = config.parallel.data, config.preference is not None
    least = config.training.seq_len * replicas * (2 if are_pairs else 1)
    if config.data.packing != "none":
        packing, each = config.data.packing, config.training.seq_len
        raise ValueError(
            f"training.batch_tokens={batch_tokens} with data.packing={packing}: it counts the tokens of documents that "
            f"differ in length. Choose data.packing=none, or training.batch_size={max(1, batch_tokens // each)} "
            f"sequences of training.seq_len={each}"
        )
    if batch_tokens < least:
        of_each = "" if replicas == 1 else f" for each of parallel.data={replicas} replicas"
        raise ValueError(
            f"training.batch_tokens={batch_tokens} has no room for {'two answers' if are_pairs else 'a document'} of "
            f"training.seq_len={config.training.seq_len} tokens{of_each}; choose {least} or more, or a smaller "
            "training.seq_len, at which longer documents are cut"
        )


def _check_stream(config: Config) -> None:
    """Raises ValueError for settings that need the whole data set before the first step."""
    training, data = config.training, config.data
    needs_all = {
        f"training.epochs={training.epochs}": (training.epochs is not None, "give training.steps"),
        f"training.eval_every={training.eval_every}": (
            training.eval_every > 0 and data.validation is None,
            "name a file or a split in data.validation",
        ),
        f"training.single_process_steps={training.single_process_steps}": (
            training.single_process_steps > 0,
            "leave it out",
        ),
        "a model without a tokenizer": (
            data.vocab_size is not None or (data.tokenizer or config.model.path) is None,
            "name one in data.tokenizer",
        ),
    }
    for setting, (is_given, instead) in needs_all.items():
        if is_given:
            raise ValueError(f"{setting} with data.streaming=true, which reads while it trains: {instead}")


def _check_unpacked(config: Config) -> None:
    """Raises ValueError for settings of sequences that have one length."""
    pipeline, flushes, compared = config.pipeline, config.memory.num_flushes, config.training.single_process_steps
    is_for_one_length = {
        f"pipeline.schedule={pipeline.schedule}": pipeline.schedule.endswith(".txt") and config.plan.rates is None,
        f"pipeline.slices={pipeline.slices}": isinstance(pipeline.slices, list),
        "pipeline.microbatches": pipeline.microbatches is not None,
        f"memory.num_flushes={flushes}": flushes != 1,
        f"training.single_process_steps={compared}": compared > 0,
    }
    for setting in filter(is_for_one_length.get, is_for_one_length):
        raise ValueError(
            f"{setting} with data.packing=none: it is for sequences of one length. Leave it out, or choose "
            "data.packing=fixed"
        )


def _check_microbatches(microbatches: object, num_rows: int, seq_len: int) -> None:
    """Raises ValueError where microbatches don't add up to a replica's rows, or their slices to the sequence."""
    try:
        check_microbatches(given_microbatches(microbatches), num_rows, seq_len, "a replica's batch", "training.seq_len")
    except SlipstreamError as error:
        raise ValueError(f"pipeline.{error}") from None


def _check_schedule(pipeline: sections.PipelineSection, num_flushes: int, places_only: bool) -> None:
    """Raises the schedule's own error: the nearest name, the stages per rank it can have, a file's impossible order.

    Of a plan for documents of any length the schedule only says where stages are: it has its own microbatches.
    """
    if pipeline.num_microbatches % num_flushes:
        raise ValueError(
            f"pipeline.num_microbatches={pipeline.num_microbatches} don't divide into memory.num_flushes={num_flushes}"
        )
    try:
        schedule = named_schedule(pipeline)
        if isinstance(schedule, Schedule):
            _check_counts(schedule, pipeline, num_flushes, places_only)
        else:
            check_name(schedule, besides=AUTOMATIC)
            stages = pipeline.stages_per_rank
            make_schedule(placed_as(schedule, stages), pipeline.num_ranks, 1, 1, stages)
    except ScheduleError as error:
        raise ValueError(f"pipeline.{error}") from None


def named_schedule(pipeline: sections.PipelineSection) -> str | Schedule:
    """Returns the schedule in the text file that `pipeline.schedule` names, or the name itself."""
    path = Path(pipeline.schedule)
    if path.suffix != ".txt":
        return pipeline.schedule
    try:
        schedule = Schedule.parse(path.read_text(encoding="utf-8"))
        validate(schedule)
    except (OSError, UnicodeDecodeError, ScheduleError) as error:
        raise ScheduleError(f"schedule={path} can't be used: {error}") from None
    return schedule


def _check_counts(schedule: Schedule, pipeline: sections.PipelineSection, num_flushes: int, places_only: bool) -> None:
    slices = pipeline.slices
    counts: dict[str, tuple[int | str, int | str]]
    counts = {"pipeline.num_ranks": (schedule.num_ranks, pipeline.num_ranks), "memory.num_flushes": (1, num_flushes)}
    if pipeline.microbatches is None and not schedule.is_ragged and not places_only:
        counts |= {
            "pipeline.num_microbatches": (schedule.num_microbatches, pipeline.num_microbatches),
            "pipeline.slices": (schedule.num_slices, slices if isinstance(slices, (int, str)) else len(slices)),
        }
    elif not places_only and [len(lengths) for _, lengths in pipeline.microbatches or ()] != [*schedule.slice_counts]:
        raise ValueError(
            f"pipeline.schedule={pipeline.schedule} has microbatches of {[*schedule.slice_counts]} slices; give "
            "pipeline.microbatches with as many slices"
        )
    for name, (wanted, given) in counts.items():
        if wanted != given:
            raise ValueError(
                f"pipeline.schedule={pipeline.schedule} has {name.split('.')[1]} {wanted}, but {name}={given}; "
                f"set --{name}={wanted}"
            )


def _check_partition(pipeline: sections.PipelineSection) -> None:
    partition, num_stages = pipeline.partition, pipeline.num_ranks * pipeline.stages_per_rank
    if partition == "auto":
        return
    with suppress(ScheduleError):  # which is reported where the schedule is checked
        schedule = named_schedule(pipeline)
        num_stages = schedule.num_stages if isinstance(schedule, Schedule) else num_stages
    if not are_allowed_layer_counts(partition):
        raise ValueError(
            f"pipeline.partition={partition} must give stages of {ALLOWED_LAYER_COUNTS}; such as [4.5, 3.5]"
        )
    if len(partition) != num_stages:
        raise ValueError(
            f"pipeline.partition={partition} names {len(partition)} stages, but pipeline.num_ranks * stages_per_rank = "
            f"{num_stages}; give one number of layers per stage"
        )


def _check_slices(slices: int | Sequence[int] | str, seq_len: int) -> None:
    if isinstance(slices, int) and slices > seq_len:
        raise ValueError(
            f"pipeline.slices={slices} is more than the {seq_len} tokens of training.seq_len; choose 1 to {seq_len}"
        )
    if not isinstance(slices, (int, str)) and sum(slices) != seq_len:
        raise ValueError(
            f"pipeline.slices={list(slices)} add up to {sum(slices)} tokens, but training.seq_len={seq_len}; "
            f"make them add up, or give a count such as pipeline.slices={len(slices)}"
        )
