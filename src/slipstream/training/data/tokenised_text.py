"""Documents as arrays of tokens, and which of the tokens count."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slipstream.model import IGNORED
from slipstream.training.data.array_writer import Array, ArrayWriter


@dataclass(frozen=True)
class TokenisedText:
    """Documents in one array: document d is tokens[offsets[d] : offsets[d + 1]].

    Those with `labels` are samples that belong together, such as a conversation, and aren't cut any more. Of those in
    groups, each `group_size` documents are held out together, and are trained on in one step.
    """

    tokens: Array  # (N,) int32
    offsets: Array  # (D + 1,) int64
    labels: Array | None = None  # (N,) int32, unshifted, -100 where a token doesn't count; None: all count
    group_size: int = 1  # 2: a chosen answer, the rejected one, the next chosen one, ...
    values: Array | None = None  # (D,) float64, what the loss takes of each document besides its tokens; not saved

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
        return max((int(each.max()) for each in arrays if len(each)), default=0)

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
        held_out, kept = np.sort(order[:num_held_out]), np.sort(order[num_held_out:])
        return self._select(kept), self._select(held_out)

    def _select(self, groups: Sequence[int] | Array) -> TokenisedText:
        size = self.group_size
        chosen = [int(group) * size + place for group in groups for place in range(size)]
        labels = None if self.labels is None else map(self.labels_of, chosen)
        return TokenisedText.join(map(self.document, chosen), labels, size)

    def save(self, folder: Path, name: str) -> None:
        """Writes `name`.tokens.npy and `name`.offsets.npy, where there are labels `name`.labels.npy, and of documents
        in groups `name`.group_size.npy."""
        np.save(folder / f"{name}.tokens.npy", self.tokens)
        np.save(folder / f"{name}.offsets.npy", self.offsets)
        if self.labels is not None:
            np.save(folder / f"{name}.labels.npy", self.labels)
        if self.group_size > 1:
            np.save(folder / f"{name}.group_size.npy", self.group_size)

    @classmethod
    def load(cls, folder: Path, name: str) -> TokenisedText:
        """Returns what `save` wrote; tokens and labels are read from the disk when they are used."""
        labels, group_size = (folder / f"{name}.{what}.npy" for what in ("labels", "group_size"))
        return cls(
            np.load(folder / f"{name}.tokens.npy", mmap_mode="r"),
            np.load(folder / f"{name}.offsets.npy"),
            np.load(labels, mmap_mode="r") if labels.exists() else None,
            int(np.load(group_size)) if group_size.exists() else 1,
        )


class DocumentWriter:
    """A text that grows by a document at a time; it needn't fit into memory."""

    def __init__(self) -> None:
        self._tokens, self._labels = ArrayWriter(), ArrayWriter()
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
    """Returns what `save_texts` wrote: no text where there was none, as of a stream of which nothing is held out."""
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
