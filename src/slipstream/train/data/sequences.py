"""Sequences by their numbers, and the batches that are made of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.model import IGNORED
from slipstream.train.config import TrainingSection
from slipstream.train.data.tokenised_text import Array, TokenisedText

PADDING = -1  # the document number of padding


class TokenBatch(NamedTuple):
    """Sequences as `Pipeline.step` takes them: packed, (batch, sequence) int64; or a list of (tokens,) each, which are
    documents of their own."""

    input_ids: Tensor | list[Tensor]
    labels: Tensor | list[Tensor]  # unshifted, as in transformers
    document_ids: Tensor | None
    sequence_values: Tensor | None = None  # (sequences,) float64, further arguments of a loss of whole sequences

    @classmethod
    def of_documents(cls, documents: Sequence[tuple[Array, Array]]) -> TokenBatch:
        """Returns a batch of documents, of each its tokens and its labels."""
        tokens, labels = ([torch.from_numpy(row) for row in column] for column in zip(*documents, strict=True))
        return cls(tokens, labels, None)

    def document_lengths(self) -> list[int]:
        """Returns the tokens of each document, or of each part of one that is in a sequence, row by row; padding is
        left out."""
        if self.document_ids is None:
            return [len(ids) for ids in self.input_ids]
        runs = (torch.unique_consecutive(row, return_counts=True) for row in self.document_ids)
        return [int(count) for ids, counts in runs for count in counts[ids != PADDING]]

    @property
    def num_predicted(self) -> int:
        """The tokens that are predicted and count: of a document, or of its part in a sequence, never the first."""
        if self.document_ids is None:
            return sum(int((labels[1:] != IGNORED).sum()) for labels in self.labels)
        assert isinstance(self.labels, Tensor)
        follows = self.document_ids[:, 1:] == self.document_ids[:, :-1]
        return int((follows & (self.labels[:, 1:] != IGNORED)).sum())


class Row(NamedTuple):
    """A sequence: its tokens, its labels and its tokens' documents, (T,) int64 each.

    One without packing may be a group of documents, such as two answers: a step takes each of them as a sequence.
    """

    tokens: Array
    labels: Array
    documents: Array
    values: Array | None = None  # (documents,) float64, a further argument of the loss

    def parts(self) -> list[tuple[Array, Array]]:
        """Returns tokens and labels of each document; padding is none."""
        ends = np.flatnonzero(np.diff(self.documents)) + 1
        columns = (np.split(column, ends) for column in (self.tokens, self.labels, self.documents))
        return [(tokens, labels) for tokens, labels, ids in zip(*columns, strict=True) if ids[0] != PADDING]


class TrainingSequences(ABC):
    """Sequences that are numbered for ever: those past the last one belong to the next epoch.

    Sequence `index` depends only on the text, the seed and `index`: every rank makes the same sequences, and a run can
    be resumed with the next index.

    Attributes:
        packing: `fixed` where all have `seq_len` tokens, `none` where they are as long as their documents.
        num_sequences: of an epoch.
        mean_length: the mean tokens of a sequence.
        typical_length: the mean tokens of the sequences in which tokens are: long ones count by their tokens.
        texts: their texts, source by source.
        group_size: how many documents are one sequence of `packing` none: 2 for pairs of answers.
        weights: of several sources, the shares of their sequences; None where each comes once in an epoch.
        origin: of a stream, its sources; it has no texts.
    """

    packing: str
    seq_len: int
    seed: int | None
    num_sequences: int
    mean_length: float
    typical_length: float
    texts: Sequence[TokenisedText]
    group_size: int = 1
    weights: Sequence[float] | None = None
    origin: Mapping[str, Any] | None = None

    @abstractmethod
    def row(self, index: int) -> Row:
        """Returns one sequence."""

    @abstractmethod
    def length(self, index: int) -> int:
        """Returns the tokens of a sequence."""

    def batch(self, first: int, size: int, replica: int = 0, num_replicas: int = 1) -> TokenBatch:
        """Returns one replica's part of sequences `first` to `first + size - 1`. Replicas have equally many sequences
        of one length, but for one where these don't divide; of others about as many tokens, and each a sequence at
        least."""
        rows = [self.row(index) for index in self.share(first, size, replica, num_replicas)]
        if self.packing == "none":
            return _unpacked(rows)
        columns = [np.stack(column) for column in [*zip(*rows, strict=True)][:3]]
        return TokenBatch(*map(torch.from_numpy, columns))

    def lengths(self, first: int, size: int, replica: int = 0, num_replicas: int = 1) -> list[int]:
        """Returns the tokens of each sequence of `batch`; of each document where they are in groups."""
        shared = self.share(first, size, replica, num_replicas)
        return [length for index in shared for length in self.document_lengths(index)]

    def document_lengths(self, index: int) -> list[int]:
        """Returns the tokens of each document of a sequence without packing."""
        return [self.length(index)]

    def num_fitting(self, first: int, num_tokens: int) -> int:
        """Returns how many sequences from `first` on have together at most `num_tokens` tokens; at least one."""
        left = num_tokens - self.length(first)
        index = first + 1
        while (left := left - self.length(index)) >= 0:
            index += 1
        return index - first

    def state(self, index: int) -> dict[str, Any] | None:
        """Returns a state for `go_to`, so that sequence `index` can be asked for next, as JSON can hold it; None where
        any can."""
        return None

    def go_to(self, state: dict[str, Any]) -> None:
        """Goes to where `state` was taken."""
        raise NotImplementedError

    def take(self, texts: Sequence[TokenisedText]) -> None:
        """Takes the same texts with values for their documents in place of those without."""
        raise NotImplementedError

    def share(self, first: int, size: int, replica: int, num_replicas: int) -> Sequence[int]:
        """Returns the numbers of the sequences of a replica's `batch`, in their order."""
        if self.packing == "fixed":
            begin, end = (first + size * boundary // num_replicas for boundary in (replica, replica + 1))
            return range(begin, end)
        lengths = [self.length(index) for index in range(first, first + size)]
        return [first + place for place in _dealt(lengths, num_replicas)[replica]]


class JoinedSequences(TrainingSequences):
    """Sequences that are those of others."""

    @abstractmethod
    def _find(self, index: int) -> tuple[TrainingSequences, int]:
        """Returns the sequences that have one, and its number there."""

    def length(self, index: int) -> int:
        part, place = self._find(index)
        return part.length(place)

    def document_lengths(self, index: int) -> list[int]:
        part, place = self._find(index)
        return part.document_lengths(place)

    def row(self, index: int) -> Row:
        part, place = self._find(index)
        return part.row(place)


class TextSequences(TrainingSequences):
    """The sequences of one text, each of which is visited once in an epoch."""

    def __init__(self, text: TokenisedText, seq_len: int, seed: int | None, sizes: Array) -> None:
        """`sizes` are the tokens of each sequence, in the order of the text."""
        self.text = text
        self.texts = [text]
        self.seq_len = seq_len
        self.seed = seed
        self._sizes = sizes
        self.num_sequences = len(sizes)
        self.mean_length = float(sizes.mean())
        self.typical_length = float((sizes**2).sum() / sizes.sum())
        self._visits = Shuffled(len(sizes), seed)

    def take(self, texts: Sequence[TokenisedText]) -> None:
        self.texts = texts
        (self.text,) = texts

    def length(self, index: int) -> int:
        """Returns the tokens of a sequence, padding included."""
        return int(self._sizes[self._visits[index]])

    def row(self, index: int) -> Row:
        """Returns one sequence; one of `packing` fixed is filled up with padding, to which nothing attends."""
        spans = self._spans(index)
        labels = self.text.tokens if self.text.labels is None or self.text.prompts_count else self.text.labels
        columns = [np.concatenate([column[begin:end] for begin, end in spans]) for column in (self.text.tokens, labels)]
        columns.append(np.repeat(np.arange(len(spans)), [end - begin for begin, end in spans]))
        rest = self.seq_len - len(columns[0]) if self.packing == "fixed" else 0
        filled = zip(columns, (0, IGNORED, PADDING), strict=True)
        return Row(*(np.pad(column.astype(np.int64), (0, rest), constant_values=value) for column, value in filled))

    def _span(self, document: int) -> tuple[int, int]:
        """Returns where a document begins and ends in the text."""
        return int(self.text.offsets[document]), int(self.text.offsets[document + 1])

    @abstractmethod
    def _spans(self, index: int) -> list[tuple[int, int]]:
        """Returns where the documents of a sequence, or their parts in it, begin and end in the text."""


class Shuffled:
    """The order in which `number` things are visited in each epoch, drawn by `seed`; None keeps their order."""

    def __init__(self, number: int, seed: int | None) -> None:
        self._number = number
        self._seed = seed
        self._epoch = -1
        self._visits = np.zeros(0, dtype=np.int64)

    def __getitem__(self, index: int) -> int:
        epoch, position = divmod(index, self._number)
        if epoch != self._epoch:
            self._epoch = epoch
            self._visits = np.arange(self._number)
            if self._seed is not None:
                self._visits = np.random.default_rng([self._seed, epoch]).permutation(self._visits)
        return int(self._visits[position])


def _unpacked(rows: Sequence[Row]) -> TokenBatch:
    """Returns a batch with each document of the rows as a sequence of its own."""
    batch = TokenBatch.of_documents([part for row in rows for part in row.parts()])
    values = [row.values for row in rows if row.values is not None]
    return batch._replace(sequence_values=torch.from_numpy(np.concatenate(values))) if values else batch


def _dealt(lengths: Sequence[int], num_replicas: int) -> list[list[int]]:
    """Returns the places of each replica's sequences: the longest first, each to whom has the fewest tokens (Graham
    1969)."""
    tokens = [0] * num_replicas
    shares = [list[int]() for _ in range(num_replicas)]
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        replica = tokens.index(min(tokens))
        tokens[replica] += lengths[place]
        shares[replica].append(place)
    return [sorted(share) for share in shares]


Batch = tuple[int, int]  # the first sequence, and how many


@dataclass(frozen=True)
class BatchSize:
    """The size of a step's batch, over all replicas.

    Args:
        sequences: the number of them.
        tokens: in place of their number, the most tokens that whole documents of a step have together.
    """

    sequences: int
    tokens: int | None = None

    @classmethod
    def of(cls, training: TrainingSection) -> BatchSize:
        """Returns the batch size of a training."""
        return cls(training.batch_size, training.batch_tokens)

    def at(self, sequences: TrainingSequences, first: int) -> int:
        """Returns the number of sequences of the step that begins with sequence `first`."""
        if self.tokens is None or sequences.packing == "fixed":
            return self.sequences
        return sequences.num_fitting(first, self.tokens)

    def mean(self, sequences: TrainingSequences) -> float:
        """Returns the mean number of sequences of a step, about; with `tokens` as if steps were filled to the last."""
        return self.sequences if self.tokens is None else max(1.0, self.tokens / sequences.mean_length)

    def batches(self, sequences: TrainingSequences, number: int) -> Iterator[Batch]:
        """Yields the full batches of the first `number` sequences."""
        first = 0
        while first + (size := self.at(sequences, first)) <= number:
            yield first, size
            first += size


class HeldOutBatches:
    """Batches of sequences without a seed. The last one is filled up with the first sequences, which count only once.

    sequences   a b c d e      3 of them in a batch
    batches     [a b c] [d e a]     in the second one no label of a counts
    """

    def __init__(self, sequences: TrainingSequences, size: BatchSize) -> None:
        self.sequences = sequences
        self._number = sequences.num_sequences
        self._batches = list[Batch]()
        first = 0
        while first < self._number:
            self._batches.append((first, size.at(sequences, first)))
            first += self._batches[-1][1]

    def chosen(self, limit: int | None = None) -> list[Batch]:
        """Returns all batches, or `limit` of them, spread evenly."""
        count = min(limit or len(self._batches), len(self._batches))
        return [self._batches[index * len(self._batches) // count] for index in range(count)]

    def counts(self, batch: Batch, replica: int = 0, num_replicas: int = 1) -> list[bool]:
        """Returns of each sequence in a replica's part of a batch whether it counts."""
        return [index < self._number for index in self.sequences.share(*batch, replica, num_replicas)]

    def batch(self, batch: Batch, replica: int = 0, num_replicas: int = 1) -> TokenBatch:
        """Returns a replica's part of a batch; of sequences in groups, such as pairs, those that don't count keep their
        labels, of which a loss of them is made."""
        tokens = self.sequences.batch(*batch, replica, num_replicas)
        counts = self.counts(batch, replica, num_replicas)
        if self.sequences.group_size == 1:
            for labels, is_counted in zip(tokens.labels, counts, strict=True):
                if not is_counted:
                    # In place, as they are a row of a tensor or one of a list
                    labels.fill_(IGNORED)
        return tokens
