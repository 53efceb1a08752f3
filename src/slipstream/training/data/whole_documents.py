"""Tokenised documents as sequences of their own lengths: nothing is packed, and only what is too long is cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from slipstream.errors import SlipstreamError
from slipstream.training.data.packing import Array, TokenBatch, TokenisedText

_FEWEST = 2  # tokens of a sequence, so that one is predicted


class WholeDocuments:
    """Documents as they are, those of more than `seq_len` tokens cut every `seq_len`.

        documents   |aaaaaaaa|bbb|ccccccccccc|dd|      seq_len 6
        sequences   [aaaaaa] [aa] [bbb] [cccccc] [ccccc] [dd]

    Every sequence is visited once in an epoch, in an order that `seed` draws for it; `None` keeps that of the text. A
    single token at the end of a document is left out, as it predicts nothing. Sequence `index` depends only on the
    text, the seed and `index`: every rank makes the same sequences, and a run can be resumed with the next index.
    """

    packing = "none"

    def __init__(self, text: TokenisedText, seq_len: int, seed: int | None) -> None:
        self.text, self.seq_len, self.seed = text, seq_len, seed
        self._begins, self._lengths = _cut(text.offsets, seq_len)
        self.num_sequences = len(self._begins)  # of an epoch
        if self.num_sequences == 0:
            raise SlipstreamError("no document of the text has two tokens or more; give more text")
        self._epoch, self._visits = -1, np.zeros(0, dtype=np.int64)

    @property
    def mean_length(self) -> float:
        """The mean tokens of a sequence."""
        return float(self._lengths.mean())

    def lengths(self, first: int, size: int, replica: int = 0, num_replicas: int = 1) -> list[int]:
        """Returns the tokens of each sequence of `batch`."""
        return [int(self._lengths[piece]) for piece in self._share(first, size, replica, num_replicas)]

    def batch(self, first: int, size: int, replica: int = 0, num_replicas: int = 1) -> TokenBatch:
        """Returns one replica's part of sequences `first` to `first + size - 1`; those past the last one belong to the
        next epoch. Replicas have equally many, and about as many tokens."""
        pieces = self._share(first, size, replica, num_replicas)
        ends = ((int(self._begins[piece]), int(self._begins[piece] + self._lengths[piece])) for piece in pieces)
        input_ids = [torch.from_numpy(self.text.tokens[begin:end].astype(np.int64)) for begin, end in ends]
        return TokenBatch(input_ids, [each.clone() for each in input_ids], None)

    def _share(self, first: int, size: int, replica: int, num_replicas: int) -> Sequence[int]:
        pieces = [self._piece(index) for index in range(first, first + size)]
        if num_replicas == 1:
            return pieces
        longest_first = sorted(pieces, key=lambda piece: -self._lengths[piece])
        rounds = [longest_first[begin : begin + num_replicas] for begin in range(0, size, num_replicas)]
        # Replicas choose in turns, the last of one round first in the next.
        return [each[::-1][replica] if number % 2 else each[replica] for number, each in enumerate(rounds)]

    def _piece(self, index: int) -> int:
        epoch, position = divmod(index, self.num_sequences)
        if epoch != self._epoch:
            self._epoch, self._visits = epoch, np.arange(self.num_sequences)
            if self.seed is not None:
                self._visits = np.random.default_rng([self.seed, epoch]).permutation(self._visits)
        return int(self._visits[position])


def _cut(offsets: Array, seq_len: int) -> tuple[Array, Array]:
    """Returns where each sequence begins in the text, and its tokens."""
    pieces = [(np.arange(begin, end, seq_len), end) for begin, end in pairwise(offsets.tolist())]
    nothing = np.zeros(0, dtype=np.int64)
    begins = np.concatenate([nothing, *(each for each, _ in pieces)])
    lengths = np.concatenate([nothing, *(np.minimum(seq_len, end - each) for each, end in pieces)])
    predicts = lengths >= _FEWEST
    return begins[predicts], lengths[predicts]
