"""Tokenised documents, packed into batches of equally long sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from slipstream.errors import SlipstreamError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class TokenisedText:
    """Documents in one array: document d is tokens[offsets[d] : offsets[d + 1]]."""

    tokens: Array  # (N,) int32
    offsets: Array  # (D + 1,) int64

    @classmethod
    def join(cls, documents: Sequence[Array]) -> TokenisedText:
        """Joins documents, each an array of token ids."""
        tokens = np.concatenate(documents) if documents else np.zeros(0, dtype=np.int32)
        return cls(tokens, np.cumsum([0, *map(len, documents)], dtype=np.int64))

    @property
    def num_documents(self) -> int:
        """The number of documents."""
        return len(self.offsets) - 1

    def document(self, index: int) -> Array:
        """Returns the tokens of one document."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def split(self, fraction: float, seed: int) -> tuple[TokenisedText, TokenisedText]:
        """Returns training and validation text: a `fraction` of the documents, drawn by `seed`, is held out.

        If there is one document, it is cut in two, and its end is held out.
        """
        if fraction == 0:
            return self, TokenisedText.join([])
        if self.num_documents == 1:
            cut = round(len(self.tokens) * (1 - fraction))
            return TokenisedText.join([self.tokens[:cut]]), TokenisedText.join([self.tokens[cut:]])
        order = np.random.default_rng(seed).permutation(self.num_documents)
        num_held_out = min(max(1, round(self.num_documents * fraction)), self.num_documents - 1)
        held_out, kept = np.sort(order[:num_held_out]), np.sort(order[num_held_out:])
        return self._select(kept), self._select(held_out)

    def _select(self, documents: Array) -> TokenisedText:
        return TokenisedText.join([self.document(int(index)) for index in documents])

    def save(self, folder: Path, name: str) -> None:
        """Writes `name`.tokens.npy and `name`.offsets.npy."""
        np.save(folder / f"{name}.tokens.npy", self.tokens)
        np.save(folder / f"{name}.offsets.npy", self.offsets)

    @classmethod
    def load(cls, folder: Path, name: str) -> TokenisedText:
        """Returns what `save` wrote; the tokens are read from the disk when they are used."""
        tokens = np.load(folder / f"{name}.tokens.npy", mmap_mode="r")
        return cls(tokens, np.load(folder / f"{name}.offsets.npy"))


class TokenBatch(NamedTuple):
    """Sequences as `Pipeline.step` takes them: packed, (batch, sequence) int64; or a list of (tokens,) each, which are
    documents of their own."""

    input_ids: torch.Tensor | list[torch.Tensor]
    labels: torch.Tensor | list[torch.Tensor]  # unshifted, as in transformers
    document_ids: torch.Tensor | None

    def document_lengths(self) -> list[int]:
        """Returns the tokens of each document, or of each part of one that is in a sequence, row by row."""
        if self.document_ids is None:
            return [len(each) for each in self.input_ids]
        runs = (torch.unique_consecutive(row, return_counts=True)[1] for row in self.document_ids)
        return [int(count) for each in runs for count in each]

    @property
    def num_predicted(self) -> int:
        """The tokens that are predicted: all but the first of each document, or of its part in a sequence."""
        return sum(length - 1 for length in self.document_lengths())


class PackedSequences:
    """Documents in a row, cut every `seq_len` tokens.

        documents   |aaaaaaaa|bbb|ccccccccccc|dd|
        sequences   [aaaaaa|aabbbc|cccccc|ccccdd]     a document continues in the next sequence

    For each epoch, `seed` draws the order of the documents, and the order in which the sequences are visited, so that
    the parts of a long document don't follow each other. `None` keeps both orders. Nothing is dropped except the end of
    an epoch, less than one sequence. Sequence `index` depends only on the text, the seed and `index`: every rank makes
    the same sequences, and a run can be resumed with the next index.
    """

    packing = "fixed"

    def __init__(self, text: TokenisedText, seq_len: int, seed: int | None) -> None:
        self.text, self.seq_len, self.seed = text, seq_len, seed
        self.num_sequences = len(text.tokens) // seq_len  # of an epoch
        if self.num_sequences == 0:
            raise SlipstreamError(
                f"the text has {len(text.tokens)} tokens, less than one sequence of {seq_len}; "
                f"give more text or a smaller training.seq_len"
            )
        self._epoch = -1
        self._order = self._starts = self._visits = np.zeros(0, dtype=np.int64)

    @property
    def mean_length(self) -> float:
        """The mean tokens of a sequence: all have as many."""
        return float(self.seq_len)

    def batch(self, first: int, size: int, replica: int = 0, num_replicas: int = 1) -> TokenBatch:
        """Returns one replica's part of sequences `first` to `first + size - 1`; those past the last one belong to the
        next epoch. Replicas have equally many."""
        each = size // num_replicas
        rows = [self._sequence(first + replica * each + index) for index in range(each)]
        input_ids, document_ids = (torch.from_numpy(np.stack(each)) for each in zip(*rows, strict=True))
        return TokenBatch(input_ids, input_ids.clone(), document_ids)

    def _sequence(self, index: int) -> tuple[Array, Array]:
        """Returns the tokens and the document numbers of one sequence, both (seq_len,) int64."""
        epoch, position = divmod(index, self.num_sequences)
        self._enter(epoch)
        start = int(self._visits[position]) * self.seq_len
        stop = start + self.seq_len
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        last = int(np.searchsorted(self._starts, stop, side="left"))
        places = range(first, last)  # in this epoch's order, of the documents that are in the sequence
        parts = [
            self.text.document(int(self._order[place]))[max(start - begin, 0) : stop - begin]
            for place, begin in zip(places, self._starts[first:last], strict=True)
        ]
        return np.concatenate(parts).astype(np.int64), np.repeat(places, [len(part) for part in parts])

    def _enter(self, epoch: int) -> None:
        """Draws the orders of an epoch, and computes where each document starts in it."""
        if epoch == self._epoch:
            return
        self._order, self._visits = np.arange(self.text.num_documents), np.arange(self.num_sequences)
        if self.seed is not None:
            random = np.random.default_rng([self.seed, epoch])
            self._order, self._visits = random.permutation(self._order), random.permutation(self._visits)
        lengths = np.diff(self.text.offsets)[self._order]
        self._starts, self._epoch = np.cumsum(lengths) - lengths, epoch


def unigram_entropy(tokens: Array) -> float:
    """Returns the nats per token of the best model that knows only how often each token occurs: -Σ p log p."""
    counts = np.bincount(tokens)
    shares = counts[counts > 0] / len(tokens)
    return float(-(shares * np.log(shares)).sum())
