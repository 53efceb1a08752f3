"""The sections of a configuration of `slipstream train`, and what is allowed in each."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from slipstream.model.adapters import read_adapter_config
from slipstream.options import Parallelism, Record


class ModelSection(Record):
    """The model: `path` or `config`."""

    path: str | None = None
    """A folder in Hugging Face's format, or a hub name."""
    config: dict[str, Any] | None = None
    """A transformers configuration, `model_type` first: `{model_type: llama, hidden_size: 256, ...}`."""
    init: Literal["pretrained", "random"] | None = None
    """Weights of `path`, or random ones from `training.seed`. Default: `pretrained` with a path."""
    freeze: list[str] = Field(default=[])
    """Patterns of parameters' names, such as `[model.embed_tokens*, model.layers.0.*]`, that aren't trained. `*` stands
    for anything. The backward ends at the lowest layer that has a trained one."""
    trust_remote_code: bool = False
    """Whether to run Python code that comes with `path`, for a model that isn't part of transformers. It runs on every
    rank and can do whatever you can: read it first."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.config is None):
            raise ValueError("give either model.path (folder or hub name) or model.config, not both or none")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("model.config needs a model_type, such as llama")
        if self.config is not None and self.init == "pretrained":
            raise ValueError("model.init=pretrained needs model.path: a model.config has no weights")
        if self.path is None and self.trust_remote_code:
            raise ValueError("model.trust_remote_code=true needs model.path, whose code it is")
        return self

    @property
    def pretrained(self) -> bool:
        """Whether the weights come from `path`."""
        return self.path is not None and self.init != "random"


class PipelineSection(Record):
    """The split of the model and its sequences, and the order in which the slices run."""

    num_ranks: PositiveInt = 2
    """Processes the layers are spread over."""
    stages_per_rank: PositiveInt = 1
    """Stages of each process: 1 for gpipe, 1f1b, zb-h1 and zb-h2, 2 for zb-v, v-half and v-min, any for the others."""
    schedule: str = "1f1b"
    """Order of forwards and backwards: a name, or the .txt file of a schedule (a run leaves its own), whose folder is
    this configuration's where none is given. auto: the best order that is found by what stages cost; auto-v: the
    same in a V-shaped placement, with 2 stages per rank. Where schedule, slices, partition and stages_per_rank are all
    left out, they are planned from measured costs."""
    num_microbatches: PositiveInt = 1
    """Parts of a batch that go through the pipeline one after the other."""
    slices: Literal["auto"] | PositiveInt | list[PositiveInt] = 8
    """Token slices of a sequence: how many, or the length of each. auto: those that are found by what stages cost."""
    microbatches: list[tuple[PositiveInt, list[PositiveInt]]] | None = None
    """In place of `num_microbatches` and `slices`: the rows of each part of a replica's batch, and the lengths of its
    slices, such as `[[2, [704, 688, 656]], [1, [2048]]]` for 3 sequences of 2048 tokens."""
    partition: Literal["auto"] | list[int | float] = "auto"
    """Layers of each stage; [4.5, 3.5] ends the first one between a layer's attention and its feed-forward half."""
    vocabulary: Literal["auto", "whole", "spread"] = "auto"
    """spread: every process computes the logits and the loss of its part of the vocabulary; whole: the last stage does
    that alone. auto: as planned where the rest is planned, else whole."""
    router_loss: Literal["none", "per_layer"] = "none"
    """per_layer: adds the load-balancing loss of a mixture of experts, of each layer by itself and averaged over
    layers, with the model's `router_aux_loss_coef`. The loss that is shown is without it."""

    @model_validator(mode="after")
    def _microbatches_alone(self) -> Self:
        given = [name for name in ("num_microbatches", "slices") if name in self.model_fields_set]
        if self.microbatches is not None and given:
            raise ValueError(f"pipeline.microbatches says what pipeline.{given[0]} does; give one of the two")
        return self


class ParallelSection(Parallelism):
    """Ranks next to the pipeline's: replicas of it, and ranks that share its layers."""

    data: PositiveInt = 1
    """Replicas of the pipeline, each with its part of a batch."""
    tensor: PositiveInt = 1
    """Processes that share every layer, next to each other: keep them within a node."""
    experts: PositiveInt = 1
    """Replicas over which each layer's experts are spread, next to each other: they exchange tokens in every layer.
    Where `data` isn't given there are as many replicas."""


class TrainingSection(Record):
    """The length of the training, its hardware, and where the results go."""

    output: Path
    """Folder for the metrics, the timeline and the exported model. One run at a time; files of your own in it stay."""
    seq_len: PositiveInt
    """Tokens of a sequence; with `data.packing: none`, the most."""
    batch_size: PositiveInt = 1
    """Sequences of a step, over all microbatches and replicas."""
    batch_tokens: PositiveInt | None = None
    """With `data.packing: none`, in place of `batch_size`: the most tokens of a step, over all replicas. A step takes
    as many whole documents, in their order, as fit."""
    steps: PositiveInt | None = None
    """Steps of the optimizer; or give `epochs`."""
    epochs: PositiveFloat | None = None
    """Passes over the training text; or give `steps`."""
    precision: Literal["float32", "bf16", "bf16-weights", "fp16"] = "float32"
    """bf16: float32 weights, computed under bfloat16 autocast. bf16-weights: bfloat16 weights, of which the optimizer
    has float32 copies, and float32 sums of gradients. fp16: float32 weights under float16 autocast, with a loss scale
    that is found as training goes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is a GPU, which several ranks share where there are fewer GPUs than ranks."""
    seed: int = 0
    """The seed of the weights, the order of the documents, dropout and sampling."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between validations (also one at the end); 0 for none."""
    patience: PositiveInt | None = None
    """Validations in a row that aren't better than the best so far, after which the run ends; null for never."""
    eval_batches: PositiveInt | None = None
    """Batches of a validation, spread evenly over the held-out text. Default: all of it."""
    export_every: int = Field(default=0, ge=0)
    """Steps between exports to `model-step-N`; 0 for the final one only."""
    export: Literal["last", "best"] = "last"
    """What the final export has: the model of the last step, or of the best validation (`checkpoint.keep_best`)."""
    overwrite: bool = False
    """Replace what earlier runs made in `output`, checkpoints too. What no run has listed as its own always stays."""
    bad_numbers: Literal["stop", "skip", "rollback"] = "stop"
    """What becomes of a step whose loss or gradient isn't finite, or a spike. stop: the run ends. skip: its batch
    changes nothing. rollback: weights, optimizer and learning rate are again those of the last good checkpoint, and the
    batches since are passed over. Ten such steps in a row end the run in any case."""
    spike_factor: float | None = Field(default=None, gt=1)
    """A step is a spike where its loss, or the norm of its gradient, is more than this many times the median of the
    last 64 steps; null for none."""
    max_restarts: int = Field(default=0, ge=0)
    """How often `slipstream train` starts its local ranks again, from the last good checkpoint, after one has crashed,
    unless one step fails twice. torchrun has --max-restarts."""
    stall_limit: PositiveFloat | Literal["off"] | None = None
    """Seconds that a rank may wait for others, or be stopped, before the run ends and says which one is to blame.
    Compiling, loading, saving, validating and exporting don't count. Default: the larger of 60 and five times the
    longest wait so far, and 600 before the second step as long as a rank computes. off: no process watches the
    ranks."""
    check_replicas_every: int = Field(default=0, ge=0)
    """Steps between checks of weights and optimizer state for bits that have flipped; 0 for none but a comparison of
    all copies before each checkpoint."""
    corrupt_replicas: Literal["stop", "majority"] = "stop"
    """What happens where copies differ: the run stops, or the majority's of three or more replace the wrong one."""
    single_process_steps: int = Field(default=0, ge=0)
    """Steps of one process measured at the end for comparison; 0 for none."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give either training.steps or training.epochs, not both or none")
        return self

    @model_validator(mode="before")
    @classmethod
    def _take_back_the_batch_size(cls, values: Any) -> Any:
        """Lets null on the command line take back what a file gives, as for `batch_tokens`."""
        if isinstance(values, dict) and values.get("batch_size", 1) is None:
            return {name: value for name, value in values.items() if name != "batch_size"}
        return values

    @model_validator(mode="after")
    def _one_batch(self) -> Self:
        if self.batch_tokens is not None and "batch_size" in self.model_fields_set:
            raise ValueError(
                f"training.batch_size={self.batch_size} and training.batch_tokens={self.batch_tokens} both say what a "
                "step takes; give one of the two, and null for the other where a file has both"
            )
        return self


class CheckpointSection(Record):
    """The run's state, saved from time to time during training, so that the run can be resumed."""

    every: Annotated[int, Field(ge=0)] | Literal["auto"] = 0
    """Steps between checkpoints, and one at the end; 0 for none. auto: so many that the least time is lost, by what a
    save costs here and `failures_per_day`."""
    failures_per_day: PositiveFloat = 1.0
    """With `every: auto`, how often the whole run is expected to fail, of whatever."""
    keep: PositiveInt = 2
    """How many of the newest checkpoints are kept."""
    keep_every: int = Field(default=0, ge=0)
    """Checkpoints whose step is a multiple of it are kept too; 0 for none."""
    keep_best: bool = False
    """Save a checkpoint whenever a validation's loss is the lowest so far, and one at the end. The newest of these is
    kept in addition to `keep`."""
    resume: Literal["no", "latest", "last-good", "best"] | PositiveInt = "no"
    """Go on from the newest checkpoint in the output folder, begin where there is none yet, also in the folder of a run
    that was killed while it started; last-good passes over a damaged one; best is that of `keep_best`; a number is the
    step of one. The mesh, the schedule and the slices may be others than before."""


class TrackingSection(Record):
    """Destinations of a run's figures in addition to metrics.jsonl."""

    to: list[str] = Field(default=[])
    """tensorboard and wandb, each an extra to install: pip install 'slipstream[tensorboard]'."""
    tokens: PositiveInt | None = None
    """Tokens of a training whose time is estimated at the end; default: those of this run."""


class SampleSection(Record):
    """The text that the trained model writes at the end."""

    prompt: str | None = None
    """The text that the model continues; null for no sample."""
    max_new_tokens: PositiveInt = 64
    """The most tokens that it writes."""
    temperature: float = Field(default=0.8, ge=0)
    """0 for the likeliest token each time."""


class PlanSection(Record):
    """What a plan file says besides its settings."""

    predicted: dict[str, Any] = Field(default={})
    """On what it was planned, how long a step takes, what it holds, with which versions; training doesn't read it."""
    rates: dict[str, Any] | None = None
    """With `data.packing: none`: what the stages cost, as it was measured, by which each step is planned."""


# What adamw has where nothing else is given; another optimizer has the defaults of its class.
_ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
_MIN_LR_RATIO = 0.1


def _with_numbers(value: Any) -> Any:
    """Returns nested values in which texts that are numbers are: YAML takes 1e-5, without a point, for a text."""
    if isinstance(value, dict):
        return {name: _with_numbers(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_numbers(each) for each in value]
    if isinstance(value, str) and any(map(str.isdigit, value)):
        with suppress(ValueError):
            return float(value)
    return value


Arguments = Annotated[dict[str, Any], BeforeValidator(_with_numbers)]


class OptimizerSection(Record):
    """The optimizer, its learning rates and its decay."""

    name: str = "adamw"
    """A class of torch.optim in small letters (adamw, sgd, nadam, adafactor), or the import path of an optimizer, such
    as `package.module.Class`. One that must see more of the gradient than a rank has is refused."""
    lr: PositiveFloat | None = None
    """Learning rate at the end of the warm-up. Default: 3e-4 for adamw, for others that of their class; likewise for
    `betas`, `eps` and `weight_decay`."""
    betas: tuple[float, float] | None = None
    """Decay of the running mean and of the running square. Default: (0.9, 0.95) for adamw."""
    eps: PositiveFloat | None = None
    """Added to the root of the running square. Default: 1e-8 for adamw."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """For matrices only: norms and biases don't decay. Default: 0.1 for adamw."""
    args: Arguments = Field(default={})
    """Other arguments of the optimizer's class, such as `{decoupled_weight_decay: true}` of adam."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    schedule: str = "cosine"
    """The course of the learning rate after the warm-up: cosine, constant, or one of transformers by its name there
    (linear, polynomial, inverse_sqrt, cosine_with_restarts, cosine_with_min_lr, warmup_stable_decay and others), whose
    warm-up begins at 0."""
    schedule_args: Arguments = Field(default={})
    """Arguments of a schedule of transformers, such as `{num_decay_steps: 100}` of warmup_stable_decay."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """Where the cosine ends, as a share of `lr`. Default: 0.1."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest norm of the whole model's gradient; null for no clipping."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_defaults(cls, values: Any) -> Any:
        """Fills in what isn't given, or null, of adamw and of the cosine."""
        if not isinstance(values, dict) or not isinstance(values.get("args") or {}, dict):
            return values
        given = {name: value for name, value in values.items() if value is not None or name == "clip_norm"}
        if str(given.get("name", "adamw")).lower() == "adamw":
            given = {name: value for name, value in _ADAMW.items() if name not in given.get("args", {})} | given
        if given.get("schedule", "cosine") == "cosine":
            given = {"min_lr_ratio": _MIN_LR_RATIO} | given
        return given

    @model_validator(mode="after")
    def _said_once(self) -> Self:
        both = [name for name in self.args if name in _ADAMW and getattr(self, name) is not None]
        if both:
            raise ValueError(f"optimizer.{both[0]} and optimizer.args.{both[0]} say the same; give one of the two")
        for name in ("lr", "weight_decay"):
            if name in self.args:
                raise ValueError(f"optimizer.args.{name}={self.args[name]}: give it as optimizer.{name}")
        if self.min_lr_ratio is not None and self.schedule != "cosine":
            raise ValueError(
                f"optimizer.min_lr_ratio={self.min_lr_ratio} is where schedule=cosine ends, and "
                f"schedule={self.schedule} has no use for it; leave it out, or give null where a file has it"
            )
        return self


class LoraSection(Record):
    """An adapter by LoRA that is trained in place of the model's weights, with the settings of PEFT's LoraConfig."""

    path: str | None = None
    """A folder of an adapter that PEFT, or an earlier run's export, has saved: it is trained further, with its own
    settings; of those here only `export` may be given with it."""
    r: PositiveInt = 8
    """The rank of each update."""
    alpha: PositiveFloat = 16
    """The update is scaled by alpha / r."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the adapter's input."""
    target_modules: str | list[str] = "all-linear"
    """The names of the modules that get an adapter, such as `[q_proj, v_proj]`, or a pattern. all-linear: every linear
    layer but the head."""
    exclude_modules: str | list[str] | None = None
    """Names of modules, or a pattern, that get none."""
    layers_to_transform: list[int] | None = None
    """The layers that get adapters. Default: all. The backward ends at the lowest."""
    modules_to_save: list[str] | None = None
    """Modules, by the ends of their names, of which a copy is trained as a whole, such as `[lm_head]`."""
    bias: Literal["none", "lora_only", "all"] = "none"
    """lora_only: the biases of modules with an adapter are trained too; all: every bias of the model."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r)."""
    use_dora: bool = False
    """Train the length of each weight's rows apart from their direction."""
    rank_pattern: dict[str, int] = Field(default={})
    """Other ranks by the modules' names."""
    alpha_pattern: dict[str, float] = Field(default={})
    """Other alphas by the modules' names."""
    init: Literal["default", "gaussian"] = "default"
    """The distribution from which the first factor is drawn, by `training.seed`; the second is zero."""
    export: Literal["adapter", "merged", "both"] = "both"
    """What is exported. adapter: the folder `adapter/`, which PEFT loads. merged: the whole model, in `model/`."""

    @model_validator(mode="after")
    def _named_targets(self) -> Self:
        if self.layers_to_transform is not None and isinstance(self.target_modules, str):
            raise ValueError(
                f"lora.layers_to_transform needs a list of names in lora.target_modules, such as [q_proj, v_proj], not "
                f"{self.target_modules!r}"
            )
        return self

    @model_validator(mode="after")
    def _path_alone(self) -> Self:
        """Refuses settings beside a saved adapter, which has its own."""
        if self.path is None:
            return self
        fields = type(self).model_fields
        given = [
            name
            for name, field in fields.items()
            if name not in ("path", "export") and getattr(self, name) != field.default
        ]
        if given:
            raise ValueError(
                f"lora.path={self.path} is an adapter with settings of its own; leave lora.{given[0]} out, or "
                "lora.path for a new adapter"
            )
        return self

    def source(self, base: str) -> Any:
        """Returns the saved adapter's folder, or the configuration of a new one for the model at `base`."""
        return self.peft_config(base) if self.path is None else self.path

    def peft_config(self, base: str) -> Any:
        """Returns PEFT's configuration of the adapter, for the model at `base`.

        Raises SlipstreamError where that of `path` can't be read.
        """
        from peft import LoraConfig

        if self.path is not None:
            return read_adapter_config(self.path, base, "lora.path")
        same = (
            "r", "target_modules", "exclude_modules", "layers_to_transform", "modules_to_save", "bias", "use_rslora",
            "use_dora", "rank_pattern", "alpha_pattern",
        )  # fmt: skip
        return LoraConfig(
            **{name: getattr(self, name) for name in same},
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            init_lora_weights=True if self.init == "default" else self.init,
            base_model_name_or_path=base,
            task_type="CAUSAL_LM",
        )
