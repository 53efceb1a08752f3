"""Tokenised documents as sequences of their own lengths: nothing is packed, and only what is too long is cut."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.training.data.sequences import Row, Shuffled, TrainingSequences
from slipstream.training.data.tokenised_text import Array, TokenisedText

_FEWEST = 2  # tokens of a sequence, so that one is predicted


class WholeDocuments(TrainingSequences):
    """Documents as they are, those of more than `seq_len` tokens cut every `seq_len`.

        documents   |aaaaaaaa|bbb|ccccccccccc|dd|      seq_len 6
        sequences   [aaaaaa] [aa] [bbb] [cccccc] [ccccc] [dd]

    Every sequence is visited once in an epoch, in an order that `seed` draws for it; `None` keeps that of the text. A
    single token at the end of a document is left out, as it predicts nothing.
    """

    packing = "none"

    def __init__(self, text: TokenisedText, seq_len: int, seed: int | None) -> None:
        self.text, self.seq_len, self.seed = text, seq_len, seed
        self.texts = [text]
        self._begins, self._lengths = _cut(text.offsets, seq_len)
        self.num_sequences = len(self._begins)
        if self.num_sequences == 0:
            raise SlipstreamError("no document of the text has two tokens or more; give more text")
        self._visits = Shuffled(self.num_sequences, seed)

    @property
    def mean_length(self) -> float:
        """The mean tokens of a sequence."""
        return float(self._lengths.mean())

    @property
    def typical_length(self) -> float:
        """The mean tokens of the sequences in which tokens are: long ones count by their tokens."""
        return float((self._lengths**2).sum() / self._lengths.sum())

    def length(self, index: int) -> int:
        """Returns the tokens of a sequence."""
        return int(self._lengths[self._visits[index]])

    def row(self, index: int) -> Row:
        """Returns one sequence."""
        piece = self._visits[index]
        begin = int(self._begins[piece])
        end = begin + int(self._lengths[piece])
        tokens = self.text.tokens[begin:end].astype(np.int64)
        labels = tokens.copy() if self.text.labels is None else self.text.labels[begin:end].astype(np.int64)
        return Row(tokens, labels, None)


def _cut(offsets: Array, seq_len: int) -> tuple[Array, Array]:
    """Returns where each sequence begins in the text, and its tokens."""
    pieces = [(np.arange(begin, end, seq_len), end) for begin, end in pairwise(offsets.tolist())]
    nothing = np.zeros(0, dtype=np.int64)
    begins = np.concatenate([nothing, *(each for each, _ in pieces)])
    lengths = np.concatenate([nothing, *(np.minimum(seq_len, end - each) for each, end in pieces)])
    predicts = lengths >= _FEWEST
    return begins[predicts], lengths[predicts]
