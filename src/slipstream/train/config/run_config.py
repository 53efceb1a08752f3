"""The configuration of a whole training run: its sections, whether they fit together, and its file."""

from __future__ import annotations

import os
import subprocess
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import yaml
from pydantic import ValidationError, model_validator

from slipstream.errors import SlipstreamError, syntax_text
from slipstream.foreign_text import parse_yaml, read_text
from slipstream.number_format import PRECISIONS
from slipstream.option_problems import describe_problems, records_in
from slipstream.options import SHARED_WORK, Memory, Precision, Record, Runtime
from slipstream.train.config import sections
from slipstream.train.config.data_section import DataSection, PreferenceSection, check_preference
from slipstream.train.config.rules import (
    ABSENT_VALUES,
    OTHER_NAMES,
    OTHER_VALUES,
    check_batch,
    check_is_ours,
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
from slipstream.train.config.sections import LoraSection, OptimizerSection, fill_replicas
from slipstream.train.run_folder import RunFolder

if TYPE_CHECKING:
    from slipstream.planner.ragged import StageRates

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
        if self.memory.limit is not None and self.memory.limit < _LEAST_MEMORY:
            limit = self.memory.limit
            raise ValueError(
                f"memory.limit={limit:g} is in bytes, too few to train any model; give "
                f"--memory.limit={limit:g}e9 if gigabytes were meant"
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
        try:
            self._check_pipeline()
        except ValueError as error:
            if not self.plan.predicted or self.pipeline.stages_per_rank > 1:
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
        pipeline, training = self.pipeline, self.training
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
        if self.plan.rates is None or self.data.packing == "fixed" or not self.pipeline.schedule.endswith(".txt"):
            return None
        from slipstream.planner.ragged import StageRates  # which takes a second, as numba does

        try:
            return StageRates.from_json(self.plan.rates)
        except SlipstreamError as error:
            raise ValueError(f"plan.rates: {error}") from None

    @property
    def folder(self) -> RunFolder:
        """The folder of the run."""
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
        """Returns the configuration, unchecked, with other ranks along these axes, and so many microbatches."""
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
        return prod(size for axis, size in self.mesh_sizes.items() if axis in _AXES and axis not in axes)

    @property
    def mesh_text(self) -> str:
        """The mesh as it is typed."""
        return " ".join(
            f"--{axis}={size}" for axis, size in self.mesh_sizes.items() if size > 1 or axis in _ALWAYS_TYPED
        )


class _TwiceError(Exception):
    """A key is given twice in one section."""


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.tag != "tag:yaml.org,2002:merge" and (first := lines.setdefault(key.value, line)) != line:
                raise _TwiceError(f"{key.value} is given in line {first} and again in line {line}; leave one out")
        return super().construct_mapping(node, deep)


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Returns the configuration of a YAML file, with `section.key=value` overrides (values are YAML).

    A schedule's text file is looked for in the folder of the configuration that names it; one that an override names,
    in the working folder. Models, texts and templates that the file names are looked for in the working folder, then in
    the file's own. Where a GPU is at hand, there are as many ranks by default, and weights in bfloat16.

    Raises SlipstreamError for a file that can't be read, an unknown key or a value that isn't allowed.
    """
    try:
        text = read_text(path)
        values = tomllib.loads(text) if path.suffix == ".toml" else parse_yaml(text, _Loader)
    except _TwiceError as error:
        raise SlipstreamError(f"{path}: {error}") from None
    except IsADirectoryError:
        raise SlipstreamError(f"{path} is a folder, and a configuration is a YAML file; {_folder_hint(path)}") from None
    except OSError as error:
        raise SlipstreamError(f"can't read the configuration {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        kind = "TOML" if path.suffix == ".toml" else "YAML"
        raise SlipstreamError(f"{path} isn't valid {kind}: {syntax_text(error)}") from error
    if not isinstance(values, dict):
        raise SlipstreamError(f"{path} holds no settings; it needs at least: model, data, training")
    check_is_ours(path, values)
    _locate_schedule(values, path.parent)
    _locate_paths(values, path.parent)
    for override in overrides:
        set_override(values, override)
    _locate_schedule(values, Path())
    _fill_in_for_this_machine(values)
    _fill_mesh(values)
    return parse_config(values)


def _folder_hint(folder: Path) -> str:
    """Returns what to type in place of a folder: its configuration where it is a run's, or else how to write one."""
    run = RunFolder(folder)
    if run.config.is_file():
        return f"the one of the run in it is {run.config}"
    if (folder / "config.json").is_file():
        return f"to train the model in it, type slipstream init {folder} DATA, which writes one"
    return "slipstream init MODEL DATA writes one"


def parse_config(values: dict[str, Any]) -> Config:
    """Returns a checked configuration from nested dictionaries; SlipstreamError lists everything that is wrong."""
    _change_paths(values, _without_tilde)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise SlipstreamError("\n".join(describe_problems(error, Config))) from None


def dump_config(config: Config) -> str:
    """Returns the configuration as YAML that `load_config` reads back."""
    values = config.model_dump(mode="json")
    left_out = ("microbatches",) if config.pipeline.microbatches is None else ("num_microbatches", "slices")
    for name in left_out:
        del values["pipeline"][name]
    if config.training.batch_tokens is not None:
        del values["training"]["batch_size"]
    return yaml.safe_dump(values, sort_keys=False)


def _locate_schedule(values: dict[str, Any], folder: Path) -> None:
    """Makes the path of a schedule's text file absolute: the run's own configuration is in another folder."""
    pipeline = values.get("pipeline")
    name = pipeline.get("schedule") if isinstance(pipeline, dict) else None
    if isinstance(name, str) and name.endswith(".txt"):
        values["pipeline"]["schedule"] = str((folder / os.path.expanduser(name)).absolute())


_PATHS: dict[str, tuple[str, ...]] = {
    "model": ("path",),
    "lora": ("path",),
    "data": ("files", "dataset", "validation", "tokenizer", "chat_template"),
    "training": ("output",),  # so that a run is found again from any working folder
}


def _locate_paths(values: dict[str, Any], folder: Path) -> None:
    """Replaces paths that aren't in the working folder, but in this one, by their place there."""

    def located(name: str) -> str:
        return name if os.path.exists(name) or not os.path.exists(folder / name) else str(folder / name)

    _change_paths(values, located)


def _without_tilde(name: str) -> str:
    """Returns a path with the home folder in place of ~, which a shell leaves as it is after = and in brackets."""
    return os.path.expanduser(name) if name.startswith("~") else name


def _change_paths(values: dict[str, Any], change: Callable[[str], str]) -> None:
    """Replaces the paths and names of models, data and folders by what `change` returns for each."""

    def changed(given: Any) -> Any:
        if isinstance(given, list):
            return [changed(item) for item in given]
        return change(given) if isinstance(given, str) else given

    data = values.get("data")
    sources = data.get("sources") if isinstance(data, dict) else None
    named = [(values.get(section), names) for section, names in _PATHS.items()]
    named += [(source, _PATHS["data"]) for source in (sources if isinstance(sources, list) else ())]
    for section, names in named:
        if isinstance(section, dict):
            section.update({name: changed(section[name]) for name in names if name in section})


_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # of drivers: without one of them there is no GPU


def count_launched() -> int:
    """Returns how many processes torchrun or srun has started, of which this is one; 0 where neither has."""
    environment = os.environ
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "") if "SLURM_PROCID" in environment else ""
    size = environment.get("WORLD_SIZE", "") if "RANK" in environment else tasks if tasks != "1" else ""
    return int(size) if size.isdigit() else 0  # where it is wrong the ranks name the right one


def _count_gpus(values: dict[str, Any]) -> int:
    """Returns how many GPUs this process may use. Imports torch only where there may be some, once the configuration's
    names are right."""
    if not any(map(os.path.exists, _GPU_FILES)):
        return 0
    check_names(values)
    import torch

    return torch.cuda.device_count()


def _fill_in_for_this_machine(values: dict[str, Any]) -> None:
    """Gives the pipeline the ranks that the launcher started, or one for each GPU, and the weights a precision that the
    GPUs are made for, where the configuration says neither."""
    sections = ("pipeline", "parallel", "training")
    pipeline, parallel, training = (values.get(name) or {} for name in sections)
    if not all(isinstance(section, dict) for section in (pipeline, parallel, training)):
        return
    gpus = 0 if training.get("device") == "cpu" else _count_gpus(values)
    is_open = "num_ranks" not in pipeline and "auto" not in (
        parallel.get(name) for name in ("data", "context", "tensor")
    )
    if is_open and (gpus or count_launched()):
        values["pipeline"] = {**pipeline, "num_ranks": "auto"}
    if gpus and "precision" not in training and _has_bfloat16():
        values["training"] = {**training, "precision": "bf16-weights"}


def _has_bfloat16() -> bool:
    """Returns whether all GPUs multiply in bfloat16, asked without touching CUDA, which ranks couldn't use then."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        capabilities = subprocess.run(query, capture_output=True, text=True, timeout=_SECONDS_TO_ASK, check=True).stdout
        return min(map(float, capabilities.split())) >= _FIRST_WITH_BFLOAT16
    except (OSError, ValueError, subprocess.SubprocessError):
        return False


_SECONDS_TO_ASK, _FIRST_WITH_BFLOAT16 = 30.0, 8.0

# The sizes of the mesh, as they are typed, and the settings that they are
MESH_SETTINGS = {"pp": ("pipeline", "num_ranks"), "dp": ("parallel", "data")}
MESH_SETTINGS |= {each.axis: ("parallel", each.degree) for each in SHARED_WORK}
# In the order of ranks, those whose product is the number of processes
_AXES = ["pp", "dp", *(each.axis for each in SHARED_WORK if each.has_axis)]
_ALWAYS_TYPED = ("pp", "dp", "tp")


def _fill_mesh(values: dict[str, Any]) -> None:
    """Gives an axis that is `auto` the processes that the others leave: the launcher's, or one for each GPU. Of several
    that are, it gives the first sizes that fit, and notes that they are to be chosen. Experts have replicas over which
    they are spread."""
    parallel = values.get("parallel")
    if isinstance(parallel, dict):
        fill_replicas(parallel)
    sizes = {
        axis: (values.get(section) or {}).get(name) or getattr(Config.model_fields[section].default, name)
        for axis, (section, name) in MESH_SETTINGS.items()
        if axis in _AXES
    }
    automatic = [axis for axis, size in sizes.items() if size == "auto"]
    if not automatic:
        return
    others = prod(int(size) for axis, size in sizes.items() if axis not in automatic)
    world = _num_processes(automatic[0], None if len(automatic) == 1 else _FEWEST * others)
    if world % others:
        raise SlipstreamError(
            f"--{automatic[0]}=auto: {world} processes don't divide by the {others} of the other axes; start a "
            f"multiple of {others}, or change them"
        )
    if len(automatic) == 1:
        section, name = MESH_SETTINGS[automatic[0]]
        values.setdefault(section, {})[name] = world // others
        return
    _leave_mesh_open(values, automatic)
    for filled in meshes_of(values, world // others):
        values |= filled
        with suppress(SlipstreamError):
            parse_config(values)
            return


_FEWEST = 2  # processes on a machine without a GPU


def _leave_mesh_open(values: dict[str, Any], axes: Sequence[str]) -> None:
    """Notes the open choices: axes of the mesh, and the microbatches where the configuration doesn't give them. The
    order, slices and cut are left to a plan on one rank too, unless some of that is given."""
    pipeline, memory = (values.setdefault(name, {}) for name in ("pipeline", "memory"))
    if not (DECIDED_BY_PLAN["pipeline"] & pipeline.keys() | DECIDED_BY_PLAN["memory"] & memory.keys()):
        pipeline |= {"schedule": "auto", "slices": "auto"}
    is_fixed = (values.get("data") or {}).get("packing", "fixed") == "fixed"
    free = ["microbatches"] if is_fixed and "num_microbatches" not in pipeline else []
    values.setdefault("plan", {})["open"] = [*axes, *free]


def meshes_of(values: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """Yields the configuration, as nested dictionaries, with each way to lay `number` ranks on the axes that are open,
    those with fewest ranks that share layers first, then fewest that share slices, then those with most pipeline ranks;
    where microbatches are open, each has one sequence."""
    is_open = values["plan"]["open"]
    axes = [axis for axis in reversed(_AXES) if axis in is_open]
    for sizes in _products(number, len(axes)):
        filled = values | {section: dict(values.get(section) or {}) for section, _ in MESH_SETTINGS.values()}
        for axis, size in zip(axes, sizes, strict=True):
            section, name = MESH_SETTINGS[axis]
            filled[section][name] = size
        if "microbatches" in is_open and isinstance(rows := values["training"].get("batch_size", 1), int):
            filled["pipeline"]["num_microbatches"] = max(1, rows // filled["parallel"].get("data", 1))
        yield filled


def _products(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yields `count` numbers whose product is `number`, the smallest first."""
    if count == 1:
        yield (number,)
        return
    for first in (factor for factor in range(1, number + 1) if number % factor == 0):
        yield from ((first, *rest) for rest in _products(number // first, count - 1))


def _num_processes(axis: str, without_gpu: int | None) -> int:
    if launched := count_launched():
        return launched
    import torch

    num_processes = torch.cuda.device_count() or without_gpu
    if num_processes is None:
        raise SlipstreamError(
            f"--{axis}=auto: there is no launcher and no GPU to count; give a number, such as --{axis}=2"
        )
    return num_processes


def set_override(values: dict[str, Any], override: str) -> None:
    """Sets `--a.b=value` or `a.b=value` in nested dictionaries. Raises SlipstreamError where it can't be read."""
    name, equals, text = override.removeprefix("--").partition("=")
    if not equals and override.startswith("--") and name.rpartition(".")[2] in OTHER_NAMES and not _is_setting(name):
        equals, text = "=", "null"  # which is then refused, by what the name is here
    if not equals or not name:
        raise SlipstreamError(f"{override!r} isn't a setting with a value; write it as --training.steps=100")
    *path, key = MESH_SETTINGS.get(name) or name.split(".")
    section = values
    for part in path:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise SlipstreamError(f"can't set {name}: {part} is the value {section!r}, not a section")
    try:
        section[key] = parse_yaml(text)
    except yaml.YAMLError as error:
        hint = "; put quotes around what begins with a *" if "*" in text else ""
        raise SlipstreamError(f"the value of {name}={text!r} isn't valid YAML: {syntax_text(error)}{hint}") from error


def _is_setting(name: str) -> bool:
    section, _, key = name.rpartition(".")
    return section in Config.model_fields and key in records_in(Config.model_fields[section].annotation)[0].model_fields


SMALLEST: dict[str, dict[str, Any]] = {
    "training": {"output": "runs", "seq_len": 1, "steps": 1},
    "pipeline": {"num_ranks": 1, "slices": 1},
}
"""Settings that a configuration needs besides its model and data."""


def read_settings(overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns settings by section, from `section.key=value`.

    Raises:
        SlipstreamError: for text that isn't one, for unknown settings, and for values that no configuration can have.
    """
    settings: dict[str, Any] = {}
    for override in overrides:
        set_override(settings, override)
    check_names(settings)
    _check_values(settings)
    return settings


_IN_ANY: dict[str, dict[str, Any]] = {**SMALLEST, "model": {"path": "model"}, "data": {"files": ["text"]}}


def _check_values(given: dict[str, dict[str, Any]]) -> None:
    """Raises SlipstreamError for values of a wrong kind; whether they fit together shows in the whole configuration."""
    values = {**_IN_ANY, **{name: _IN_ANY.get(name, {}) | section for name, section in given.items() if section}}
    try:
        Config.model_validate(values)
    except ValidationError as error:
        if any(problem["type"] not in ("value_error", "missing") for problem in error.errors()):
            raise SlipstreamError("\n".join(describe_problems(error, Config))) from None


def check_names(given: dict[str, Any]) -> None:
    """Raises SlipstreamError for sections and settings that there aren't."""
    smallest = _IN_ANY
    for name, values in given.items():
        section = records_in(Config.model_fields[name].annotation)[0] if name in Config.model_fields else None
        if section is None or not isinstance(values, dict):
            parse_config({**smallest, name: values})
        elif unknown := {key: value for key, value in values.items() if key not in section.model_fields}:
            parse_config({**smallest, name: smallest.get(name, {}) | unknown})
