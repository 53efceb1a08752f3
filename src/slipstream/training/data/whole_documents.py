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

    @property
    def typical_length(self) -> float:
        """The mean tokens of the sequences in which tokens are: long ones count by their tokens."""
        return float((self._lengths**2).sum() / self._lengths.sum())

    def num_fitting(self, first: int, num_tokens: int) -> int:
        """Returns how many sequences from `first` on have together at most `num_tokens` tokens; at least one."""
        left, index = num_tokens - self._length(first), first + 1
        while (left := left - self._length(index)) >= 0:
            index += 1
        return index - first

    def lengths(self, first: int, size: int, replica: int = 0, num_replicas: int = 1) -> list[int]:
        """Returns the tokens of each sequence of `batch`."""
        return [self._length(index) for index in self._share(first, size, replica, num_replicas)]

    def batch(self, first: int, size: int, replica: int = 0, num_replicas: int = 1) -> TokenBatch:
        """Returns one replica's part of sequences `first` to `first + size - 1`; those past the last one belong to the
        next epoch. Replicas have about as many tokens, and each a sequence at least."""
        pieces = [self._piece(index) for index in self._share(first, size, replica, num_replicas)]
        ends = ((int(self._begins[piece]), int(self._begins[piece] + self._lengths[piece])) for piece in pieces)
        input_ids = [torch.from_numpy(self.text.tokens[begin:end].astype(np.int64)) for begin, end in ends]
        return TokenBatch(input_ids, [each.clone() for each in input_ids], None)

    def _share(self, first: int, size: int, replica: int, num_replicas: int) -> list[int]:
        """Returns the sequences of a replica, in their order."""
        lengths = [self._length(index) for index in range(first, first + size)]
        return [first + place for place in _dealt(lengths, num_replicas)[replica]]

    def _length(self, index: int) -> int:
        return int(self._lengths[self._piece(index)])

    def _piece(self, index: int) -> int:
        epoch, position = divmod(index, self.num_sequences)
        if epoch != self._epoch:
            self._epoch, self._visits = epoch, np.arange(self.num_sequences)
            if self.seed is not None:
                self._visits = np.random.default_rng([self.seed, epoch]).permutation(self._visits)
        return int(self._visits[position])


def _dealt(lengths: Sequence[int], num_replicas: int) -> list[list[int]]:
    """Returns the places of each replica's sequences: the longest first, each to whom has the fewest tokens (Graham
    1969)."""
    tokens, shares = [0] * num_replicas, [list[int]() for _ in range(num_replicas)]
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        replica = tokens.index(min(tokens))
        tokens[replica] += lengths[place]
        shares[replica].append(place)
    return [sorted(share) for share in shares]


def _cut(offsets: Array, seq_len: int) -> tuple[Array, Array]:
    """Returns where each sequence begins in the text, and its tokens."""
    pieces = [(np.arange(begin, end, seq_len), end) for begin, end in pairwise(offsets.tolist())]
    nothing = np.zeros(0, dtype=np.int64)
    begins = np.concatenate([nothing, *(each for each, _ in pieces)])
    lengths = np.concatenate([nothing, *(np.minimum(seq_len, end - each) for each, end in pieces)])
    predicts = lengths >= _FEWEST
    return begins[predicts], lengths[predicts]
