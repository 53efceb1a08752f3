"""The configuration of a whole training run: its sections, and whether they fit together."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import model_validator

from slipstream.errors import SlipstreamError
from slipstream.options import Memory, Precision, Record, Runtime
from slipstream.planner.steps import StageRates
from slipstream.training.config import sections
from slipstream.training.config.batch_rules import check_batch, check_stream, check_unpacked
from slipstream.training.config.data_section import DataSection
from slipstream.training.config.lora_section import LoraSection
from slipstream.training.config.optimizer_section import OptimizerSection
from slipstream.training.config.order_rules import check_lengths, check_partition, check_schedule, named_schedule
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


# The settings by section that a plan decides, or keeps as they are by default
DECIDED_BY_PLAN = {
    "pipeline": dict.fromkeys(("schedule", "slices", "microbatches", "partition", "stages_per_rank")).keys(),
    "memory": dict.fromkeys(("recompute", "offload", "num_flushes")).keys(),
}


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
        named = DECIDED_BY_PLAN["pipeline"] & pipeline.keys() | DECIDED_BY_PLAN["memory"] & memory.keys()
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
            check_stream(self.training, self.data, self.model)
        check_validations(self.training, self.checkpoint, self.data)
        are_pairs = self.preference is not None
        check_batch(self.training, self.data, self.pipeline, self.parallel, are_pairs)
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
        check_lengths(pipeline, training.batch_size // self.parallel.data, training.seq_len)
        if self.data.packing == "none":
            check_unpacked(pipeline, self.memory, training, self.plan)
        check_partition(pipeline)
        check_schedule(pipeline, self.memory.num_flushes, places_only=self._given_rates() is not None)

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
    def has_models_tokenizer(self) -> bool:
        """Whether the tokenizer is the one that comes with the model."""
        return self.data.vocab_size is None and self.data.tokenizer in (None, self.model.path)

    @property
    def num_processes(self) -> int:
        """Ranks of the whole mesh."""
        return self.pipeline.num_ranks * self.parallel.data * self.parallel.tensor

    @property
    def mesh_text(self) -> str:
        """The mesh as it is typed."""
        return f"--pp={self.pipeline.num_ranks} --dp={self.parallel.data} --tp={self.parallel.tensor}"
