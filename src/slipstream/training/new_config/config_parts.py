"""What each section of a new configuration says: the choices, why, and what is worth trying next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.training.new_config.config_text import ConfigPart, Setting
from slipstream.training.new_config.data_choice import DataChoice
from slipstream.training.new_config.pipeline_choice import PipelineChoice
from slipstream.training.new_config.training_choice import Purpose, TrainingChoice

_PLANNED = {
    "num_ranks": "processes, over which the layers are spread",
    "stages_per_rank": "parts of the model on each process",
    "schedule": "the order of forwards and backwards",
    "num_microbatches": "parts of a step that follow each other",
    "slices": "tokens of each slice of a sequence; a number makes equal ones",
    "partition": "layers of each stage",
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
    longest: int | None  # tokens that the model takes
    output: Path

    @property
    def noun(self) -> str:
        """What a row of the data is."""
        if self.purpose.are_pairs:
            return "pairs"
        return "documents" if self.purpose.is_text else "samples"


def config_parts(choices: Choices) -> list[ConfigPart]:
    """Returns the sections in the order in which they are written."""
    made = [_model(choices), _data(choices), *_preference(choices), _pipeline(choices), _memory(), *_parallel(choices)]
    return [*made, *_lora(choices), _optimizer(choices), _training(choices), _checkpoint(choices), _sample()]


def _tip(name: str, value: Any, comment: str) -> Setting:
    return Setting(name, value, comment, is_used=False)


def _used(values: dict[str, Any], **comments: str) -> Iterator[Setting]:
    return (Setting(name, value, comments.get(name, "")) for name, value in values.items())


def _model(choices: Choices) -> ConfigPart:
    settings = [*_used(choices.model, init="random weights; give a folder with .safetensors files to fine-tune it")]
    if not (choices.purpose.from_random or choices.purpose.is_adapter):
        settings.append(_tip("init", "random", "random weights in place of the trained ones"))
    return ConfigPart("model", f"The model: {choices.purpose.num_parameters:,} parameters.", tuple(settings))


def _data(choices: Choices) -> ConfigPart:
    data, training = choices.data, choices.training
    settings = [*_used(data.settings, vocab_size="of a tokenizer that is trained on the text, as the model has none")]
    if not choices.is_packed and not data.are_pairs:
        settings.append(Setting("packing", "none", "each document is a sequence, as packed ones would see each other"))
    share = f"share of the {choices.noun} that is held out"
    settings.append(Setting("validation_fraction", training.held_out, share))
    settings.append(_tip("validation", "held-out.jsonl", "a file that is held out in place of that share"))
    if data.opened.has_messages:
        settings.append(_tip("chat_template", "chat.jinja", "in place of the tokenizer's"))
    if not (data.is_text or data.are_pairs):
        settings.append(_tip("loss", "all", "every token counts, not the answers alone"))
    return ConfigPart("data", f"What it is trained on. {data.opened.describe().capitalize()}.", tuple(settings))


def _preference(choices: Choices) -> Iterator[ConfigPart]:
    if choices.data.are_pairs:
        beta = Setting("beta", 0.1, "the larger, the closer the model stays to what it was")
        smoothing = _tip("label_smoothing", 0.1, "how probable it is that a pair is the wrong way round")
        yield ConfigPart(
            "preference", "Chosen answers become more probable.", (Setting("loss", "dpo"), beta, smoothing)
        )


def _pipeline(choices: Choices) -> ConfigPart:
    settings = _used(choices.pipeline.pipeline, **_PLANNED)
    return ConfigPart("pipeline", f"How it is split and ordered: {choices.pipeline.reason}.", tuple(settings))


def _memory() -> ConfigPart:
    recompute = _tip("recompute", "full", "activations are computed again, and don't have to be kept")
    limit = _tip("limit", 16_000_000_000, "bytes of each process, which a plan keeps to")
    return ConfigPart("memory", "To need less memory.", (recompute, limit))


def _parallel(choices: Choices) -> Iterator[ConfigPart]:
    settings = [_tip("tensor", 2, "processes that share every layer")]
    if choices.training.batch_size % 2 == 0 and not choices.pipeline.pipeline.get("num_microbatches", 1) > 1:
        settings.insert(0, _tip("data", 2, "replicas of the pipeline"))
    yield ConfigPart("parallel", "More processes, times those of the pipeline.", tuple(settings))


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
    yield ConfigPart("lora", f"An adapter in place of the weights, {why}.", settings)


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
    settings = [
        Setting("output", str(choices.output), "a folder for metrics, checkpoints and the model"),
        Setting("seq_len", chosen.seq_len, f"tokens of a sequence{longest}"),
        Setting("batch_size", chosen.batch_size, f"{rows} of a step"),
        Setting("steps", chosen.steps, f"about {chosen.passes:.2g} times through the data"),
        Setting("precision", choices.precision),
    ]
    if chosen.eval_every:
        settings.append(Setting("eval_every", chosen.eval_every, "steps between validations"))
        settings.append(_tip("patience", 3, "validations without an improvement, after which the run ends"))
    settings.append(_tip("spike_factor", 20.0, "a step whose loss is so many times the usual one is a bad step"))
    settings.append(_tip("bad_numbers", "skip", "a bad step changes nothing; by default it ends the run"))
    return ConfigPart("training", "How long, and where the results go.", tuple(settings))


def _checkpoint(choices: Choices) -> ConfigPart:
    settings = [Setting("every", "auto", "steps, chosen by what a save costs")]
    if choices.training.eval_every:
        settings.append(_tip("keep_best", True, "also keep the one of the lowest validation loss"))
    settings.append(_tip("resume", "latest", "go on from the newest one, where there is one"))
    return ConfigPart("checkpoint", "What a run goes on from.", tuple(settings))


def _sample() -> ConfigPart:
    prompt = _tip("prompt", "Once upon a time", "which the trained model continues at the end")
    return ConfigPart("sample", "A text to see what was learned.", (prompt, _tip("max_new_tokens", 64, "")))
