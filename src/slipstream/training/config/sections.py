"""What `slipstream train` is told: a YAML file and dotted overrides, checked before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from slipstream.model import ALLOWED_LAYER_COUNTS, are_allowed_layer_counts
from slipstream.options import Memory, Parallelism, Precision, Runtime
from slipstream.records import Record
from slipstream.schedule import AUTOMATIC, Schedule, ScheduleError, check_name, make_schedule, placed_as, validate

# The Pipeline's dtypes by training.precision
_PRECISIONS = {"bf16-weights": Precision(dtype="bfloat16", master_dtype="float32")}


class ModelSection(Record):
    """Which model: `path` or `config`."""

    path: str | None = None
    """A folder in Hugging Face's format, or a hub name."""
    config: dict[str, Any] | None = None
    """A transformers configuration, `model_type` first: `{model_type: llama, hidden_size: 256, ...}`."""
    init: Literal["pretrained", "random"] | None = None
    """Weights of `path`, or random ones from `training.seed`. Default: `pretrained` with a path."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.config is None):
            raise ValueError("give either model.path (folder or hub name) or model.config, not both or none")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("model.config needs a model_type, such as llama")
        if self.config is not None and self.init == "pretrained":
            raise ValueError("model.init=pretrained needs model.path: a model.config has no weights")
        return self

    @property
    def pretrained(self) -> bool:
        """Whether the weights come from `path`."""
        return self.path is not None and self.init != "random"


class DataSection(Record):
    """Which text, and how it becomes tokens: one of `corpus`, `files` and `dataset`."""

    corpus: Literal["python-stdlib"] | None = None
    """Text that every machine has: the source files of Python's standard library."""
    files: list[Path] | None = None
    """Text files and folders; each file is a document."""
    suffixes: list[str] = Field(default=[".txt", ".md"])
    """Which files of a folder are read."""
    dataset: str | None = None
    """A .txt (a line is a document), .jsonl or .parquet file, or the hub name of a data set."""
    dataset_config: str | None = None
    """Configuration of a data set on the hub, where it has several."""
    split: str = "train"
    """Which split of the data set is read (validation text is held out of it)."""
    text_column: str = "text"
    """The column that holds the documents."""
    tokenizer: str | None = None
    """A folder or hub name. Default: the one of `model.path`; without one, a BPE is trained on the text."""
    vocab_size: PositiveInt | None = None
    """Tokens of the tokenizer that is trained here. Default: the model's vocabulary."""
    validation_fraction: float = Field(default=0.05, ge=0, lt=1)
    """Share of the documents that is held out."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("corpus", "files", "dataset") if getattr(self, name) is not None]
        if len(given) != 1:
            what = " and ".join(given) or "none"
            raise ValueError(f"give one of data.corpus, data.files and data.dataset; given: {what}")
        if self.tokenizer is not None and self.vocab_size is not None:
            raise ValueError("data.vocab_size is for a tokenizer trained here; remove it or data.tokenizer")
        return self


class PipelineSection(Record):
    """How the model and its sequences are cut, and in which order the pieces run."""

    num_ranks: PositiveInt = 2
    """Processes the layers are spread over."""
    stages_per_rank: PositiveInt = 1
    """Stages of each process: 1 for gpipe, 1f1b, zb-h1 and zb-h2, 2 for zb-v, v-half and v-min, any for the others."""
    schedule: str = "1f1b"
    """Order of forwards and backwards: a name, or the .txt file of a schedule (a run leaves its own). auto: the first
    steps are measured, and the best order chosen; auto-v: the same on a V, with 2 stages per rank."""
    num_microbatches: PositiveInt = 1
    """Parts of a batch that go through the pipeline one after the other."""
    slices: Literal["auto"] | PositiveInt | list[PositiveInt] = 8
    """Token slices of a sequence: how many, or the length of each. auto: the first steps are measured for them."""
    partition: Literal["auto"] | list[int | float] = "auto"
    """Layers of each stage; [4.5, 3.5] ends the first one between a layer's attention and its feed-forward half."""


class ParallelSection(Parallelism):
    """Ranks next to the pipeline's: replicas of it, and ranks that share its layers."""

    data: PositiveInt = 1
    """Replicas of the pipeline, each with its part of a batch."""
    tensor: PositiveInt = 1
    """Processes that share every layer, next to each other: keep them within a node."""


class OptimizerSection(Record):
    """AdamW, its warm-up and its decay."""

    lr: PositiveFloat = 3e-4
    """Learning rate at the end of the warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the running mean and of the running square."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the running square."""
    weight_decay: float = Field(default=0.1, ge=0)
    """For matrices only: norms and biases don't decay."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """How the learning rate goes on after the warm-up."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Where the cosine ends, as a share of `lr`."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest norm of the whole model's gradient; null for no clipping."""


class TrainingSection(Record):
    """How long, on what, and where the results go."""

    output: Path
    """Folder for the metrics, the timeline and the exported model."""
    seq_len: PositiveInt
    """Tokens of a sequence."""
    batch_size: PositiveInt = 1
    """Sequences of a step, over all microbatches."""
    steps: PositiveInt | None = None
    """Steps of the optimizer; or give `epochs`."""
    epochs: PositiveFloat | None = None
    """Passes over the training text; or give `steps`."""
    precision: Literal["float32", "bf16", "bf16-weights", "fp16"] = "float32"
    """bf16: float32 weights, computed under bfloat16 autocast. bf16-weights: bfloat16 weights, of which the optimizer
    has float32 copies, and float32 sums of gradients. fp16: float32 weights under float16 autocast, with a loss scale
    that is found as training goes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is a device for each rank."""
    seed: int = 0
    """Of the weights, the order of the documents, dropout and sampling."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between validations (also one at the end); 0 for none."""
    eval_batches: PositiveInt | None = None
    """Batches of a validation, spread evenly over the held-out text. Default: all of it."""
    export_every: int = Field(default=0, ge=0)
    """Steps between exports to `model-step-N`; 0 for the final one only."""
    overwrite: bool = False
    """Replace what an earlier run left in `output`."""
    single_process_steps: int = Field(default=0, ge=0)
    """Steps of one process measured at the end for comparison; 0 for none."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give either training.steps or training.epochs, not both or none")
        return self


class CheckpointSection(Record):
    """The run's state, saved now and then beside training, so that it can go on."""

    every: int = Field(default=0, ge=0)
    """Steps between checkpoints, and one at the end; 0 for none."""
    keep: PositiveInt = 2
    """How many of the newest stay."""
    keep_every: int = Field(default=0, ge=0)
    """Those whose step it divides stay too; 0 for none."""
    resume: Literal["no", "latest", "last-good"] | PositiveInt = "no"
    """Go on from the newest checkpoint in the output folder, begin where there is none yet; last-good passes over a
    damaged one; a number is the step of one. The mesh, the schedule and the slices may be others than before."""


class TrackingSection(Record):
    """Where a run's figures go beside metrics.jsonl."""

    to: list[str] = Field(default=[])
    """tensorboard and wandb, each an extra to install: pip install 'slipstream[tensorboard]'."""
    tokens: PositiveInt | None = None
    """Tokens of a training whose time is estimated at the end; default: those of this run."""


class SampleSection(Record):
    """The text that the trained model writes at the end."""

    prompt: str | None = None
    """What it continues; null for no sample."""
    max_new_tokens: PositiveInt = 64
    """How far."""
    temperature: float = Field(default=0.8, ge=0)
    """0 for the likeliest token each time."""


class PlanSection(Record):
    """What `slipstream plan` predicted, in a file that it wrote; training doesn't read it."""

    predicted: dict[str, Any] = Field(default={})
    """On what it was planned, how long a step takes, what it holds, with which versions."""


class Config(Record):
    """A whole training run."""

    model: ModelSection
    data: DataSection
    pipeline: PipelineSection = PipelineSection()
    memory: Memory = Memory()
    parallel: ParallelSection = ParallelSection()
    runtime: Runtime = Runtime()
    optimizer: OptimizerSection = OptimizerSection()
    training: TrainingSection
    checkpoint: CheckpointSection = CheckpointSection()
    tracking: TrackingSection = TrackingSection()
    sample: SampleSection = SampleSection()
    plan: PlanSection = PlanSection()

    @model_validator(mode="after")
    def _lengths_add_up(self) -> Self:
        _check_slices(self.pipeline.slices, self.training.seq_len)
        _check_batch(self.training.batch_size, self.parallel.data, self.pipeline.num_microbatches)
        pipeline = self.pipeline
        _check_partition(pipeline)
        num_stages = pipeline.num_ranks * pipeline.stages_per_rank
        if pipeline.partition != "auto" and len(pipeline.partition) != num_stages:
            raise ValueError(
                f"pipeline.partition={pipeline.partition} names {len(pipeline.partition)} stages, but "
                f"pipeline.num_ranks * stages_per_rank = {num_stages}; give one number of layers per stage"
            )
        _check_schedule(pipeline, self.memory.num_flushes)
        return self

    def pipeline_options(self) -> dict[str, Any]:
        """The arguments of the Pipeline that the configuration gives."""
        pipeline = self.pipeline
        return {
            "schedule": named_schedule(pipeline),
            "num_microbatches": pipeline.num_microbatches,
            "slices": pipeline.slices,
            "stages_per_rank": pipeline.stages_per_rank,
            "partition": pipeline.partition,
            "seq_len": self.training.seq_len,
            "memory": self.memory,
            "parallel": self.parallel,
            "precision": _PRECISIONS.get(self.training.precision, Precision(dtype="float32")),
            "runtime": self.runtime,
        }

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


def _check_schedule(pipeline: PipelineSection, num_flushes: int) -> None:
    """Raises the schedule's own error: the nearest name, the stages per rank it can have, a file's impossible order."""
    if pipeline.num_microbatches % num_flushes:
        raise ValueError(
            f"pipeline.num_microbatches={pipeline.num_microbatches} don't divide into memory.num_flushes={num_flushes}"
        )
    try:
        schedule = named_schedule(pipeline)
        if isinstance(schedule, Schedule):
            _check_counts(schedule, pipeline, num_flushes)
        else:
            check_name(schedule, besides=AUTOMATIC)
            make_schedule(
                placed_as(schedule, pipeline.stages_per_rank), pipeline.num_ranks, 1, 1, pipeline.stages_per_rank
            )
    except ScheduleError as error:
        raise ValueError(f"pipeline.{error}") from None


def named_schedule(pipeline: PipelineSection) -> str | Schedule:
    """The schedule in the text file that `pipeline.schedule` names, or the name itself."""
    path = Path(pipeline.schedule)
    if path.suffix != ".txt":
        return pipeline.schedule
    try:
        schedule = Schedule.parse(path.read_text(encoding="utf-8"))
        validate(schedule)
    except (OSError, UnicodeDecodeError, ScheduleError) as error:
        raise ScheduleError(f"schedule={path} can't be used: {error}") from None
    return schedule


def _check_counts(schedule: Schedule, pipeline: PipelineSection, num_flushes: int) -> None:
    slices = pipeline.slices
    counts = {
        "pipeline.num_ranks": (schedule.num_ranks, pipeline.num_ranks),
        "pipeline.num_microbatches": (schedule.num_microbatches, pipeline.num_microbatches),
        "pipeline.slices": (schedule.num_slices, slices if isinstance(slices, (int, str)) else len(slices)),
        "memory.num_flushes": (1, num_flushes),
    }
    for name, (wanted, given) in counts.items():
        if wanted != given:
            raise ValueError(
                f"pipeline.schedule={pipeline.schedule} has {name.split('.')[1]} {wanted}, but {name}={given}; "
                f"set --{name}={wanted}"
            )


def _check_partition(pipeline: PipelineSection) -> None:
    if pipeline.partition != "auto" and not are_allowed_layer_counts(pipeline.partition):
        raise ValueError(
            f"pipeline.partition={pipeline.partition} must give stages of {ALLOWED_LAYER_COUNTS}; such as [4.5, 3.5]"
        )


def _check_slices(slices: int | Sequence[int] | str, seq_len: int) -> None:
    if isinstance(slices, str):
        return
    if isinstance(slices, int):
        if slices > seq_len:
            raise ValueError(
                f"pipeline.slices={slices} is more than the {seq_len} tokens of training.seq_len; choose 1 to {seq_len}"
            )
    elif sum(slices) != seq_len:
        raise ValueError(
            f"pipeline.slices={list(slices)} add up to {sum(slices)} tokens, but training.seq_len={seq_len}; "
            f"make them add up, or give a count such as pipeline.slices={len(slices)}"
        )
