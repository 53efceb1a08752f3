"""The text of a run: read, tokenised, and split into training and held-out documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.model import NewTokens, longest_sequence, set_vocab_size
from slipstream.train import data
from slipstream.train.config import Config, SampleSection, SourceSection
from slipstream.train.data.chat_templates import (
    LOOKED_AT,
    ChatTemplate,
    check_template,
    find_turn_problems,
    special_tokens,
    with_special_tokens,
)
from slipstream.train.data.open_source import WITH_ANSWERS, OpenSource, check_tokenised, find_form, find_loss
from slipstream.train.data.samples import SampleReader, read_samples, show_example
from slipstream.train.data.streams import MixedStreams, RowStream, stream_sequences
from slipstream.train.model_files import ModelFiles
from slipstream.train.preflight.model_checks import check_new_rows
from slipstream.units import plural


@dataclass(frozen=True)
class PreparedText:
    """The tokens of a run, source by source."""

    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    train: list[data.TokenisedText]
    validation: list[data.TokenisedText]
    sequences: data.TrainingSequences  # `train`'s, or a stream's


def prepare_text(config: Config, files: ModelFiles, progress: Progress) -> PreparedText:
    """Reads and tokenises all sources, and shows a sample of which not every token counts. Warns of turns
    without an end, and of empty thoughts.

    A tokenizer that is trained here sets the special tokens of the model.

    Raises:
        SlipstreamError: where a source can't be read, or its tokens don't fit the model or the length.
    """
    section = config.data
    training = config.training
    model_config = files.config
    check_template(section.chat_template)
    if files.tokenizer is not None:
        check_tokenizer(config, files, progress)
    with progress.waiting("reading text"):
        sources = [] if section.streaming else [_open(config, source, progress) for source in section.all_sources]
        held_out = _open_validation(config, progress)
    for source in sources:
        progress.say(source.describe())
    tokenizer = make_tokenizer(config, files, sources, progress)
    needs_template = any(source.has_messages for source in [*sources, *held_out])
    template = ChatTemplate(tokenizer, section.chat_template) if needs_template else None
    vocab_size = model_config.get_text_config().vocab_size

    def tokenised(opened: OpenSource) -> data.TokenisedText:
        return opened.tokenise(tokenizer, template, training.seq_len, progress, vocab_size)

    texts = [tokenised(source) for source in sources]
    validation = [tokenised(source) for source in held_out]
    if not validation:
        parts = [text.split(section.validation_fraction, training.seed) for text in texts]
        texts = [train for train, _ in parts]
        validation = [other for _, other in parts]
    if section.streaming:
        sequences, read, chats = _open_stream(config, tokenizer, vocab_size, progress)
    else:
        read = texts
        chats = [text for text, source in zip(texts, sources, strict=True) if source.has_messages]
        num_tokens = sum(len(text.tokens) for text in [*texts, *validation])
        progress.say(f"tokens: {num_tokens:,}, vocabulary {len(tokenizer):,}")
        sequences = data.sequences_of(texts, section.packing, training.seq_len, training.seed, section.weights)
    check_vocabulary(max(text.largest() for text in [*read, *validation]), model_config)
    if sample := next((text for text in read if text.labels is not None), None):
        show_example(sample, tokenizer, progress)
    for problem in find_turn_problems(chats, tokenizer, training.seq_len, files.stop_tokens):
        progress.warn(problem)
    return PreparedText(tokenizer, texts, validation, sequences)


def _open(config: Config, source: SourceSection, progress: Progress) -> OpenSource:
    return OpenSource.of(source, progress.warn, config.preference.answers if config.preference else None)


def _open_validation(config: Config, progress: Progress) -> list[OpenSource]:
    """Returns the sources that `data.validation` names, if any; errors name the setting."""
    source = config.data.validation_source
    if source is None:
        return []
    try:
        return [_open(config, source, progress)]
    except SlipstreamError as error:
        raise SlipstreamError(f"data.validation={config.data.validation}: {error}") from error


def _open_stream(
    config: Config, tokenizer: Any, vocab_size: int, progress: Progress
) -> tuple[data.TrainingSequences, list[data.TokenisedText], list[data.TokenisedText]]:
    """Returns the sequences of the streams, the text of the first block of each, and those which have answers."""
    with progress.waiting("reading the first rows"):
        sequences = stream_sequences(config, tokenizer, progress.warn, vocab_size)
    streams = sequences.parts if isinstance(sequences, MixedStreams) else [sequences]
    for source, stream in zip(config.data.all_sources, streams, strict=True):
        whose = "" if len(streams) == 1 else f" of {source.name}"
        progress.say(
            f"stream: the first {config.data.shuffle_rows:,} rows{whose}, or as many as there are, have "
            f"{plural(len(stream.first_text.tokens), 'token')} in {plural(stream.num_sequences, 'sequence')}"
        )
        if stream.origin["form"] != "tokens":
            check_tokenised(stream.first_text, tokenizer, source.name, progress)
    chats = [stream.first_text for stream in streams if stream.origin["form"] in WITH_ANSWERS]
    return sequences, [stream.first_text for stream in streams], chats


def check_turns(config: Config, files: ModelFiles) -> list[str] | None:
    """Returns a run's warnings about its conversations, by their first rows alone; None where it has none.

    Raises:
        SlipstreamError: where rows or tokenizer can't be read, or the run itself makes the tokenizer.
    """
    sources = [(source, RowStream(source, LOOKED_AT)) for source in config.data.all_sources if source.has_rows]
    answers = config.preference.answers if config.preference else None
    forms = [find_form(source, stream.columns, answers) for source, stream in sources]
    if {*forms}.isdisjoint(WITH_ANSWERS):
        return None
    tokenizer = files.tokenizer
    seq_len = config.training.seq_len
    if tokenizer is None:
        raise SlipstreamError("the run trains its tokenizer first, and warns itself")
    template = ChatTemplate(tokenizer, config.data.chat_template) if config.data.chat_template else None
    texts = []
    for (source, stream), form in zip(sources, forms, strict=True):
        if form in WITH_ANSWERS:
            if form == "rated":
                # Only a training needs answers to several prompts, which the first rows needn't have.
                form = "pairs" if "chosen" in stream.columns else "prompt-completion"
            reader = SampleReader(source, form, find_loss(source, form), tokenizer, template)
            name, rows = stream.next_block()
            texts.append(read_samples(rows, reader, name, seq_len)[0])
    stop_at_end_of_text(config, files, tokenizer)
    return find_turn_problems(texts, tokenizer, seq_len, files.stop_tokens)


def add_vocabulary(config: Config, files: ModelFiles, progress: Progress) -> NewTokens | None:
    """Gives the model's configuration rows for the special tokens that a tokenizer gets in addition, and returns the
    tokens that are new to a pretrained model: special tokens and the end of text that its own tokenizer hasn't. Rows of
    theirs that are there already are padding. None where there are none.

    Raises SlipstreamError where they can't be trained.
    """
    special = special_tokens(config.data)
    is_own = not special and (config.data.tokenizer is None or config.has_models_tokenizer)
    tokenizer = None if is_own else files.tokenizer
    if tokenizer is None:
        return None
    model_config = files.config
    had = model_config.get_text_config().vocab_size
    vocab_size = max(had, len(tokenizer)) if special else had
    known = {*range(had)}
    if config.model.pretrained:
        known &= {*files.own_vocabulary.values()}
    ends = [] if tokenizer.eos_token is None else [tokenizer.eos_token]
    ids = {int(number) for number in tokenizer.convert_tokens_to_ids([*special, *ends])} - known
    new = sorted(number for number in ids if number < vocab_size)
    if not new:
        return None
    check_new_rows(config, model_config, len(new))
    set_vocab_size(model_config, vocab_size)
    in_padding = sum(number < had for number in new)
    rows = [f"{in_padding} rows of padding"] * (in_padding > 0)
    rows += [f"{vocab_size - had} new rows"] * (vocab_size > had)
    where = f"{' and '.join(rows)} of the embedding and the head"
    progress.say(f"special tokens: {where}, the means of those of the model's own tokens")
    return NewTokens(tuple(new), max(known) + 1) if config.model.pretrained else None


def stop_at_end_of_text(config: Config, files: ModelFiles, tokenizer: Any) -> None:
    """Lets the exported model stop at the tokenizer's end of text, too."""
    end = tokenizer.eos_token_id
    if end is not None and end not in (stops := files.stop_tokens):
        files.config.eos_token_id = [*stops, end] if config.model.pretrained and stops else end


def make_tokenizer(config: Config, files: ModelFiles, sources: Sequence[OpenSource], progress: Progress) -> Any:
    """Returns the tokenizer that the configuration names, or one that is trained on the text, whose special tokens the
    model's configuration gets."""
    tokenizer = files.tokenizer
    model_config = files.config
    if tokenizer is None:
        vocab_size = config.data.vocab_size or model_config.get_text_config().vocab_size
        check_vocabulary(vocab_size - 1, model_config)
        texts = (text for source in sources for text in source.texts())
        first = next(texts, None)
        if first is None:
            raise SlipstreamError(
                f"{sources[0].source.name} has tokens and no text, on which a tokenizer could be trained; name the one "
                "that they are from with --data.tokenizer=..."
            )
        more = special_tokens(config.data)
        tokenizer = data.train_tokenizer(chain([first], texts), vocab_size, progress, more)
        tokenizer = with_special_tokens(tokenizer, config.data)
        # The configuration's ids belong to another vocabulary.
        model_config.eos_token_id = None
        model_config.bos_token_id = model_config.pad_token_id = None
    stop_at_end_of_text(config, files, tokenizer)
    if tokenizer.eos_token_id is None and (num_closed := sum(source.num_closed for source in sources)):
        progress.warn(
            f"the tokenizer has no end-of-text token, so none of the {num_closed:,} documents is closed by one, "
            "and the model doesn't learn where a text ends; name one whose eos_token is set in data.tokenizer"
        )
    return tokenizer


def check_vocabulary(largest: int, model_config: Any) -> None:
    """Raises SlipstreamError where the token id `largest` has no row in the model's embedding."""
    vocab_size = model_config.get_text_config().vocab_size
    if largest >= vocab_size:
        raise SlipstreamError(
            f"the model's vocabulary has {vocab_size} tokens (0 to {vocab_size - 1}), but the text needs token id "
            f"{largest}; use the model's own tokenizer, a smaller data.vocab_size, or a larger vocab_size in "
            "model.config"
        )


def check_tokenizer(config: Config, files: ModelFiles, progress: Progress) -> None:
    """Refuses, before a text is tokenised, a named tokenizer with more tokens than the model's embedding has rows, and
    warns of one whose tokens aren't those that a pretrained model has learnt.

    Raises:
        SlipstreamError: with both numbers.
    """
    tokenizer: Any = files.tokenizer
    known = tokenizer.get_vocab()
    rows = files.config.get_text_config().vocab_size
    # Tokens that were added to a tokenizer needn't have rows as long as no text has them.
    added = getattr(tokenizer, "added_tokens_decoder", ())
    num_tokens = 1 + max((number for number in known.values() if number not in added), default=-1)
    name = config.data.tokenizer or config.model.path
    folder = Path(str(config.model.path))
    has_own = config.model.path is not None and (data.has_tokenizer(folder) or not folder.is_dir())
    if num_tokens > rows:
        if config.model.path is None:
            instead = f"give --model.config.vocab_size={num_tokens}, or leave data.tokenizer out to train one"
        elif config.data.tokenizer is None:
            instead = "copy the files of the model's own tokenizer there"
        else:
            instead = "leave data.tokenizer out for the model's own" if has_own else "name the model's own"
        raise SlipstreamError(
            f"the tokenizer {name} has {num_tokens:,} tokens, and the model's vocabulary {rows:,} (0 to {rows - 1}), "
            f"so it is another model's; {instead}"
        )
    if not config.model.pretrained or config.has_models_tokenizer or not has_own:
        return
    own = files.own_vocabulary
    num_equal = sum(known.get(token) == number for token, number in own.items())
    if 2 * num_equal < min(len(own), len(known)):
        progress.warn(
            f"the tokenizer {name} is another model's: {num_equal:,} of the {len(own):,} tokens of model.path="
            f"{config.model.path} have the same number in it, and the pretrained weights know each token by its "
            "number; leave data.tokenizer out for the model's own"
        )


def check_sample(sample: SampleSection, tokenizer: Any, model_config: Any, progress: Progress) -> None:
    """Raises SlipstreamError where the sample would be longer than the model's positions, which would only be found
    when the training is over. Warns of two begin tokens."""
    if sample.prompt is None:
        return
    tokens = tokenizer(sample.prompt, verbose=False)["input_ids"]
    if doubled := data.prompt_beginning_twice(sample.prompt, tokens, tokenizer):
        progress.warn(f"sample.prompt={doubled}; leave it out there")
    limit = longest_sequence(model_config)
    length = len(tokens)
    written = sample.max_new_tokens
    if limit is not None and length + written > limit:
        room = limit - length
        instead = f"--sample.max_new_tokens={room}" if room > 0 else "a shorter sample.prompt"
        raise SlipstreamError(
            f"sample.prompt has {length} tokens and sample.max_new_tokens={written}, together more than the model's "
            f"{limit} positions; give {instead}, or --sample.prompt=null for none"
        )


def check_amount(config: Config, text: PreparedText, progress: Progress) -> None:
    """Reports steps that go through the training text several times, and the share of padding in its sequences.

    Raises:
        SlipstreamError: if nothing is held out, where validation needs it.
    """
    training = config.training
    sequences = text.sequences
    size = data.BatchSize.of(training).at(sequences, 0)
    if size > sequences.num_sequences and not config.data.streaming:
        progress.warn(
            f"each step takes {plural(size, 'sequence')}, but the training text has {sequences.num_sequences:,}: a "
            f"step goes through it {size / sequences.num_sequences:.3g} times; give more text or a smaller "
            "training.batch_size"
        )
    if isinstance(sequences, data.PackedSamples):
        progress.say(
            f"{plural(sequences.text.num_documents, 'sample')} in {plural(sequences.num_sequences, 'sequence')} of "
            f"{sequences.seq_len:,} tokens, of which {1 - sequences.filled:.1%} are padding"
        )
    if training.eval_every:
        _check_validation(config, text.validation)


def _check_validation(config: Config, texts: list[data.TokenisedText]) -> None:
    """Raises SlipstreamError where nothing is held out of which a token could be predicted."""
    if not any((text.lengths > 1).any() for text in texts):
        raise SlipstreamError(
            "training.eval_every needs held-out text, and there is none; give more text, a larger "
            f"data.validation_fraction (now {config.data.validation_fraction}), or --training.eval_every=0"
        )
