"""Documents as arrays of tokens, which of the tokens count, and the tokenizers that make them."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from slipstream.errors import SlipstreamError, check_not_misspelt, path_hint
from slipstream.launch import Progress
from slipstream.model import IGNORED
from slipstream.units import plural

Array = np.ndarray[Any, Any]
_KEPT = 2**25  # bytes in memory before they are written


class ArrayWriter:
    """An int32 array that grows at its end, of which at most 32 MiB are in memory.

    The file is in the folder for temporary files (TMPDIR), has no name, and is gone with the array or the process.
    """

    def __init__(self) -> None:
        self._parts, self._num_kept = list[Array](), 0  # the unwritten parts, and their bytes
        self._file: IO[bytes] | None = None

    def add(self, array: Array) -> None:
        """Puts an array at the end. Raises SlipstreamError where the disk has no room."""
        self._parts.append(array.astype(np.int32, copy=False))
        self._num_kept += self._parts[-1].nbytes
        if self._num_kept >= _KEPT:
            self._write()

    def finish(self) -> Array:
        """Returns the whole array, to which no more can be added; one in a file is read from there when it is used."""
        if self._file is None:
            return np.concatenate(self._parts) if self._parts else np.zeros(0, dtype=np.int32)
        self._write()
        with self._file as file:
            return np.memmap(file, dtype=np.int32, mode="r")

    def _write(self) -> None:
        try:
            self._file = self._file or tempfile.TemporaryFile()  # noqa: SIM115 - the array outlives this
            for part in self._parts:
                self._file.write(np.ascontiguousarray(part).data)
            self._file.flush()
        except OSError as error:
            raise SlipstreamError(
                f"the tokens can't be written to {tempfile.gettempdir()}: {error.strerror}; make room there, or name a "
                "folder on another disk in the environment variable TMPDIR"
            ) from error
        self._parts = []
        self._num_kept = 0


@dataclass(frozen=True)
class TokenisedText:
    """Documents in one array: document d is tokens[offsets[d] : offsets[d + 1]].

    Those with `labels` are samples that belong together, such as a conversation, and aren't cut any more. Of those in
    groups, each `group_size` documents are held out together, and are trained on in one step.
    """

    tokens: Array  # (N,) int32
    offsets: Array  # (D + 1,) int64
    labels: Array | None = None  # (N,) int32, unshifted, -100 for ignored tokens; None: all count
    group_size: int = 1  # 2: a chosen answer, the rejected one, the next chosen one, ...
    # (D, ...) float64, the loss's further argument of each document; not saved
    values: Array | None = None
    prompts_count: bool = False  # True if the loss takes prompts too, whose labels don't count; not saved
    # Of answers, each followed by the prompt with another one: whether it is wanted, (D / 2,) bool.
    ratings: Array | None = None

    @classmethod
    def join(
        cls, documents: Iterable[Array], labels: Iterable[Array] | None = None, group_size: int = 1
    ) -> TokenisedText:
        """Joins documents, each an array of token ids, and their labels."""
        writer = DocumentWriter()
        if labels is None:
            for document in documents:
                writer.add(document)
        else:
            for document, counted in zip(documents, labels, strict=True):
                writer.add(document, counted)
        return writer.finish(has_labels=labels is not None, group_size=group_size)

    @property
    def num_documents(self) -> int:
        """The number of documents."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Array:
        """The tokens of each document, (D,) int64."""
        return np.diff(self.offsets)

    def document(self, index: int) -> Array:
        """Returns the tokens of one document."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def labels_of(self, index: int) -> Array:
        """Returns the labels of one document."""
        labels = self.tokens if self.labels is None else self.labels
        return labels[self.offsets[index] : self.offsets[index + 1]]

    def counted(self) -> Array:
        """Returns the labels that count."""
        return self.tokens if self.labels is None else self.labels[self.labels != IGNORED]

    def largest(self) -> int:
        """Returns the largest token id, also of labels."""
        arrays = [self.tokens] if self.labels is None else [self.tokens, self.labels]
        return max((int(array.max()) for array in arrays if len(array)), default=0)

    def split(self, fraction: float, seed: int) -> tuple[TokenisedText, TokenisedText]:
        """Returns training and validation text: a `fraction` of the documents, or of their groups, drawn by `seed`, is
        held out.

        If there is one document, it is cut in two, and its end is held out; a single sample with labels isn't cut.
        """
        if fraction == 0:
            return self, self._select([])
        if self.num_documents == 1 and self.labels is None:
            cut = round(len(self.tokens) * (1 - fraction))
            return TokenisedText.join([self.tokens[:cut]]), TokenisedText.join([self.tokens[cut:]])
        num_groups = self.num_documents // self.group_size
        order = np.random.default_rng(seed).permutation(num_groups)
        num_held_out = min(max(1, round(num_groups * fraction)), num_groups - 1)
        held_out = np.sort(order[:num_held_out])
        rest = np.sort(order[num_held_out:])
        return self._select(rest), self._select(held_out)

    def _select(self, groups: Sequence[int] | Array) -> TokenisedText:
        size = self.group_size
        chosen = [int(group) * size + place for group in groups for place in range(size)]
        labels = None if self.labels is None else map(self.labels_of, chosen)
        joined = TokenisedText.join(map(self.document, chosen), labels, size)
        return joined if self.ratings is None else replace(joined, ratings=self.ratings[np.asarray(groups, dtype=int)])

    def save(self, folder: Path, name: str) -> None:
        """Writes `name`.tokens.npy and `name`.offsets.npy, and where there are any `name`.labels.npy and the like."""
        for what in _SAVED:
            if (value := getattr(self, what)) is not None:
                np.save(folder / f"{name}.{what}.npy", value)

    @classmethod
    def load(cls, folder: Path, name: str) -> TokenisedText:
        """Returns the text that `save` wrote; tokens and labels are read from the disk when they are used."""
        files = {what: folder / f"{name}.{what}.npy" for what in _SAVED}
        there: dict[str, Any] = {
            what: np.load(file, mmap_mode="r" if what in ("tokens", "labels") else None)
            for what, file in files.items()
            if file.exists()
        }
        return cls(**there | {"group_size": int(there["group_size"])})


_SAVED = ("tokens", "offsets", "labels", "group_size", "ratings")


class DocumentWriter:
    """A text that grows by a document at a time; it needn't fit into memory."""

    def __init__(self) -> None:
        self._tokens = ArrayWriter()
        self._labels = ArrayWriter()
        self._lengths = array("q", [0])

    def __len__(self) -> int:
        return len(self._lengths) - 1

    def add(self, tokens: Array, labels: Array | None = None) -> None:
        """Adds a document; either all have labels, or none has. Raises SlipstreamError where the disk has no room."""
        self._tokens.add(tokens)
        self._lengths.append(len(tokens))
        if labels is not None:
            self._labels.add(labels)

    def finish(self, has_labels: bool, group_size: int = 1) -> TokenisedText:
        """Returns the documents, to which no more can be added."""
        offsets = np.cumsum(self._lengths, dtype=np.int64)
        return TokenisedText(self._tokens.finish(), offsets, self._labels.finish() if has_labels else None, group_size)


def save_texts(texts: Sequence[TokenisedText], folder: Path, name: str) -> None:
    """Writes the text of each source: the first as `name`, the others as `name`-1 and so on."""
    for number, text in enumerate(texts):
        text.save(folder, _numbered(name, number))


def load_texts(folder: Path, name: str) -> list[TokenisedText]:
    """Returns the texts that `save_texts` wrote: none where there was none, as of a stream without held-out rows."""
    texts: list[TokenisedText] = []
    while (folder / f"{(numbered := _numbered(name, len(texts)))}.tokens.npy").exists():
        texts.append(TokenisedText.load(folder, numbered))
    return texts


def _numbered(name: str, number: int) -> str:
    return f"{name}-{number}" if number else name


def unigram_entropy(tokens: Array) -> float:
    """Returns the nats per token of the best model that knows only how often each token occurs: -Σ p log p."""
    counts = np.bincount(tokens)
    shares = counts[counts > 0] / len(tokens)
    return float(-(shares * np.log(shares)).sum())


END_OF_DOCUMENT = "<|endoftext|>"
_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
_FURTHER = ("merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*")
# The tokenizer gets this many documents at a time, to show progress in between.
_GROUP = 64


def has_tokenizer(folder: Path) -> bool:
    """Returns whether the folder has a file that a tokenizer may be read from."""
    return any(file for pattern in _FILES for file in folder.glob(pattern))


def is_of_tokenizer(name: str) -> bool:
    """Returns whether a file of this name belongs to a tokenizer."""
    return any(fnmatch(name, pattern) for pattern in (*_FILES, *_FURTHER))


_ANOTHER = "Name one with --data.tokenizer=..., a folder or hub name."


def load_tokenizer(name: str, trusts_code: bool = False, instead: str = _ANOTHER) -> Any:
    """Returns the tokenizer of a folder or hub name. `trusts_code`: runs the Python code that comes with it, if any.

    Raises SlipstreamError, which ends with the remedy `instead`, where there is none, also where transformers would
    make up one without a vocabulary, and where it comes with code that isn't trusted.
    """
    from transformers import AutoTokenizer

    try:
        check_not_misspelt(f"no tokenizer at {name!r}", name)
    except SlipstreamError as error:
        raise SlipstreamError(f"{error}. {instead}") from None
    if Path(name).is_dir() and not has_tokenizer(Path(name)):
        raise SlipstreamError(f"no tokenizer in {name!r}: the folder has no tokenizer.json. {instead}")
    try:
        # None instead of True or False would ask on the terminal.
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trusts_code)
    except Exception as error:  # the backend raises errors of its own for a damaged file
        if "trust_remote_code" in str(error):
            raise SlipstreamError(
                f"the tokenizer of {name!r} comes with Python code of its own, which transformers would run. That code "
                "can do whatever you can on this machine: read it first. To allow it, set model.trust_remote_code: "
                "true where it is the model's own, without data.tokenizer, give --trust-remote-code to check, init, "
                "export, eval or generate, or name another with --data.tokenizer=..."
            ) from error
        reason = str(error).partition("\n")[0]
        if Path(name).is_dir():
            raise SlipstreamError(f"the tokenizer in {name!r} can't be read: {reason} {instead}") from error
        raise SlipstreamError(
            f"no tokenizer at {name!r}: there is no such folder here{path_hint(name)}. On the hub: {reason} {instead}"
        ) from error
    if {*tokenizer.get_vocab()} <= {*tokenizer.all_special_tokens}:
        raise SlipstreamError(f"no tokenizer in {name!r}: it has no vocabulary but its special tokens. {instead}")
    if type(tokenizer).__module__.startswith("transformers_modules"):
        # An export then has the code, too.
        type(tokenizer).register_for_auto_class()
    return tokenizer


_LOOKED_AT = 2**20  # tokens


def check_known(text: TokenisedText, tokenizer: Any, name: str) -> None:
    """Raises SlipstreamError where the tokenizer turned the text of a source into nothing, or most of it into its
    unknown token."""
    backend = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    unknown = tokenizer.unk_token or getattr(backend, "unk_token", None)
    # GPT-2 has one token for both, and knows every byte.
    if unknown == tokenizer.eos_token:
        unknown = None
    special = [token for token in tokenizer.all_special_tokens if token != unknown]
    tokens = text.tokens[:_LOOKED_AT]
    ids = tokenizer.convert_tokens_to_ids
    num_text = int(np.isin(tokens, ids(special), invert=True).sum())
    num_unknown = 0 if unknown is None else int((tokens == ids(unknown)).sum())
    if num_text <= 2 * num_unknown:
        gaps = f"{num_unknown:,} of {num_text:,} tokens are {unknown!r}" if num_unknown else "no token is left of it"
        raise SlipstreamError(
            f"the tokenizer {tokenizer.name_or_path!r} doesn't know the text of {name}: {gaps}; use one that was made "
            "for such text"
        )


_DOCUMENTS = 100  # documents looked at


def find_double_begin(text: TokenisedText, tokenizer: Any) -> str:
    """Returns which of the first documents begin with two begin tokens, as where the text has one and the tokenizer
    adds another; "" where none does."""
    number = min(_DOCUMENTS, text.num_documents)
    doubled = sum(_begins_twice(text.document(index)[:2].tolist(), tokenizer) for index in range(number))
    if not doubled:
        return ""
    return (
        f"{doubled:,} of the first {plural(number, 'document')} begin with two {tokenizer.bos_token}: the tokenizer "
        "begins each with one, which the text, or the chat template, has already; leave it out there"
    )


def prompt_beginning_twice(prompt: str, tokens: Sequence[int], tokenizer: Any) -> str:
    """Returns what to say of a prompt to be continued that begins with two begin tokens; "" where it doesn't."""
    if not _begins_twice(tokens[:2], tokenizer):
        return ""
    begin = tokenizer.bos_token
    return f"{prompt[:40]!r} begins with two {begin}: the tokenizer begins it with one, which the text has already"


def _begins_twice(first: Sequence[int], tokenizer: Any) -> bool:
    begin = tokenizer.bos_token_id
    return begin is not None and [*first] == [begin, begin]


def train_tokenizer(
    documents: Iterable[str], vocab_size: int, progress: Progress, special_tokens: Sequence[str] = ()
) -> Any:
    """Trains a byte-level BPE of at most `vocab_size` tokens, one of which ends a document, with `special_tokens`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + 1 + len(special_tokens)
    if vocab_size < least:
        raise SlipstreamError(
            f"a byte-level vocabulary needs at least {least} tokens; given: {vocab_size}. "
            f"Raise data.vocab_size (or model.config.vocab_size)."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*dict.fromkeys([END_OF_DOCUMENT, *special_tokens])],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    with progress.waiting("training a tokenizer"):
        tokenizer.train_from_iterator(documents, trainer=trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_DOCUMENT)


def tokenise(
    tokenizer: Any, documents: Iterable[str], progress: Progress, num_characters: int | None = None
) -> TokenisedText:
    """Returns the tokens of all documents, each ended by the end-of-document token if there is one.

    Progress is shown of `num_characters` of all documents, where they are known.
    """
    if num_characters is None:
        documents = [*documents]
        num_characters = sum(map(len, documents))
    end = tokenizer.eos_token_id
    writer = DocumentWriter()
    left = iter(documents)
    done = 0
    with progress.counting("tokenising", total=num_characters) as show:
        while group := [*islice(left, _GROUP)]:
            for ids in tokenizer(group, verbose=False, return_attention_mask=False)["input_ids"]:
                closed = ids if end is None or ids[-1:] == [end] else [*ids, end]
                writer.add(np.asarray(closed, dtype=np.int32))
            done += sum(map(len, group))
            show(done)
    return writer.finish(has_labels=False)
