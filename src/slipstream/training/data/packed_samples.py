"""Samples that aren't cut, put together into equally long sequences."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.model import IGNORED
from slipstream.training.data.sequences import PADDING, Row, Shuffled, TrainingSequences
from slipstream.training.data.tokenised_text import Array, TokenisedText


class PackedSamples(TrainingSequences):
    """Whole samples, each a document of its own, in sequences of `seq_len` tokens whose rest is padding.

        samples     |aaaa|bbb|ccccc|d|     seq_len 6
        sequences   [cccccd] [aaaa..] [bbb...]

    The samples of a sequence are always the same; `seed` draws for each epoch the order in which sequences are visited,
    `None` keeps it. No sample may be longer than `seq_len`.
    """

    packing = "fixed"

    def __init__(self, text: TokenisedText, seq_len: int, seed: int | None) -> None:
        self.text, self.seq_len, self.seed = text, seq_len, seed
        self.texts = [text]
        self._contents = best_fit(text.lengths, seq_len)
        self.num_sequences = len(self._contents)
        if self.num_sequences == 0:
            raise SlipstreamError("there is no sample to train on; give more of them")
        self._visits = Shuffled(self.num_sequences, seed)

    @property
    def mean_length(self) -> float:
        """The tokens of each sequence, padding included."""
        return float(self.seq_len)

    @property
    def filled(self) -> float:
        """The share of tokens that aren't padding."""
        return len(self.text.tokens) / (self.num_sequences * self.seq_len)

    def length(self, index: int) -> int:
        """Returns the tokens of a sequence: all have as many, padding included."""
        return self.seq_len

    def row(self, index: int) -> Row:
        """Returns one sequence."""
        samples = self._contents[self._visits[index]]
        tokens = np.zeros(self.seq_len, dtype=np.int64)  # any token will do as padding: nothing attends to it
        labels, documents = np.full_like(tokens, IGNORED), np.full_like(tokens, PADDING)
        begin = 0
        for place, sample in enumerate(samples):
            end = begin + len(self.text.document(sample))
            tokens[begin:end], labels[begin:end] = self.text.document(sample), self.text.labels_of(sample)
            documents[begin:end] = place
            begin = end
        return Row(tokens, labels, documents)


def best_fit(lengths: Array, room: int) -> list[list[int]]:
    """Returns the samples of each sequence: the longest first, each to the sequence that has the least room for it
    (best-fit decreasing)."""
    contents: list[list[int]] = []
    sizes: list[int] = []  # rooms that some sequence has left, ascending
    with_room: dict[int, list[int]] = {}  # the sequences with each of these rooms
    for sample in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[sample])
        at = bisect_left(sizes, length)
        if at < len(sizes):
            size = sizes[at]
            sequence = with_room[size].pop()
            if not with_room[size]:
                del sizes[at], with_room[size]
        else:
            size, sequence = room, len(contents)
            contents.append([])
        contents[sequence].append(sample)
        if size > length:
            if size - length not in with_room:
                insort(sizes, size - length)
            with_room.setdefault(size - length, []).append(sequence)
    return contents
