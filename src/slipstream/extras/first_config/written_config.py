"""The configuration that `slipstream init` writes: from a model and data to a file that trains as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from textwrap import indent
from typing import Any

import yaml

from slipstream.cluster_plans.described_model import DescribedModel
from slipstream.extras.first_config.choices import (
    PipelineChoice,
    Purpose,
    TrainingChoice,
    choose_pipeline,
    choose_training,
    dtype_here,
    this_machine,
)
from slipstream.extras.first_config.data import DataChoice, DataSizes, choose_data, count_tokens, place_of, some_of
from slipstream.launch import Progress
from slipstream.model import MANY_TOKENS, check_length, check_sliceable, longest_sequence, meta_model
from slipstream.number_format import precision_of
from slipstream.options import Runtime
from slipstream.train.config import Config, ModelSection
from slipstream.train.config.config_values import parse_config
from slipstream.train.config.overrides import SMALLEST
from slipstream.train.data import has_tokenizer
from slipstream.train.data.chat_templates import ChatTemplate
from slipstream.train.model_files import ModelFiles, load_model_config
from slipstream.train.preflight.model_checks import check_model
from slipstream.train.preflight.text_preparation import (
    add_vocabulary,
    check_vocabulary,
    make_tokenizer,
)
from slipstream.units import plural

_TRAINED_BYTES, _SHARE = 16, 0.7  # bytes per parameter in training; share of the memory for these


@dataclass(frozen=True)
class WrittenConfig:
    """The text of a configuration, and lines on its choices and their reasons."""

    text: str
    lines: tuple[str, ...]


def write_config(model: str, data: str, output: Path, given: Mapping[str, Any], progress: Progress) -> WrittenConfig:
    """Returns a configuration that trains `model` on `data` on this machine, with comments. Writes nothing.

    Args:
        model: a folder, a hub name, a config.json or a training configuration.
        data: a file, a folder, a data set's hub name, or python-stdlib.
        output: the file that it is for.
        given: settings by section, which are taken as they are.
        progress: shows the current task.

    Raises:
        SlipstreamError: where model or data can't be read or don't fit together, or the model can't be sliced.
    """
    with progress.waiting("reading the model's configuration"):
        first = _FirstReading.of(model, data, given)
    with progress.waiting("reading the data"):
        data_choice = choose_data(data, first.data, progress.warn)
        sizes = _measure(data_choice, first, progress)
    with progress.waiting("checking that the model can be sliced, and planning"):
        choices = _choose(first, data_choice, sizes, given, data)
        parts = [part.with_values(given.get(part.name, {})) for part in config_parts(choices)]
        known = {part.name for part in parts}
        parts += [ConfigPart(name, "As given.", ()).with_values(given[name]) for name in given if name not in known]
        _check(parts, first.files)
    head = [f"Written by `slipstream init {model} {data}`. Lines such as `# key: value` are settings to try: uncomment"]
    head += ["one to use it. All settings are in docs/configuration.md.", "", f"slipstream train {output}"]
    lines = [*_lines(choices)]
    if not (choices.training.eval_every or "eval_every" in given.get("training", {})):
        lines.append(
            f"no validations: of {plural(sizes.number, choices.noun.removesuffix('s'))} no share is enough for one; "
            "hold a file out with --data.validation=held-out.jsonl --training.eval_every=10"
        )
    return WrittenConfig(config_text(head, parts), (*lines,))


@dataclass(frozen=True)
class _FirstReading:
    """The facts about the model before the data is read."""

    config: Config  # the configuration of model and data only
    model: dict[str, Any]
    data: dict[str, Any]  # settings of the data other than its path
    files: ModelFiles
    num_parameters: int

    @classmethod
    def of(cls, model: str, data: str, given: Mapping[str, Any]) -> _FirstReading:
        section = _model_settings(model) | given.get("model", {})
        settings = dict(given.get("data", {}))
        model_config = load_model_config(ModelSection(**section))
        if _lacks_tokenizer(section) and not {"tokenizer", "vocab_size"} & settings.keys():
            settings["vocab_size"] = model_config.get_text_config().vocab_size
        config = parse_config({**SMALLEST, "model": section, "data": place_of(data) | settings})
        files = ModelFiles(config, model_config)
        add_vocabulary(config, files, Progress(None))
        num_parameters = sum(parameter.numel() for parameter in meta_model(model_config).parameters())
        return cls(config, section, settings, files, num_parameters)


def _model_settings(model: str) -> dict[str, Any]:
    """Returns the section `model`, with random weights where a folder has none."""
    section = DescribedModel(model).section
    folder = Path(str(section.get("path")))
    if folder.is_dir() and "init" not in section and not any(folder.glob("*.safetensors")):
        return section | {"init": "random"}
    return section


def _lacks_tokenizer(model: Mapping[str, Any]) -> bool:
    """Returns whether a tokenizer has to be trained for a model in a folder, whose weights are random."""
    folder = Path(str(model.get("path")))
    return folder.is_dir() and model.get("init") == "random" and not has_tokenizer(folder)


def _measure(found: DataChoice, first: _FirstReading, progress: Progress) -> DataSizes:
    """Returns how many tokens the data has. Raises SlipstreamError where the model has no such tokens."""
    some = some_of(found.opened)
    tokenizer = make_tokenizer(first.config, first.files, [some], progress)
    template = ChatTemplate(tokenizer, first.config.data.chat_template) if some.has_messages else None
    most = longest_sequence(first.files.config) or MANY_TOKENS
    vocab_size = first.files.config.get_text_config().vocab_size
    sizes = count_tokens(found, some, tokenizer, template, most, vocab_size)
    check_vocabulary(sizes.largest, first.files.config)
    return sizes


def _choose(first: _FirstReading, found: DataChoice, sizes: DataSizes, given: Mapping[str, Any], data: str) -> Choices:
    machine = this_machine()
    longest = longest_sequence(first.files.config)
    is_packed = given.get("data", {}).get("packing", "none" if found.are_pairs else "fixed") == "fixed"
    from_random = not first.config.model.pretrained
    is_large = first.num_parameters * _TRAINED_BYTES > _SHARE * machine.device.memory * machine.num_devices
    is_adapter = "lora" in given or (is_large and not from_random and find_spec("peft") is not None)
    purpose = Purpose(found.are_pairs, found.is_text, from_random, is_adapter, first.num_parameters)
    has_file = "validation" in given.get("data", {})
    training = choose_training(purpose, sizes, longest, is_packed, given.get("training", {}), has_file)
    check_length(first.files.config, training.seq_len, "training.seq_len")
    if is_packed and check_sliceable(first.files.config).longest_packed < training.seq_len:
        # Documents in one sequence would influence each other.
        is_packed = False
    pipeline = PipelineChoice({}, "as given")
    if not {"pipeline", "memory", "parallel"} & given.keys():
        numbers = {"seq_len": training.seq_len, "global_batch": training.batch_size}
        pipeline = choose_pipeline(first.files.config, machine, dtype_here(), is_packed, numbers)
    return Choices(
        model=first.model,
        data=found,
        is_packed=is_packed,
        purpose=purpose,
        training=training,
        pipeline=pipeline,
        precision=precision_of(dtype_here()) or "float32",
        longest=longest,
        output=_new_folder(Path(data).stem),
    )


def _new_folder(name: str) -> Path:
    """Returns a folder for a run's results that isn't there yet."""
    names = (name if attempt == 1 else f"{name}-{attempt}" for attempt in count(1))
    return next(path for path in (Path("runs") / name for name in names) if not path.exists())


def _check(parts: Sequence[ConfigPart], files: ModelFiles) -> None:
    """Raises SlipstreamError where a run would, before it reads its text."""
    config = parse_config({part.name: values for part in parts if (values := part.values())})
    # The self-check has already been done.
    unchecked = config.model_copy(update={"runtime": Runtime(self_check=False)})
    check_model(unchecked, files, Progress(None))


def _lines(choices: Choices) -> Sequence[str]:
    """Returns lines on the findings and choices."""
    training, purpose = choices.training, choices.purpose
    rows = plural(training.batch_size, "pair" if purpose.are_pairs else "sequence")
    what = "an adapter" if purpose.is_adapter else "all weights"
    lines = [
        choices.data.opened.describe(),
        f"training {what}: {plural(training.steps, 'step')} of {rows} of {training.seq_len:,} tokens, "
        f"learning rate {purpose.learning_rate:g}",
        "pipeline: " + choices.pipeline.reason.partition(".\n")[0],
    ]
    if training.num_longer:
        lines.append(f"{training.num_longer:,} {choices.noun} are longer than {training.seq_len:,} tokens: cut there")
    return lines


_PLANNED = {
    "num_ranks": "processes, over which the layers are spread",
    "stages_per_rank": "parts of the model on each process",
    "schedule": "the order of forwards and backwards",
    "num_microbatches": "parts of a step that follow each other",
    "slices": "tokens of each slice of a sequence; a number makes equal ones",
    "partition": "layers of each stage",
    "data": "replicas of the pipeline, each with its part of a batch",
    "context": "processes that share every slice",
    "experts": "processes over which each layer's experts are spread",
    "shard": "what processes with the same weights share",
}


@dataclass(frozen=True)
class Choices:
    """Everything that was chosen for a configuration."""

    model: dict[str, Any]
    data: DataChoice
    is_packed: bool
    purpose: Purpose
    training: TrainingChoice
    pipeline: PipelineChoice
    precision: str
    longest: int | None  # the model's longest sequence, in tokens
    output: Path

    @property
    def noun(self) -> str:
        """The noun for a row of the data."""
        if self.purpose.are_pairs:
            return "pairs"
        return "documents" if self.purpose.is_text else "samples"


def config_parts(choices: Choices) -> list[ConfigPart]:
    """Returns the sections in the order in which they are written."""
    made = [
        _model(choices),
        _data(choices),
        *_preference(choices),
        _pipeline(choices),
        _memory(choices),
        _parallel(choices),
    ]
    return [
        *made,
        *_runtime(choices),
        *_lora(choices),
        _optimizer(choices),
        _training(choices),
        _checkpoint(choices),
        _sample(),
    ]


def _tip(name: str, value: Any, comment: str) -> Setting:
    return Setting(name, value, comment, is_used=False)


def _used(values: Mapping[str, Any], **comments: str) -> Iterator[Setting]:
    return (Setting(name, value, comments.get(name, "")) for name, value in values.items())


def _model(choices: Choices) -> ConfigPart:
    settings = [*_used(choices.model, init="random weights; give a folder with .safetensors files to fine-tune it")]
    if not (choices.purpose.from_random or choices.purpose.is_adapter):
        settings.append(_tip("init", "random", "random weights instead of the trained ones"))
    return ConfigPart("model", f"The model: {choices.purpose.num_parameters:,} parameters.", tuple(settings))


def _data(choices: Choices) -> ConfigPart:
    data, training = choices.data, choices.training
    settings = [*_used(data.settings, vocab_size="of a tokenizer that is trained on the text, as the model has none")]
    if not choices.is_packed and not data.are_pairs:
        settings.append(Setting("packing", "none", "each document is a sequence, as packed ones would see each other"))
    share = f"share of the {choices.noun} that is held out" + ("" if training.held_out else ": they are too few")
    settings.append(Setting("validation_fraction", training.held_out, share))
    settings.append(_tip("validation", "held-out.jsonl", "a file to hold out instead"))
    if data.opened.has_messages:
        settings.append(_tip("chat_template", "chat.jinja", "instead of the tokenizer's"))
    if not (data.is_text or data.are_pairs):
        settings.append(_tip("loss", "all", "every token counts, not the answers alone"))
    return ConfigPart("data", f"What it is trained on. {data.opened.describe().capitalize()}.", tuple(settings))


def _preference(choices: Choices) -> Iterator[ConfigPart]:
    if choices.data.are_pairs:
        beta = Setting("beta", 0.1, "a larger one keeps the model closer to what it was")
        smoothing = _tip("label_smoothing", 0.1, "how probable it is that a pair is the wrong way round")
        yield ConfigPart(
            "preference", "Chosen answers become more probable.", (Setting("loss", "dpo"), beta, smoothing)
        )


def _pipeline(choices: Choices) -> ConfigPart:
    settings = _used(choices.pipeline.of("pipeline"), **_PLANNED)
    return ConfigPart("pipeline", f"How it is split and ordered: {choices.pipeline.reason}.", tuple(settings))


def _memory(choices: Choices) -> ConfigPart:
    is_alone = choices.pipeline.of("pipeline").get("num_ranks") == 1
    tips = [_tip("recompute", "full", "compute activations again instead of keeping them")]
    if is_alone:
        tips = [
            _tip("recompute", "stage", "keep the activations of one slice alone"),
            _tip("context", "host", "keys and values in host memory, of very long sequences"),
            _tip("loss_tokens", 1024, "the logits of so many tokens at a time"),
            _tip("optimizer", "host", "its state in host memory, beside a GPU"),
        ]
    tips.append(_tip("limit", 16_000_000_000, "bytes that each process may hold"))
    purpose = "To use less memory, or train longer sequences in more slices." if is_alone else "To use less memory."
    return ConfigPart("memory", purpose, (*_used(choices.pipeline.of("memory")), *tips))


def _parallel(choices: Choices) -> ConfigPart:
    planned = choices.pipeline.of("parallel")
    tips = [_tip("tensor", 2, "processes that share every layer")]
    has_microbatches = choices.pipeline.of("pipeline").get("num_microbatches", 1) > 1
    if choices.training.batch_size % 2 == 0 and not has_microbatches and "experts" not in planned:
        tips.insert(0, _tip("data", 2, "replicas of the pipeline"))
    settings = (*_used(planned, **_PLANNED), *tips)
    return ConfigPart("parallel", "More processes, times those of the pipeline.", settings)


def _runtime(choices: Choices) -> Iterator[ConfigPart]:
    if planned := choices.pipeline.of("runtime"):
        yield ConfigPart("runtime", "How layers are computed.", (*_used(planned),))


def _lora(choices: Choices) -> Iterator[ConfigPart]:
    if choices.purpose.from_random:
        return
    is_used = choices.purpose.is_adapter
    why = "as all weights with their optimizer don't fit this machine" if is_used else "which needs far less memory"
    settings = (
        Setting("r", 16, "the rank of each update", is_used),
        Setting("alpha", 32.0, "an update is scaled by alpha / r", is_used),
        Setting("target_modules", "all-linear", "or a list, such as [q_proj, v_proj]", is_used),
    )
    yield ConfigPart("lora", f"An adapter instead of the weights, {why}.", settings)


def _optimizer(choices: Choices) -> ConfigPart:
    settings = (
        Setting("lr", choices.purpose.learning_rate, "usual for a model of this size; the first to vary"),
        Setting("warmup_steps", choices.training.warmup_steps),
        _tip("weight_decay", 0.01, "0.1 by default"),
        _tip("schedule", "constant", "after the warm-up; a cosine by default"),
    )
    return ConfigPart("optimizer", "AdamW, unless name says otherwise.", settings)


def _training(choices: Choices) -> ConfigPart:
    chosen = choices.training
    longest = "" if choices.longest is None else f"; the model takes {choices.longest:,}"
    rows = "pairs" if choices.purpose.are_pairs else "sequences"
    how_long = Setting("steps", chosen.steps, f"about {chosen.passes:.2g} times through the data")
    if chosen.epochs is not None:
        how_long = Setting("epochs", chosen.epochs, f"times through the data: about {plural(chosen.steps, 'step')}")
    settings = [
        Setting("output", str(choices.output), "a folder for metrics, checkpoints and the model"),
        Setting("seq_len", chosen.seq_len, f"tokens of a sequence{longest}"),
        Setting("batch_size", chosen.batch_size, f"{rows} of a step"),
        how_long,
        Setting("precision", choices.precision),
    ]
    if chosen.eval_every:
        settings.append(Setting("eval_every", chosen.eval_every, "steps between validations"))
        settings.append(_tip("patience", 3, "validations without an improvement, after which the run ends"))
    settings.append(_tip("spike_factor", 20.0, "a loss this many times the usual one makes a step bad"))
    settings.append(_tip("bad_numbers", "skip", "a bad step changes nothing; by default it ends the run"))
    return ConfigPart("training", "How long, and where the results go.", tuple(settings))


def _checkpoint(choices: Choices) -> ConfigPart:
    settings = [Setting("every", "auto", "steps, chosen by what a save costs")]
    if choices.training.eval_every:
        settings.append(_tip("keep_best", True, "also keep the one of the lowest validation loss"))
    settings.append(_tip("resume", "latest", "go on from the newest one, where there is one"))
    return ConfigPart("checkpoint", "What a run resumes from.", tuple(settings))


def _sample() -> ConfigPart:
    prompt = _tip("prompt", "Once upon a time", "which the trained model continues at the end")
    return ConfigPart("sample", "A text to see what was learned.", (prompt, _tip("max_new_tokens", 64, "")))


_WIDTH = 110  # widest line, in columns, with a comment beside its setting


@dataclass(frozen=True)
class Setting:
    """A line of a section. One that isn't used is a comment, which becomes a setting without its #."""

    name: str
    value: Any
    comment: str = ""
    is_used: bool = True

    def lines(self) -> Iterator[str]:
        """Yields the lines, with the comment on the first or above it."""
        first, *rest = _yaml(self.name, self.value).splitlines()
        mark = "" if self.is_used else "# "
        beside = f"{first}  # {self.comment}"
        if self.comment and len(beside) > _WIDTH:
            yield f"# {self.comment}"
        yield f"{mark}{beside if self.comment and len(beside) <= _WIDTH else first}"
        yield from (f"{mark}{line}" for line in rest)


@dataclass(frozen=True)
class ConfigPart:
    """A section of the configuration, and lines on its purpose. One that isn't used is a comment as a whole."""

    name: str
    comment: str
    settings: tuple[Setting, ...]

    def with_values(self, values: Mapping[str, Any]) -> ConfigPart:
        """Returns the section with these values: in the place of its own, or after them. Each comes once."""
        known: dict[str, Setting] = {}
        # Of a setting that is used and also a tip, the first one stays.
        for setting in self.settings:
            known.setdefault(setting.name, setting)
        settings = (Setting(name, values[name]) if name in values else setting for name, setting in known.items())
        more = (Setting(name, value) for name, value in values.items() if name not in known)
        return replace(self, settings=(*settings, *more))

    def values(self) -> dict[str, Any]:
        """Returns the settings that are used."""
        return {setting.name: setting.value for setting in self.settings if setting.is_used}

    def lines(self) -> Iterator[str]:
        """Yields the section's lines."""
        is_used = bool(self.values())
        yield from (f"# {line}" for line in self.comment.splitlines())
        yield f"{self.name}:" if is_used else f"# {self.name}:"
        for setting in self.settings:
            shown = setting if is_used else replace(setting, is_used=True)
            yield from (f"  {line}" if is_used else f"#   {line}" for line in shown.lines())


def config_text(head: Sequence[str], parts: Sequence[ConfigPart]) -> str:
    """Returns the file: lines of comment, and the sections."""
    blocks = [[f"# {line}" if line else "#" for line in head], *([*part.lines()] for part in parts)]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _yaml(name: str, value: Any) -> str:
    """Returns YAML: a section within a section as a block, any other value in a line."""
    text = yaml.safe_dump(value, sort_keys=False, default_flow_style=None, width=10_000)
    if isinstance(value, dict):
        return f"{name}:\n{indent(text, '  ')}"
    return f"{name}: {text}".removesuffix("...\n")
