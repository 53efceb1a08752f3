"""The sections of a configuration of `slipstream train`, and the values allowed in each."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from slipstream.number_format import BasePrecision, PrecisionName
from slipstream.options import SHARED_WORK, Degrees, Parallelism, Record
from slipstream.schedule import fewest_stages

if TYPE_CHECKING:
    from slipstream.model import Adapter


class ModelSection(Record):
    """The model: `path` or `config`."""

    path: str | None = None
    """A folder in Hugging Face's format, or a hub name."""
    config: dict[str, Any] | None = None
    """A transformers configuration, `model_type` first: `{model_type: llama, hidden_size: 256, ...}`."""
    init: Literal["pretrained", "random"] | None = None
    """Load the weights of `path` (`pretrained`), or draw random ones from `training.seed` (`random`). Default:
    `pretrained` with a path."""
    freeze: list[str] = Field(default=[])
    """Patterns of parameters' names, such as `[model.embed_tokens*, model.layers.0.*]`, that aren't trained. `*`
    matches anything. The backward ends at the lowest layer with a trained parameter."""
    trust_remote_code: bool = False
    """Whether to run Python code that comes with `path`, for a model that isn't part of transformers. It runs on every
    rank with all your permissions: read it first."""

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
    """Processes that the layers are spread over. Default: those that torchrun or srun has started, or one for each GPU,
    by the other axes of the mesh; 2 on a machine without a GPU."""
    stages_per_rank: PositiveInt | None = None
    """Stages of each process: 1 for gpipe, 1f1b, zb-h1 and zb-h2, 2 for zb-v, v-half and v-min, any for the others.
    Default: planned."""
    schedule: str | None = None
    """Order of forwards and backwards: a name, or a schedule's .txt file (a run leaves its own), by default next to the
    configuration. auto: the best order found for the stages' measured costs, and all else that is left out with it;
    auto-v: the same in a V-shaped placement, with 2 stages per rank. If schedule, slices, partition and stages_per_rank
    are all left out, they are planned from measured costs; if some are, these are planned by counted operations, within
    a second. 1f1b for a single rank."""
    num_microbatches: PositiveInt = 1
    """Parts of a batch that go through the pipeline one after another."""
    slices: Literal["auto"] | PositiveInt | list[PositiveInt] | None = None
    """Token slices of a sequence: how many, or the length of each. auto: the best ones found for the stages' measured
    costs. Default: planned, as `schedule`; for a single rank 8, or as many as a step needs to fit the memory."""
    microbatches: list[tuple[PositiveInt, list[PositiveInt]]] | None = None
    """Instead of `num_microbatches` and `slices`: the rows of each part of a replica's batch, and the lengths of its
    slices, such as `[[2, [704, 688, 656]], [1, [2048]]]` for 3 sequences of 2048 tokens."""
    partition: Literal["auto"] | list[int | float] = "auto"
    """Layers of each stage; [4.5, 3.5] ends the first one between a layer's attention and its feed-forward half. auto:
    as planned, or so that all stages compute about equally much."""
    vocabulary: Literal["auto", "whole", "spread"] = "auto"
    """Where logits and loss are computed. spread: every process takes a part of the vocabulary; whole: the last stage
    takes all of it. auto: decided by the plan if there is one, else whole."""
    router_loss: Literal["none", "per_layer"] = "none"
    """per_layer: adds the load-balancing loss of a mixture of experts, for each layer separately and averaged over
    layers, weighted by the model's `router_aux_loss_coef`. The reported loss doesn't include it."""

    @property
    def names_file(self) -> bool:
        """Whether the schedule is one of a file."""
        return self.schedule is not None and self.schedule.endswith(".txt")

    @property
    def fewest_stages(self) -> int:
        """The stages of each process, or the fewest that it may have where that is open."""
        return fewest_stages(self.schedule) if self.stages_per_rank is None else self.stages_per_rank

    @model_validator(mode="after")
    def _microbatches_alone(self) -> Self:
        others = [name for name in ("num_microbatches", "slices") if name in self.model_fields_set]
        if self.microbatches is not None and others:
            raise ValueError(f"pipeline.microbatches says what pipeline.{others[0]} does; give one of the two")
        return self


class ParallelSection(Parallelism):
    """Ranks next to the pipeline's: replicas of it, and ranks that share its layers."""

    data: PositiveInt = 1
    """Replicas of the pipeline, each with its part of a batch."""
    tensor: PositiveInt = 1
    """Tensor-parallel processes, which share every layer. They have consecutive ranks: keep them within a node."""
    context: PositiveInt = 1
    """Processes that share every slice, each with some of its tokens. They have consecutive ranks, in steps of
    `tensor`: keep them within a node."""
    experts: PositiveInt = 1
    """Ranks over which each layer's experts are spread, next to each other: they exchange tokens in every layer. It
    divides `data` times `context`; where neither is given there are as many replicas."""

    @property
    def degrees(self) -> Degrees:
        """By how many ranks a stage's work is shared."""
        return Degrees(self.tensor, self.context, self.experts, self.context_exchange)

    @property
    def num_copies(self) -> int:
        """The ranks that hold the same weights and see other tokens."""
        return self.data * self.context

    def check_experts(self) -> None:
        """Raises ValueError where experts can't be spread over the ranks that otherwise hold the same weights."""
        if self.num_copies % self.experts:
            raise ValueError(
                f"parallel.experts={self.experts} doesn't divide parallel.data={self.data} times "
                f"parallel.context={self.context}, the ranks that have the experts; choose one that does, or "
                f"--dp={self.experts}"
            )


# The sizes of the mesh, as they are typed, and the settings that they are
MESH_SETTINGS = {"pp": ("pipeline", "num_ranks"), "dp": ("parallel", "data")}
MESH_SETTINGS |= {each.axis: ("parallel", each.degree) for each in SHARED_WORK}
# In the order of ranks, those whose product is the number of processes
AXES = ["pp", "dp", *(each.axis for each in SHARED_WORK if each.has_axis)]


def fill_replicas(parallel: dict[str, Any]) -> None:
    """Gives the section replicas over which experts are spread, where it has none that could have them."""
    experts = parallel.get("experts")
    if isinstance(experts, int) and experts > 0 and not {"data", "context"} & parallel.keys():
        parallel["data"] = experts


class TrainingSection(Record):
    """The length of the training, its hardware, and where the results go."""

    output: Path
    """Folder for the metrics, the timeline and the exported model. One run at a time can use it; your own files in it
    are kept."""
    seq_len: PositiveInt
    """Tokens of a sequence; with `data.packing: none`, the maximum."""
    batch_size: PositiveInt = 1
    """Sequences of a step, over all microbatches and replicas."""
    batch_tokens: PositiveInt | None = None
    """With `data.packing: none`, instead of `batch_size`: the maximum number of tokens of a step, over all replicas. A
    step takes as many whole documents, in order, as fit."""
    steps: PositiveInt | None = None
    """Steps of the optimizer; or give `epochs`."""
    epochs: PositiveFloat | None = None
    """Passes over the training text; or give `steps`."""
    precision: PrecisionName = "float32"
    """bf16: float32 weights, computed under bfloat16 autocast. bf16-weights: bfloat16 weights, with float32 copies for
    the optimizer and float32 sums of gradients. fp16: float32 weights under float16 autocast, with a loss scale
    that adapts during training. Default on GPUs with bfloat16: bf16-weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is a GPU, which several ranks share where there are fewer GPUs than ranks."""
    seed: int = 0
    """The seed of the weights, the order of the documents, dropout and sampling."""
    neftune_alpha: PositiveFloat | None = None
    """Adds noise to embeddings in training, of up to this over the square root of `seq_len` times the model's width
    (NEFTune, Jain et al. 2023); 5 to 15 are usual. It is the same for every slicing and every split of the layers."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between validations; there is also one at the end, in place of one that would be nearer to it than half of
    these steps. 0 for none."""
    patience: PositiveInt | None = None
    """Early stopping: end the run after this many validations in a row without an improvement; null for never."""
    eval_batches: PositiveInt | None = None
    """Batches of a validation, spread evenly over the held-out text. Default: all of it."""
    export_every: int = Field(default=0, ge=0)
    """Steps between exports to `model-step-N`; 0 for the final one only."""
    export: Literal["last", "best"] = "last"
    """Which model is exported at the end: that of the last step, or of the best validation (`checkpoint.keep_best`)."""
    overwrite: bool = False
    """Remove what earlier runs wrote to `output`, including checkpoints. Files that no run has written are always
    kept."""
    bad_numbers: Literal["stop", "skip", "rollback"] = "stop"
    """What happens after a step whose loss or gradient isn't finite or spikes. stop: the run ends. skip: the
    update is skipped. rollback: weights, optimizer and learning rate are restored from the last good checkpoint, and
    the batches since are skipped. Ten such steps in a row always end the run."""
    spike_factor: float | None = Field(default=None, gt=1)
    """A step is a spike where its loss, or the norm of its gradient, is more than this many times the median of the
    last 64 steps; null for none."""
    max_restarts: int = Field(default=0, ge=0)
    """How often `slipstream train` restarts its local ranks from the last good checkpoint after one has crashed, unless
    the same step fails twice. Under torchrun, use --max-restarts."""
    min_ranks: PositiveInt | None = None
    """Go on with at least this many processes after others are lost, and with more once they are back: the run's own
    local ones, or those of `torchrun --nnodes=MIN:MAX`. The mesh that is given is then the largest. null: always
    all."""
    stall_limit: PositiveFloat | Literal["off"] | None = None
    """Seconds that a rank may wait for others, or be stopped, before the run ends and names the rank at fault.
    Building the model, compiling, loading, saving, validating and exporting don't count, nor does the time in which a
    rank that computes finds no processor. Default: the larger of 60 and five times the longest wait so far, and 600
    before the second step as long as a rank computes. off: no process watches the ranks."""
    check_replicas_every: int = Field(default=0, ge=0)
    """Steps between checks of weights and optimizer state for flipped bits; 0 compares copies only before each
    checkpoint."""
    corrupt_replicas: Literal["stop", "majority"] = "stop"
    """What happens when copies differ: the run stops, or, with three or more copies, the majority replaces the wrong
    one."""
    single_process_steps: int = Field(default=0, ge=0)
    """Steps of one process measured at the end for comparison; 0 for none."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.steps is None and self.epochs is None:
            raise ValueError(
                "neither training.steps nor training.epochs says how long the run is; give --training.steps=1000 or "
                "--training.epochs=1"
            )
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"training.steps={self.steps} and training.epochs={self.epochs:g} both say how long the run is; leave "
                "one out, or take back what the file has with --training.steps=null or --training.epochs=null"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _take_back_the_batch_size(cls, values: Any) -> Any:
        """Lets null on the command line take back a file's value, as for `batch_tokens`."""
        if isinstance(values, dict) and values.get("batch_size", 1) is None:
            return {name: value for name, value in values.items() if name != "batch_size"}
        return values

    @model_validator(mode="after")
    def _one_batch(self) -> Self:
        if self.batch_tokens is not None and "batch_size" in self.model_fields_set:
            raise ValueError(
                f"training.batch_size={self.batch_size} and training.batch_tokens={self.batch_tokens} both set "
                "the size of a step; give one of the two, and set the other to null if the file has it"
            )
        return self


class CheckpointSection(Record):
    """The run's state, saved from time to time during training, so that the run can be resumed."""

    every: Annotated[int, Field(ge=0)] | Literal["auto"] | None = None
    """Steps between checkpoints; there is also one at the end. 0 for none. auto: the interval that minimises expected
    lost time, from the measured cost of a save and `failures_per_day`. Default: as auto, once a run has trained for ten
    minutes, and at the end."""
    failures_per_day: PositiveFloat = 1.0
    """With `every: auto`, how often the run is expected to fail, for any reason."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    keep_every: int = Field(default=0, ge=0)
    """Also keep checkpoints whose step is a multiple of this; 0 for none."""
    keep_best: bool = False
    """Save a checkpoint whenever the validation loss is the lowest so far, and one at the end. The best one is kept in
    addition to `keep`."""
    resume: Literal["no", "latest", "last-good", "best"] | PositiveInt = "no"
    """Resume from a checkpoint in the output folder: latest, or start from the beginning if there is none yet, also in
    the folder of a run that was killed before its first one; last-good skips damaged ones; best is that of `keep_best`;
    a number is a step. The mesh, the schedule and the slices may differ from before."""


class TrackingSection(Record):
    """Destinations of a run's figures in addition to metrics.jsonl."""

    to: list[str] = Field(default=[])
    """tensorboard, wandb or both; each is an extra: pip install 'slipstream[tensorboard]'."""
    tokens: PositiveInt | None = None
    """Estimate at the end how long training on this many tokens takes. Default: the tokens of this run."""


class SampleSection(Record):
    """Text that the model writes: at the end, and as it is trained."""

    prompt: str | None = None
    """The prompt of a sample at the end; null for no sample."""
    max_new_tokens: PositiveInt = 64
    """The largest number of tokens to generate."""
    temperature: float = Field(default=0.8, ge=0)
    """Sampling temperature; 0 always takes the most likely token."""
    every: int = Field(default=0, ge=0)
    """Steps between samples, which are in the log, in metrics.jsonl and on the run's page; 0 for the one at the end
    alone. Each token costs a forward of all before it."""

    @model_validator(mode="after")
    def _prompt_for_samples(self) -> Self:
        if self.every and self.prompt is None:
            raise ValueError(f"sample.every={self.every} needs a text to continue; give sample.prompt")
        return self


class PlanSection(Record):
    """The facts in a plan file besides its settings."""

    predicted: dict[str, Any] = Field(default={})
    """What the plan was made for: machine, seconds of a step, memory, versions. Training reads nothing of it but what
    fused kernels would gain, which it repeats."""
    rates: dict[str, Any] | None = None
    """With `data.packing: none`: the measured costs of the stages, from which each step is planned."""
    open: list[Literal["pp", "dp", "cp", "tp", "microbatches"]] = Field(default=[])
    """What is chosen by measured costs when the run starts, as several axes of the mesh that are `auto` ask for."""


# The defaults of adamw; another optimizer has the defaults of its class.
_ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
_MIN_LR_RATIO = 0.1


def _with_numbers(value: Any) -> Any:
    """Returns nested values in which texts that are numbers are: YAML takes 1e-5, without a point, for a text."""
    if isinstance(value, dict):
        return {name: _with_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    if isinstance(value, str) and any(map(str.isdigit, value)):
        with suppress(ValueError):
            return float(value)
    return value


Arguments = Annotated[dict[str, Any], BeforeValidator(_with_numbers)]


class OptimizerSection(Record):
    """The optimizer, its learning rates and its decay."""

    name: str = "adamw"
    """A class of torch.optim in small letters (adamw, sgd, nadam, adafactor), or the import path of an optimizer, such
    as `package.module.Class`. One that needs more of the gradient than a rank has is refused."""
    lr: PositiveFloat | None = None
    """Learning rate at the end of the warm-up. Default: 3e-4 for adamw; for other optimizers `lr`, `betas`, `eps` and
    `weight_decay` have the defaults of their class."""
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
    """Learning-rate schedule after the warm-up: cosine, constant, or the name of one in transformers
    (linear, polynomial, inverse_sqrt, cosine_with_restarts, cosine_with_min_lr, warmup_stable_decay and others), whose
    warm-up begins at 0."""
    schedule_args: Arguments = Field(default={})
    """Arguments of a schedule of transformers, such as `{num_decay_steps: 100}` of warmup_stable_decay."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """Final learning rate of the cosine, as a fraction of `lr`. Default: 0.1."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest norm of the whole model's gradient; null for no clipping."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_defaults(cls, values: Any) -> Any:
        """Fills in the values of adamw and of the cosine that are absent or null."""
        if not isinstance(values, dict) or not isinstance(values.get("args") or {}, dict):
            return values
        filled = {name: value for name, value in values.items() if value is not None or name == "clip_norm"}
        if str(filled.get("name", "adamw")).lower() == "adamw":
            filled = {name: value for name, value in _ADAMW.items() if name not in filled.get("args", {})} | filled
        if filled.get("schedule", "cosine") == "cosine":
            filled = {"min_lr_ratio": _MIN_LR_RATIO} | filled
        return filled

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
                f"optimizer.min_lr_ratio={self.min_lr_ratio} is the end of schedule=cosine, and "
                f"schedule={self.schedule} doesn't use it; leave it out, or set it to null if the file has it"
            )
        return self


class LoraSection(Record):
    """An adapter by LoRA that is trained instead of the model's weights, with the settings of PEFT's LoraConfig."""

    path: str | None = None
    """Folder of an adapter, saved by PEFT or exported by an earlier run, to train further with its own settings; of the
    settings here only `export` and `base_precision` may be given with it."""
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
    """Names of modules, or a pattern, without an adapter."""
    layers_to_transform: list[int] | None = None
    """The layers that get adapters. Default: all. The backward ends at the lowest."""
    modules_to_save: list[str] | None = None
    """Modules that are trained in full beside the adapter, given by the ends of their names, such as `[lm_head]`."""
    base_precision: BasePrecision = "full"
    """How the model's own weights are kept. nf4: those of all linear layers but the head in 4 bits (QLoRA), which takes
    a quarter of bfloat16's memory; it needs bitsandbytes: pip install 'slipstream[qlora]'. full: as wide as
    `training.precision` has them."""
    bias: Literal["none", "lora_only", "all"] = "none"
    """lora_only: the biases of modules with an adapter are trained too; all: every bias of the model."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r)."""
    use_dora: bool = False
    """DoRA: train the magnitude of each weight's rows apart from their direction."""
    rank_pattern: dict[str, int] = Field(default={})
    """Ranks that differ from `r`, by module name."""
    alpha_pattern: dict[str, float] = Field(default={})
    """Alphas that differ from `alpha`, by module name."""
    init: Literal["default", "gaussian"] = "default"
    """Initial distribution of the first factor, drawn with `training.seed`; the second is zero."""
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
        others = [
            name
            for name, field in fields.items()
            if name not in ("path", "export", "base_precision") and getattr(self, name) != field.default
        ]
        if others:
            raise ValueError(
                f"lora.path={self.path} is an adapter with settings of its own; leave lora.{others[0]} out, or "
                "lora.path for a new adapter"
            )
        return self

    def source(self, base: str) -> Any:
        """Returns the saved adapter's folder, or the configuration of a new one for the model at `base`."""
        return self.peft_config(base) if self.path is None else self.path

    def adapter(self, base: str) -> Adapter:
        """Returns the adapter for the model at `base`. Raises SlipstreamError where that of `path` can't be read."""
        from slipstream.model import Adapter

        return Adapter("default", self.peft_config(base), self.base_precision)

    def peft_config(self, base: str) -> Any:
        """Returns PEFT's configuration of the adapter, for the model at `base`.

        Raises SlipstreamError where that of `path` can't be read.
        """
        from peft import LoraConfig

        from slipstream.model import read_adapter_config

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
