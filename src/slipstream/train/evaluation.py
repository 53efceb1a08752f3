"""Evaluates a model on held-out data as a training validates it: by its sections data and preference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from slipstream.checkpoint import describe_non_finite
from slipstream.errors import NonFiniteError, SlipstreamError, path_hint, syntax_text
from slipstream.foreign_text import parse_yaml, read_text
from slipstream.launch import Progress
from slipstream.model import MANY_TOKENS, check_length, load_config, longest_sequence
from slipstream.options import Precision, Runtime
from slipstream.pipeline import Pipeline, SequenceLoss
from slipstream.train.config import Config, PreferenceSection, SourceSection, precision_named
from slipstream.train.config.config_values import parse_config
from slipstream.train.config.overrides import set_override
from slipstream.train.data import (
    BatchSize,
    HeldOutBatches,
    TokenBatch,
    TokenisedText,
    TrainingSequences,
    load_texts,
    sequences_of,
)
from slipstream.train.data.chat_templates import ChatTemplate
from slipstream.train.data.open_source import OpenSource
from slipstream.train.data.tokenised_text import Array
from slipstream.train.export import OpenedModel
from slipstream.train.preferences import mean_rewards, preference_loss, sums_of_pairs, with_lengths
from slipstream.train.reference import kept_reference, log_probabilities
from slipstream.train.run_folder import RunFolder
from slipstream.train.training_step import Evaluator
from slipstream.units import plural


@dataclass(frozen=True)
class EvaluationRequest:
    """The request of an evaluation, as it was typed.

    Attributes:
        file: None for the run's held-out text.
        seq_len: at how many tokens documents are cut; None for the run's, or the model's longest.
        slice_len: the most tokens that are computed at a time.
        settings: of data and preference, such as `--data.loss=all`.
        reference: the model that rewards are relative to; None for the one that the run began with.
    """

    file: str | None
    seq_len: int | None
    slice_len: int
    settings: Sequence[str] = ()
    reference: str | None = None


def evaluate_model(opened: OpenedModel, request: EvaluationRequest, progress: Progress) -> TextLoss | PairLoss:
    """Returns the loss of a model on a file or on its run's held-out text.

    Of a run it is its validation's loss, with the run's settings; of another model each document is a sequence.

    Raises:
        SlipstreamError: where there is no text to evaluate, or the settings, the file and the model don't fit together.
    """
    config = _settings(opened, request)
    if config.preference is not None and config.preference.is_rated:
        raise SlipstreamError(
            "`slipstream eval` doesn't have preference.loss=kto, whose loss is relative to the other answers of a "
            "batch; the run's own validations are in its metrics.jsonl"
        )
    texts = _read(config, opened, request, progress)
    lengths = [length for text in texts for length in text.lengths.tolist()]
    precision = config if opened.run is not None else None
    longest = min(max(lengths), config.training.seq_len)
    num_pairs = len(lengths) // 2
    loss_fn = None if config.preference is None else preference_loss(config.preference)

    def loaded(path: str) -> Evaluator:
        return load_evaluator(path, longest, request.slice_len, precision, loss_fn)

    def of_answers(path: str, what: str) -> list[Array]:
        with progress.counting(what, total=num_pairs) as show:
            evaluator = loaded(path)
            found = log_probabilities(evaluator, texts, BatchSize(1), show)
        _check_finite(evaluator.pipe, float(sum(values.sum() for values in found)))
        return found

    def chosen() -> Sequence[int]:
        return _chosen(sequences_of(texts, "none", config.training.seq_len, seed=None), config, progress)

    if config.preference is None:
        return measure_text_loss(loaded(opened.path), texts, config, request.slice_len, progress)
    if not config.preference.has_reference:
        texts = [with_lengths(text, config.preference) for text in texts]
        of_lengths = (text.values for text in texts if text.values is not None)
        return _pair_loss(of_answers(opened.path, "evaluating"), [*of_lengths], config.preference, chosen())
    file = opened.run.reference if opened.run is not None and request.reference is None else None
    reference = [kept_reference(file, text) for text in texts]
    known = [values for values in reference if values is not None]
    if len(known) < len(texts):
        known = of_answers(name_reference(config, opened.run, request.reference), "computing the reference")
    return _pair_loss(of_answers(opened.path, "evaluating"), known, config.preference, chosen())


def _pair_loss(
    found: Sequence[Array], values: Sequence[Array], section: PreferenceSection, chosen: Sequence[int]
) -> PairLoss:
    now, known = (torch.from_numpy(np.concatenate(parts)) for parts in (found, values))
    chosen_pairs = {*chosen}
    sums = sums_of_pairs(now, known, section, [index in chosen_pairs for index in range(len(now) // 2)])
    return PairLoss(int(sums[0]), float(sums[4] / sums[0]), mean_rewards(sums))


def _settings(opened: OpenedModel, request: EvaluationRequest) -> Config:
    model_config = load_config(opened.path)
    if request.seq_len is not None:
        if request.seq_len < 2:
            raise SlipstreamError(f"--seq-len={request.seq_len}: a sequence needs 2 tokens, so that one is predicted")
        check_length(model_config, request.seq_len, "--seq-len")
    if opened.run is not None and opened.run.config.is_file():
        if request.file is None:
            _check_settings_alone(request)
        return settings_of_run(opened.run, request.file, request.seq_len, request.settings)
    if request.file is None:
        raise SlipstreamError("FILE is missing: only a run has held out a text of its own; give a file to evaluate on")
    seq_len = request.seq_len or longest_sequence(model_config) or MANY_TOKENS
    return settings_of_model(opened.path, request.file, seq_len, request.settings)


def _check_settings_alone(request: EvaluationRequest) -> None:
    """Raises SlipstreamError for settings of how a file becomes tokens, as a run's held-out text already is tokens."""
    without = [setting for setting in request.settings if not setting.startswith("--preference.")]
    if request.seq_len is not None:
        without.append(f"--seq-len={request.seq_len}")
    if without:
        raise SlipstreamError(
            f"{without[0]} without FILE: what the run held out is already tokenised and cut into sequences. "
            "Give a file, or leave it out"
        )


def _read(config: Config, opened: OpenedModel, request: EvaluationRequest, progress: Progress) -> list[TokenisedText]:
    """Returns the tokens to evaluate on, source by source."""
    if request.file is None:
        assert opened.run is not None
        texts = [text for text in load_texts(opened.run.inputs, "validation") if (text.lengths > 1).any()]
        if not texts:
            raise SlipstreamError(f"the run in {opened.run.path} has held out no text; give a FILE to evaluate on")
        if (texts[0].group_size > 1) != (config.preference is not None):
            raise SlipstreamError(
                "settings of preference without FILE: the run has held out no pairs of answers; give one"
            )
        return texts
    check_file(held_out_file(config))
    source = config.data.validation_source or config.data
    rows = OpenSource.of(source, progress.warn, config.preference.answers if config.preference else None)
    progress.say(rows.describe())
    template = ChatTemplate(opened.tokenizer, config.data.chat_template) if rows.has_messages else None
    vocab_size = load_config(opened.path).get_text_config().vocab_size
    text = rows.tokenise(opened.tokenizer, template, config.training.seq_len, progress, vocab_size)
    _check_vocabulary(text, opened.path)
    if not (text.lengths > 1).any():
        raise SlipstreamError(f"{request.file} has no document of two tokens, of which the second could be predicted")
    return [text]


def _check_vocabulary(text: TokenisedText, model: str) -> None:
    vocab_size = load_config(model).get_text_config().vocab_size
    if (largest := text.largest()) >= vocab_size:
        raise SlipstreamError(
            f"the file has token id {largest}, but the model's vocabulary has {vocab_size}; give data of this model"
        )


def _settings_in(run: RunFolder) -> dict[str, Any]:
    """Returns the settings in a run's folder. Raises SlipstreamError where they can't be read."""
    try:
        values = parse_yaml(read_text(run.config))
    except OSError as error:
        raise SlipstreamError(f"can't read {run.config}, which has the run's settings: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise SlipstreamError(f"{run.config} isn't valid YAML: {syntax_text(error)}") from error
    if not isinstance(values, dict) or not isinstance(values.get("data"), dict):
        raise SlipstreamError(f"{run.config} holds no settings of a run; put back the file that the run has written")
    return values


# The settings that an evaluation takes over from a run; it has one process, and trains nothing.
_TAKEN_OVER = ("model", "data", "preference", "training")
_OF_A_VALIDATION = ("batch_size", "batch_tokens", "eval_batches")  # settings of an evaluation of held-out text


def settings_of_run(run: RunFolder, file: str | None, seq_len: int | None, typed: Sequence[str]) -> Config:
    """Returns how the run validates; with `file` held out in place of its own text, in the form of its first source.

    Raises:
        SlipstreamError: where settings aren't allowed, or don't fit each other.
    """
    values = _settings_in(run)
    data = values["data"]
    if sources := data.pop("sources", None):
        data |= {name: value for name, value in sources[0].items() if name in SourceSection.model_fields}
    if file is not None and not (data.get("dataset") or any(word.startswith("--data.dataset=") for word in typed)):
        # Of a data set the value may be the name of a split.
        check_file(Path(file))
    # The template of the run is in its tokenizer; the file may be gone.
    data |= {"streaming": False, "chat_template": None}
    values["data"] = data | ({} if file is None else {"validation": file})
    return _parse(values, seq_len, typed, has_file=file is not None)


def settings_of_model(model: str, file: str, seq_len: int, typed: Sequence[str]) -> Config:
    """Returns how a model that no run has left is evaluated on a file: each document and each sample by itself.

    Raises:
        SlipstreamError: where settings aren't allowed, or don't fit each other.
    """
    values = {
        "model": {"path": model},
        "data": {"files": [file], "packing": "none", "validation_fraction": 0},
        "training": {"output": "unused", "seq_len": seq_len},
    }
    return _parse(values, None, typed, has_file=True)


def _parse(values: dict[str, Any], seq_len: int | None, typed: Sequence[str], has_file: bool) -> Config:
    settings: dict[str, Any] = {name: values[name] for name in _TAKEN_OVER if values.get(name) is not None}
    for setting in typed:
        set_override(settings, setting)
    training: Mapping[str, Any] = settings["training"]
    names = ("output", "seq_len", "precision", "seed", *(() if has_file else _OF_A_VALIDATION))
    settings["training"] = {
        **{name: training[name] for name in names if name in training},
        "steps": 1,
        **({} if seq_len is None else {"seq_len": seq_len}),
    }
    settings["pipeline"] = {"num_ranks": 1, "slices": 1}
    return parse_config(settings)


def held_out_file(config: Config) -> Path | None:
    """Returns the file that is evaluated; None where it is a split of a data set."""
    names = [Path(str(config.data.validation))] if config.data.validation is not None else config.data.files or []
    return next((name for name in names if name.suffix or name.exists()), None)


def check_file(file: Path | None) -> None:
    """Raises SlipstreamError for a file that isn't there, or that is empty."""
    if file is not None and not file.is_file():
        raise SlipstreamError(
            f"there is no file {file}{path_hint(file)}; give a text, or a table ending in .json, .jsonl, .csv or "
            ".parquet"
        )
    if file is not None and file.stat().st_size == 0:
        raise SlipstreamError(f"{file} is empty; give a file with text")


_LARGEST = 700.0  # nats; e to a larger power is no float64


@dataclass(frozen=True)
class TextLoss:
    """The loss of a model on a text.

    Attributes:
        num_tokens: of the text.
        num_predicted: those that count: all that have a label but the first of each document, or of its part where it
            is cut.
        loss: the mean cross-entropy of a predicted token, in nats.
    """

    num_tokens: int
    num_predicted: int
    loss: float

    @property
    def perplexity(self) -> float:
        """e to the loss: among how many equally likely tokens the model as good as guesses."""
        return math.exp(self.loss) if self.loss < _LARGEST else math.inf


def measure_text_loss(
    evaluator: Evaluator, texts: Sequence[TokenisedText], config: Config, room: int, progress: Progress
) -> TextLoss:
    """Returns the loss on all sequences of the texts, as validations have them by `data.packing`: on each document, or
    its part in a sequence, by itself. Short ones are computed together, up to `room` tokens."""
    sequences = sequences_of(texts, config.data.packing, config.training.seq_len, seed=None, pads=True)
    documents = [part for index in _chosen(sequences, config, progress) for part in sequences.row(index).parts()]
    num_tokens = sum(len(tokens) for tokens, _ in documents)
    with progress.counting("evaluating", total=num_tokens) as show:
        total, num_predicted = evaluator.sum_losses(
            (batch, batch.num_predicted) for batch in _batches(documents, room, show)
        )
    _check_finite(evaluator.pipe, total)
    return TextLoss(num_tokens, num_predicted, total / max(num_predicted, 1))


def _check_finite(pipe: Pipeline, found: float) -> None:
    """Raises NonFiniteError, which names it, where a result isn't finite as a weight isn't."""
    if not math.isfinite(found) and (weight := pipe.find_non_finite()) is not None:
        raise NonFiniteError(f"the loss is {found}, as {describe_non_finite(weight)}; copy or download the model again")


def _chosen(sequences: TrainingSequences, config: Config, progress: Progress) -> Sequence[int]:
    """Returns the numbers of the sequences that a validation takes, which may be some of them."""
    limit = config.training.eval_batches
    total = sequences.num_sequences
    if limit is None:
        return range(total)
    batches = HeldOutBatches(sequences, BatchSize.of(config.training)).chosen(limit)
    chosen = [index for first, size in batches for index in range(first, min(first + size, total))]
    progress.say(
        f"training.eval_batches={limit} in the run: {len(chosen):,} of {plural(total, 'held-out sequence')} count, as "
        "in its validations"
    )
    return chosen


def _batches(
    all_documents: Sequence[tuple[Array, Array]], room: int, show: Callable[[float], None]
) -> Iterator[TokenBatch]:
    """Yields the documents, several together where they have at most `room` tokens. `show` gets the number of tokens
    that are done."""
    documents = list[tuple[Array, Array]]()
    size = 0
    done = 0
    for document in all_documents:
        if documents and size + len(document[0]) > room:
            yield TokenBatch.of_documents(documents)
            show(done := done + size)
            documents = []
            size = 0
        documents.append(document)
        size += len(document[0])
    if documents:
        yield TokenBatch.of_documents(documents)
        show(done + size)


@dataclass(frozen=True)
class PairLoss:
    """The loss of a model on pairs of answers.

    Attributes:
        loss: the mean over pairs.
        rewards: means over pairs, by their names in the metrics.
    """

    num_pairs: int
    loss: float
    rewards: dict[str, float]


def name_reference(config: Config, run: RunFolder | None, given: str | None) -> str:
    """Returns the model that rewards are relative to: the one that is given, or that the run began with.

    Raises SlipstreamError where neither is known.
    """
    if given is not None:
        return given
    if run is None:
        raise SlipstreamError(
            "rewards are relative to the model before the training on preferences; name it with --reference=MODEL"
        )
    lora = _settings_in(run).get("lora") or {}
    if lora.get("base_precision", "full") != "full":
        began = "weights in 4 bits"
    elif not config.model.pretrained:
        began = "random weights"
    else:
        return str(config.model.path)
    raise SlipstreamError(
        f"the run began with {began}, and didn't keep how probable these answers were then; name a model to compare "
        "with by --reference=MODEL, or leave FILE out to evaluate the answers that the run held out"
    )


def load_evaluator(
    model: str, longest: int, slice_len: int, config: Config | None, loss_fn: SequenceLoss | None
) -> Evaluator:
    """Loads the model in a folder, or of a name on the hub. `longest` is the most tokens of a document, of which
    `slice_len` are computed at a time. With `config` it computes in the precision of that training.

    Raises SlipstreamError where the model can't be loaded, or can't be cut into slices exactly.
    """
    pipe = Pipeline.from_pretrained(
        model,
        slices=1,
        device="cuda" if torch.cuda.is_available() else "cpu",
        runtime=Runtime(self_check=longest > slice_len),
        loss_fn=loss_fn,
        precision=Precision() if config is None else precision_named(config.training.precision),
    )
    return Evaluator(pipe, config, slice_len)
