"""The configuration of a whole training run: its sections, and whether they fit together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import model_validator

from slipstream.errors import SlipstreamError
from slipstream.number_format import PRECISIONS
from slipstream.options import Memory, Precision, Record, Runtime, check_optimizer_place
from slipstream.train.config import sections
from slipstream.train.config.data_section import DataSection, PreferenceSection, check_preference
from slipstream.train.config.rules import (
    ABSENT_VALUES,
    OTHER_NAMES,
    OTHER_VALUES,
    check_batch,
    check_lengths,
    check_noise,
    check_partition,
    check_samples,
    check_schedule,
    check_stream,
    check_unpacked,
    check_validations,
    named_schedule,
)
from slipstream.train.config.sections import AXES, MESH_SETTINGS, LoraSection, OptimizerSection

if TYPE_CHECKING:
    from slipstream.planner.ragged import StageRates
    from slipstream.train.run_folder import RunFolder

_LEAST_MEMORY = 10_000  # bytes; a smaller number was meant as megabytes or gigabytes
# Of a section and of a Pipeline
_PIPELINE_OPTIONS = ("num_microbatches", "slices", "stages_per_rank", "partition", "vocabulary", "router_loss")


def precision_named(name: str) -> Precision:
    """Returns the dtypes of the Pipeline by the name in `training.precision`."""
    named = PRECISIONS[name]
    return Precision(dtype=named.weights.name, master_dtype=None if named.master is None else named.master.name)


# The settings by section that a plan decides, or keeps as they are by default
DECIDED_BY_PLAN = {
    "pipeline": dict.fromkeys(("schedule", "slices", "microbatches", "partition", "stages_per_rank")).keys(),
    "memory": dict.fromkeys(("recompute", "offload", "num_flushes")).keys(),
}


class Config(Record):
    """A whole training run."""

    other_names: ClassVar = OTHER_NAMES
    other_values: ClassVar = OTHER_VALUES
    absent_values: ClassVar = ABSENT_VALUES

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
        """Leaves order, slices and cut to a plan where the configuration names none of a plan's choices."""
        if not isinstance(values, dict):
            return values
        pipeline, memory = ((values.get(name) or {}) for name in ("pipeline", "memory"))
        if not all(isinstance(section, dict) for section in (pipeline, memory)):
            return values
        given = {name for name, value in pipeline.items() if value is not None}
        named = DECIDED_BY_PLAN["pipeline"] & given | DECIDED_BY_PLAN["memory"] & memory.keys()
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
        if self.parallel.shard == "parameters":
            raise ValueError("lora with parallel.shard=parameters, which hasn't been shown to be exact; leave it out")
        if self.training.single_process_steps:
            raise ValueError("training.single_process_steps compares with training all weights; leave it out with lora")
        if self.lora.export == "adapter" and self.sample.prompt is not None:
            raise ValueError("sample.prompt needs the merged model; give lora.export=both, or leave sample.prompt out")
        return self

    @model_validator(mode="after")
    def _lengths_add_up(self) -> Self:
        self.runtime.refuse(["stall_limit"], "a run takes it as training.stall_limit.")
        for name in ("limit", "host_limit"):
            limit = getattr(self.memory, name)
            if limit is not None and limit < _LEAST_MEMORY:
                raise ValueError(
                    f"memory.{name}={limit:g} is in bytes, too few to train any model; give "
                    f"--memory.{name}={limit:g}e9 if gigabytes were meant"
                )
        if self.training.bad_numbers == "rollback" and not self.checkpoint.every:
            raise ValueError(
                "training.bad_numbers=rollback needs checkpoints to go back to; give --checkpoint.every=100, or skip"
            )
        if self.training.neftune_alpha is not None:
            check_noise(self.pipeline, self.parallel, self.training)
        if self.sample.every:
            check_samples(self.sample.every, self.pipeline, self.memory)
        if self.data.streaming:
            check_stream(self.training, self.data, self.model)
        check_validations(self.training, self.checkpoint, self.data)
        are_pairs = self.preference is not None
        check_batch(self.training, self.data, self.pipeline, self.parallel, are_pairs)
        self.parallel.check_experts()
        check_optimizer_place(self.memory, self.parallel)
        try:
            self._check_pipeline()
        except ValueError as error:
            if not self.plan.predicted or self.pipeline.fewest_stages > 1:
                raise
            anew = "--pipeline.schedule=auto --pipeline.slices=auto --pipeline.partition=auto"
            anew += " --memory.recompute=none" if self.memory.recompute != "none" else ""
            raise ValueError(f"{error}. The configuration is a plan for others; to plan for these: {anew}") from None
        return self

    @property
    def drops_nothing(self) -> bool:
        """Whether dropout is off in training, whatever the rates of the model and its adapter."""
        return self.preference is not None and not self.preference.dropout

    def _check_pipeline(self) -> None:
        """Raises ValueError where slices, order and cut don't fit the sequences, the ranks or each other."""
        pipeline = self.pipeline
        training = self.training
        check_lengths(pipeline, training.batch_size // self.parallel.data, training.seq_len)
        if self.data.packing == "none":
            check_unpacked(pipeline, self.memory, training, self.plan)
        check_partition(pipeline)
        check_schedule(pipeline, self.memory.num_flushes, places_only=self._given_rates() is not None)

    def pipeline_options(self) -> dict[str, Any]:
        """Returns the arguments of the Pipeline that the configuration gives."""
        microbatches = self.pipeline.microbatches
        options = {name: getattr(self.pipeline, name) for name in _PIPELINE_OPTIONS}
        if microbatches is not None:
            options |= {"microbatches": microbatches, "num_microbatches": 1, "slices": None}
        # `spread` is refused, and a plan mustn't choose it.
        if self.preference is not None or self.training.neftune_alpha is not None or self.sample.every:
            options["vocabulary"] = "whole"
        return {
            **options,
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
        """Returns the stages' rates, where the configuration is a plan for documents of any length."""
        if self.plan.rates is None or self.data.packing == "fixed" or not self.pipeline.names_file:
            return None
        # Numba takes a second to import.
        from slipstream.planner.ragged import StageRates

        try:
            return StageRates.from_json(self.plan.rates)
        except SlipstreamError as error:
            raise ValueError(f"plan.rates: {error}") from None

    @property
    def folder(self) -> RunFolder:
        """The folder of the run."""
        from slipstream.train.run_folder import RunFolder

        return RunFolder(self.training.output)

    def exports(self, model: Path) -> dict[Path, bool]:
        """Returns the folders that an export to `model` writes, and whether they have merged weights or the adapter."""
        if self.lora is None or self.lora.export == "merged":
            return {model: True}
        adapter = model.with_name(model.name.replace("model", "adapter", 1))
        return {adapter: False} if self.lora.export == "adapter" else {model: True, adapter: False}

    @property
    def has_models_tokenizer(self) -> bool:
        """Whether the tokenizer is the one that comes with the model."""
        return self.data.vocab_size is None and self.data.tokenizer in (None, self.model.path)

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """The arguments of `make_mesh`: the ranks along each axis, and over how many of these experts are spread."""
        return {axis: getattr(getattr(self, section), name) for axis, (section, name) in MESH_SETTINGS.items()}

    def on_mesh(self, sizes: Mapping[str, int], num_microbatches: int) -> Self:
        """Returns the configuration, unchecked, with these sizes of axes and this number of microbatches."""
        changed: dict[str, dict[str, int]] = {"pipeline": {"num_microbatches": num_microbatches}, "parallel": {}}
        for axis, size in sizes.items():
            section, name = MESH_SETTINGS[axis]
            changed[section][name] = size
        sections = {name: getattr(self, name).model_copy(update=values) for name, values in changed.items()}
        return self.model_copy(update=sections)

    @property
    def num_processes(self) -> int:
        """Ranks of the whole mesh."""
        return self.num_ranks_without(())

    def num_ranks_without(self, axes: Collection[str]) -> int:
        """Returns the product of the other axes' sizes."""
        return prod(size for axis, size in self.mesh_sizes.items() if axis in AXES and axis not in axes)

    @property
    def mesh_text(self) -> str:
        """The mesh as it is typed."""
        return " ".join(
            f"--{axis}={size}" for axis, size in self.mesh_sizes.items() if size > 1 or axis in _ALWAYS_TYPED
        )


_ALWAYS_TYPED = ("pp", "dp", "tp")
