"""The configuration that `slipstream init` writes: from a model and data to a file that trains as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from slipstream.launch import Progress
from slipstream.model import MANY_TOKENS, check_length, check_sliceable, longest_sequence, meta_model
from slipstream.option_problems import records_in
from slipstream.options import Runtime
from slipstream.planning.model_source import model_section
from slipstream.training.config import Config, ModelSection
from slipstream.training.config.config_file import parse_config, set_override
from slipstream.training.data import has_tokenizer
from slipstream.training.data.samples import ChatTemplate
from slipstream.training.new_config.config_parts import Choices, config_parts
from slipstream.training.new_config.config_text import ConfigPart, config_text
from slipstream.training.new_config.data_choice import DataChoice, choose_data, place_of
from slipstream.training.new_config.data_sizes import DataSizes, count_tokens, some_of
from slipstream.training.new_config.pipeline_choice import PipelineChoice, choose_pipeline
from slipstream.training.new_config.this_machine import dtype_here, this_machine
from slipstream.training.new_config.training_choice import Purpose, choose_training
from slipstream.training.preflight import load_model_config
from slipstream.training.preflight.model_checks import check_model
from slipstream.training.preflight.text_preparation import check_vocabulary, make_tokenizer

_PRECISIONS = {"bfloat16": "bf16-weights", "float32": "float32"}  # `training.precision`, by what is planned for
_TRAINED_BYTES, _SHARE = 16, 0.7  # of a parameter in training; of the memory, for parameters
_SMALLEST: dict[str, dict[str, Any]] = {
    "training": {"output": "runs", "seq_len": 1, "steps": 1},
    "pipeline": {"num_ranks": 1, "slices": 1},
}


@dataclass(frozen=True)
class WrittenConfig:
    """The text of a configuration, and lines on what was chosen and why."""

    text: str
    lines: tuple[str, ...]


def write_config(model: str, data: str, output: Path, given: Mapping[str, Any], progress: Progress) -> WrittenConfig:
    """Returns a configuration that trains `model` on `data` on this machine, with comments. Writes nothing.

    Args:
        model: a folder, a hub name, a config.json or a training configuration.
        data: a file, a folder, a data set's hub name, or python-stdlib.
        output: the file that it is for.
        given: settings by section, which are taken as they are.
        progress: shows what is being done.

    Raises:
        SlipstreamError: where model or data can't be read or don't fit together, or the model can't be sliced.
    """
    with progress.waiting("reading the model's configuration"):
        first = _FirstReading.of(model, data, given)
    with progress.waiting("reading the data"):
        found = choose_data(data, first.data, progress.warn)
        sizes = _measure(found, first, progress)
    with progress.waiting("checking that the model can be sliced, and planning"):
        choices = _choose(first, found, sizes, given, data)
        parts = [part.with_values(given.get(part.name, {})) for part in config_parts(choices)]
        known = {part.name for part in parts}
        parts += [ConfigPart(name, "As given.", ()).with_values(given[name]) for name in given if name not in known]
        _check(parts, first.model_config)
    head = [f"Written by `slipstream init {model} {data}`. Lines such as `# key: value` are settings to try: take away"]
    head += ["the #. All are in docs/configuration.md.", "", f"slipstream train {output}"]
    return WrittenConfig(config_text(head, parts), (*_lines(choices),))


def read_settings(overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns settings by section, from `section.key=value`.

    Raises:
        SlipstreamError: for what isn't one, and for settings that there aren't.
    """
    given: dict[str, Any] = {}
    for override in overrides:
        set_override(given, override)
    _check_names(given)
    return given


def _check_names(given: Mapping[str, Any]) -> None:
    """Raises SlipstreamError for a section or setting that there isn't, before anything is read."""
    smallest: dict[str, dict[str, Any]] = {**_SMALLEST, "model": {"path": "model"}, "data": {"files": ["text"]}}
    for name, values in given.items():
        section = records_in(Config.model_fields[name].annotation)[0] if name in Config.model_fields else None
        if section is None or not isinstance(values, dict):
            parse_config({**smallest, name: values})
        elif unknown := {each: value for each, value in values.items() if each not in section.model_fields}:
            parse_config({**smallest, name: smallest.get(name, {}) | unknown})


@dataclass(frozen=True)
class _FirstReading:
    """What is known of the model before the data is read."""

    config: Config  # with the model and the data alone
    model: dict[str, Any]
    data: dict[str, Any]  # settings beside where it is
    model_config: Any
    num_parameters: int

    @classmethod
    def of(cls, model: str, data: str, given: Mapping[str, Any]) -> _FirstReading:
        section, settings = _model_settings(model) | given.get("model", {}), dict(given.get("data", {}))
        model_config = load_model_config(ModelSection(**section))
        if _lacks_tokenizer(section) and not {"tokenizer", "vocab_size"} & settings.keys():
            settings["vocab_size"] = model_config.get_text_config().vocab_size
        config = parse_config({**_SMALLEST, "model": section, "data": place_of(data) | settings})
        number = sum(parameter.numel() for parameter in meta_model(model_config).parameters())
        return cls(config, section, settings, model_config, number)


def _model_settings(model: str) -> dict[str, Any]:
    """Returns the section `model`, with random weights where a folder has none."""
    section = model_section(model)
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
    tokenizer = make_tokenizer(first.config, first.model_config, [some], progress)
    template = ChatTemplate(tokenizer, first.config.data.chat_template) if some.has_messages else None
    sizes = count_tokens(found, some, tokenizer, template, longest_sequence(first.model_config) or MANY_TOKENS)
    check_vocabulary(sizes.largest, first.model_config)
    return sizes


def _choose(first: _FirstReading, found: DataChoice, sizes: DataSizes, given: Mapping[str, Any], data: str) -> Choices:
    machine, longest = this_machine(), longest_sequence(first.model_config)
    is_packed = given.get("data", {}).get("packing", "none" if found.are_pairs else "fixed") == "fixed"
    from_random = not first.config.model.pretrained
    is_large = first.num_parameters * _TRAINED_BYTES > _SHARE * machine.device.memory * machine.num_devices
    is_adapter = "lora" in given or (is_large and not from_random and find_spec("peft") is not None)
    purpose = Purpose(found.are_pairs, found.is_text, from_random, is_adapter, first.num_parameters)
    training = choose_training(purpose, sizes, longest, is_packed, given.get("training", {}))
    check_length(first.model_config, training.seq_len, "training.seq_len")
    if is_packed and check_sliceable(first.model_config).longest_packed < training.seq_len:
        is_packed = False  # documents would influence each other
    pipeline = PipelineChoice({}, {}, "as given")
    if not {"pipeline", "memory", "parallel"} & given.keys():
        numbers = {"seq_len": training.seq_len, "global_batch": training.batch_size}
        pipeline = choose_pipeline(first.model_config, machine, dtype_here(), is_packed, numbers)
    return Choices(
        model=first.model,
        data=found,
        is_packed=is_packed,
        purpose=purpose,
        training=training,
        pipeline=pipeline,
        precision=_PRECISIONS[dtype_here()],
        longest=longest,
        output=_new_folder(Path(data).stem),
    )


def _new_folder(name: str) -> Path:
    """Returns a folder for a run's results that isn't there yet."""
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(path for path in (Path("runs") / each for each in names) if not path.exists())


def _check(parts: Sequence[ConfigPart], model_config: Any) -> None:
    """Raises SlipstreamError where a run would, before it reads its text."""
    config = parse_config({part.name: values for part in parts if (values := part.values())})
    unchecked = config.model_copy(update={"runtime": Runtime(self_check=False)})  # which has been done
    check_model(unchecked, model_config, Progress(None))


def _lines(choices: Choices) -> Sequence[str]:
    """Returns lines on what was found and chosen."""
    training, purpose = choices.training, choices.purpose
    rows = "pairs" if purpose.are_pairs else "sequences"
    what = "an adapter" if purpose.is_adapter else "all weights"
    lines = [
        choices.data.opened.describe(),
        f"training {what}: {training.steps:,} steps of {training.batch_size} {rows} of {training.seq_len:,} tokens, "
        f"learning rate {purpose.learning_rate:g}",
        "pipeline: " + choices.pipeline.reason.partition(".\n")[0],
    ]
    if training.num_longer:
        lines.append(f"{training.num_longer:,} {choices.noun} are longer than {training.seq_len:,} tokens: cut there")
    return lines
