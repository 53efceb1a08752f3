"""Turns documents into tokens, with the model's tokenizer or with a byte-level BPE trained on the text."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.training.data.tokenised_text import DocumentWriter, TokenisedText

END_OF_DOCUMENT = "<|endoftext|>"
_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
_FURTHER = ("merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*")
_GROUP = 64  # documents that the tokenizer gets at a time, to show progress in between


def has_tokenizer(folder: Path) -> bool:
    """Returns whether the folder has a file that a tokenizer may be read from."""
    return any(file for pattern in _FILES for file in folder.glob(pattern))


def is_of_tokenizer(name: str) -> bool:
    """Returns whether a file of this name belongs to a tokenizer."""
    return any(fnmatch(name, pattern) for pattern in (*_FILES, *_FURTHER))


def load_tokenizer(name: str, trusts_code: bool = False) -> Any:
    """Returns the tokenizer of a folder or hub name. `trusts_code`: runs the Python code that comes with it, if any.

    Raises SlipstreamError where there is none, and where it comes with code that isn't trusted.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trusts_code)  # None would ask on the terminal
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise SlipstreamError(
                f"the tokenizer of {name!r} comes with Python code of its own, which transformers would run. That code "
                "can do whatever you can on this machine: read it first. To allow it, set model.trust_remote_code: "
                "true where it is the model's own, without data.tokenizer, give a command --trust-remote-code, or name "
                "another with --data.tokenizer=..."
            ) from error
        raise SlipstreamError(
            f"{_absence(name, error)} Name one with --data.tokenizer=..., a folder or hub name."
        ) from error
    if type(tokenizer).__module__.startswith("transformers_modules"):
        type(tokenizer).register_for_auto_class()  # so that an export has the code, too
    return tokenizer


def _absence(name: str, error: Exception) -> str:
    """Says in a line why there is no tokenizer, for which transformers takes four."""
    if Path(name).is_dir() and not has_tokenizer(Path(name)):
        return f"no tokenizer in {name!r}: the folder has no tokenizer.json."
    reason = str(error).partition("\n")[0]
    if Path(name).is_dir():
        return f"the tokenizer in {name!r} can't be read: {reason}"
    return f"no tokenizer at {name!r}: there is no such folder here. On the hub: {reason}"


def train_tokenizer(documents: Iterable[str], vocab_size: int, progress: Progress) -> Any:
    """Trains a byte-level BPE of at most `vocab_size` tokens, one of which ends a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise SlipstreamError(
            f"a byte-level vocabulary needs at least {len(alphabet) + 1} tokens; given: {vocab_size}. "
            f"Raise data.vocab_size (or model.config.vocab_size)."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_DOCUMENT], initial_alphabet=sorted(alphabet), show_progress=False
    )
    with progress.waiting("training a tokenizer"):
        tokenizer.train_from_iterator(documents, trainer=trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_DOCUMENT)


def tokenise(
    tokenizer: Any, documents: Iterable[str], progress: Progress, num_characters: int | None = None
) -> TokenisedText:
    """Returns the tokens of all documents, each ended by the end-of-document token if there is one.

    `num_characters` of all documents, where they are known, are what progress is shown of.
    """
    if num_characters is None:
        documents = [*documents]
        num_characters = sum(map(len, documents))
    end, writer, left, done = tokenizer.eos_token_id, DocumentWriter(), iter(documents), 0
    with progress.counting("tokenising", total=num_characters) as show:
        while group := [*islice(left, _GROUP)]:
            for ids in tokenizer(group, verbose=False, return_attention_mask=False)["input_ids"]:
                closed = ids if end is None or ids[-1:] == [end] else [*ids, end]
                writer.add(np.asarray(closed, dtype=np.int32))
            done += sum(map(len, group))
            show(done)
    return writer.finish(has_labels=False)
