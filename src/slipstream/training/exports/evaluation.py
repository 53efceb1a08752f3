"""Evaluates a model on held-out data as a training validates it: by its sections data and preference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.model import MANY_TOKENS, check_length, load_config, longest_sequence
from slipstream.training.config import Config
from slipstream.training.data import TokenisedText, load_texts
from slipstream.training.data.samples import ChatTemplate, OpenSource
from slipstream.training.exports.evaluation_settings import (
    check_file,
    held_out_file,
    settings_of_model,
    settings_of_run,
)
from slipstream.training.exports.lone_model import LoneModel
from slipstream.training.exports.model_choice import OpenedModel
from slipstream.training.exports.pair_loss import (
    PairLoss,
    compare_pairs,
    find_reference,
    log_probabilities,
    name_reference,
)
from slipstream.training.exports.text_loss import TextLoss, measure_text_loss
from slipstream.training.preferences import PairSource


@dataclass(frozen=True)
class EvaluationRequest:
    """What is to be evaluated, as it was typed.

    Attributes:
        file: None for what the run has held out.
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
    """Returns the loss of a model on a file or on what its run has held out.

    Of a run it is what its validation reports, with the run's settings; of another model each document is a sequence.

    Raises:
        SlipstreamError: where there is nothing to evaluate, or the settings, the file and the model don't fit together.
    """
    config = _settings(opened, request)
    texts = _read(config, opened, request, progress)
    lengths = [length for text in texts for length in text.lengths.tolist()]
    precision = config if opened.run is not None else None
    longest = min(max(lengths), config.training.seq_len)

    def loaded(path: str) -> LoneModel:
        return LoneModel(path, longest, request.slice_len, precision)

    if config.preference is None:
        training, packing = config.training, config.data.packing
        return measure_text_loss(loaded(opened.path), texts, packing, training.seq_len, request.slice_len, progress)
    references = [find_reference(opened.run, text) if request.reference is None else None for text in texts]
    if any(each is None for each in references):
        base = loaded(name_reference(config, opened.run, request.reference))
        references = [log_probabilities(base, text, "computing the reference", progress) for text in texts]
        del base
    model = loaded(opened.path)
    found = [log_probabilities(model, text, "evaluating", progress) for text in texts]
    return compare_pairs(found, [each for each in references if each is not None], config.preference)


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
    """Raises SlipstreamError for settings of how a file becomes tokens, which what a run held out already is."""
    without = [setting for setting in request.settings if not setting.startswith("--preference.")]
    if request.seq_len is not None:
        without.append(f"--seq-len={request.seq_len}")
    if without:
        raise SlipstreamError(
            f"{without[0]} without FILE: what the run held out is in tokens already, and in sequences as it validates. "
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
    found = (OpenSource if config.preference is None else PairSource).of(source, progress.warn)
    progress.say(found.describe())
    template = ChatTemplate(opened.tokenizer, config.data.chat_template) if found.has_messages else None
    text = found.tokenise(opened.tokenizer, template, config.training.seq_len, progress)
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
