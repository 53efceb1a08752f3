"""The text of a run: read, tokenised, and split into training and held-out documents."""

from __future__ import annotations

from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.training import data
from slipstream.training.config import Config


def prepare_text(config: Config, model_config: Any, progress: Progress) -> tuple[Any, data.TokenisedText]:
    """Returns the tokenizer and the tokenised documents.

    A tokenizer that is trained here sets the special tokens of `model_config`.
    """
    with progress.waiting("reading text"):
        documents = data.read_documents(config.data, progress.say)
    noun = "document" if len(documents) == 1 else "documents"
    progress.say(f"text: {len(documents):,} {noun}, {sum(map(len, documents)):,} characters")
    name, vocab_size = config.data.tokenizer or config.model.path, config.data.vocab_size
    if name is not None and vocab_size is None:
        is_the_models = config.data.tokenizer in (None, config.model.path)
        tokenizer = data.load_tokenizer(name, config.model.trust_remote_code and is_the_models)
    else:
        vocab_size = vocab_size or model_config.get_text_config().vocab_size
        check_vocabulary(vocab_size - 1, model_config)
        tokenizer = data.train_tokenizer(documents, vocab_size, progress)
        model_config.eos_token_id = tokenizer.eos_token_id
        model_config.bos_token_id = model_config.pad_token_id = None
    if tokenizer.eos_token_id is None:
        progress.say(
            f"the tokenizer has no end-of-text token, so none of the {len(documents):,} documents is closed by one, "
            "and the model doesn't learn where a text ends; name one whose eos_token is set in data.tokenizer"
        )
    text = data.tokenise(tokenizer, documents, progress)
    progress.say(f"tokens: {len(text.tokens):,}, vocabulary {len(tokenizer):,}")
    return tokenizer, text


def check_vocabulary(largest: int, model_config: Any) -> None:
    """Raises SlipstreamError where the token id `largest` has no row in the model's embedding."""
    vocab_size = model_config.get_text_config().vocab_size
    if largest >= vocab_size:
        raise SlipstreamError(
            f"the model's vocabulary has {vocab_size} tokens (0 to {vocab_size - 1}), but the text needs token id "
            f"{largest}; use the model's own tokenizer, a smaller data.vocab_size, or a larger vocab_size in "
            "model.config"
        )


def split_text(
    config: Config, text: data.TokenisedText, progress: Progress
) -> tuple[data.TokenisedText, data.TokenisedText]:
    """Returns the training text and the held-out text; says so where a step goes through the former several times.

    Raises:
        SlipstreamError: if the first is shorter than a sequence, or the second than a batch that validation needs.
    """
    training, packing = config.training, config.data.packing
    train, validation = text.split(config.data.validation_fraction, training.seed)
    sequences = data.sequences_of(train, packing, training.seq_len, training.seed)  # raises where there is none
    size = data.BatchSize(training.batch_size, training.batch_tokens).at(sequences, 0)
    if size > sequences.num_sequences:
        progress.say(
            f"each step takes {size:,} sequences, but the training text has {sequences.num_sequences:,}: a step goes "
            f"through it {size / sequences.num_sequences:.3g} times; give more text or a smaller training.batch_size"
        )
    if training.eval_every:
        _check_validation(config, validation)
    return train, validation


def _check_validation(config: Config, text: data.TokenisedText) -> None:
    """Raises SlipstreamError where the held-out text is less than a batch."""
    training, unit = config.training, "tokens"
    given, needed = len(text.tokens), training.batch_tokens or training.seq_len * training.batch_size
    is_enough = given >= needed
    if config.data.packing == "none" and given:
        sequences = data.WholeDocuments(text, training.seq_len, None)
        batches = data.BatchSize(training.batch_size, training.batch_tokens)
        is_enough = any(batches.batches(sequences, sequences.num_sequences))
        if training.batch_tokens is None:
            unit, given, needed = "sequences", sequences.num_sequences, training.batch_size
    if not is_enough:
        raise SlipstreamError(
            f"the held-out text has {given} {unit}, less than one batch of {needed}; give more text, "
            f"a larger data.validation_fraction (now {config.data.validation_fraction}), or --training.eval_every=0"
        )
