"""Pairs of a chosen and a rejected answer, as a loss of preferences takes them."""

from __future__ import annotations

import numpy as np

from slipstream.training.data.sequences import Row, Shuffled, TrainingSequences
from slipstream.training.data.tokenised_text import TokenisedText


class PreferencePairs(TrainingSequences):
    """Pairs of documents that follow each other in the text, each a prompt with an answer.

        documents   |ppccc|ppr|qqqc|qqqrr|      p, q: prompts; c: chosen; r: rejected
        sequences   [ppccc ppr] [qqqc qqqrr]    of which a batch has both answers, each by itself

    Every pair is visited once in an epoch, in an order that `seed` draws for it; `None` keeps that of the text.
    """

    packing, group_size = "none", 2

    def __init__(self, text: TokenisedText, seq_len: int, seed: int | None) -> None:
        """Takes a text whose documents have at most `seq_len` tokens, chosen and rejected in turn."""
        self.text, self.seq_len, self.seed = text, seq_len, seed
        self.texts = [text]
        self._lengths = text.lengths.reshape(-1, 2)
        self.num_sequences = len(self._lengths)
        self._visits = Shuffled(self.num_sequences, seed)

    @property
    def mean_length(self) -> float:
        """The mean tokens of a pair."""
        return float(self._lengths.sum(1).mean())

    @property
    def typical_length(self) -> float:
        """The mean tokens of the pairs in which tokens are: long ones count by their tokens."""
        both = self._lengths.sum(1)
        return float((both**2).sum() / both.sum())

    def length(self, index: int) -> int:
        """Returns the tokens of both documents of a pair."""
        return sum(self.document_lengths(index))

    def document_lengths(self, index: int) -> list[int]:
        """Returns the tokens of the chosen and of the rejected document."""
        lengths: list[int] = self._lengths[self._visits[index]].tolist()
        return lengths

    def row(self, index: int) -> Row:
        """Returns one pair, with what is known of its two documents."""
        first = 2 * self._visits[index]
        both = slice(int(self.text.offsets[first]), int(self.text.offsets[first + 2]))
        labels = self.text.tokens if self.text.labels is None else self.text.labels
        values = None if self.text.values is None else self.text.values[first : first + 2]
        documents = np.repeat(np.arange(2), self.text.lengths[first : first + 2])
        return Row(self.text.tokens[both].astype(np.int64), labels[both].astype(np.int64), documents, values)
