"""Tokenised documents as sequences: packed and cut, packed whole, alone, in pairs, and of several sources."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.train.data.sequences import JoinedSequences, Row, TextSequences, TrainingSequences
from slipstream.train.data.tokenised_text import Array, TokenisedText


class PackedSequences(TextSequences):
    """Documents in a row, cut every `seq_len` tokens.

        documents   |aaaaaaaa|bbb|ccccccccccc|dd|
        sequences   [aaaaaa|aabbbc|cccccc|ccccdd]     a document continues in the next sequence

    For each epoch, `seed` draws the order of the documents, and the order in which the sequences are visited, so that
    the parts of a long document don't follow each other. `None` keeps both orders. Nothing is dropped except the end of
    an epoch, less than one sequence; with `pads` that becomes a sequence, too, whose rest is padding.
    """

    packing = "fixed"

    def __init__(self, text: TokenisedText, seq_len: int, seed: int | None, pads: bool = False) -> None:
        num_sequences = -(-len(text.tokens) // seq_len) if pads else len(text.tokens) // seq_len
        if num_sequences == 0:
            raise SlipstreamError(
                f"the text has {len(text.tokens)} tokens, less than one sequence of {seq_len}; "
                f"give more text or a smaller training.seq_len"
            )
        super().__init__(text, seq_len, seed, np.full(num_sequences, seq_len))
        self._epoch = -1
        self._order = self._starts = self._places = np.zeros(0, dtype=np.int64)

    def length(self, index: int) -> int:
        """Returns the tokens of a sequence: all have as many."""
        return self.seq_len

    def _spans(self, index: int) -> list[tuple[int, int]]:
        epoch, position = divmod(index, self.num_sequences)
        self._enter(epoch)
        start = int(self._places[position]) * self.seq_len
        stop = start + self.seq_len
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        last = int(np.searchsorted(self._starts, stop, side="left"))
        documents = map(self._span, self._order[first:last])
        return [
            (begin + max(start - at, 0), min(begin + stop - at, end))
            for at, (begin, end) in zip(self._starts[first:last].tolist(), documents, strict=True)
        ]

    def _enter(self, epoch: int) -> None:
        """Draws the orders of an epoch, and computes where each document starts in it."""
        if epoch == self._epoch:
            return
        self._order = np.arange(self.text.num_documents)
        self._places = np.arange(self.num_sequences)
        if self.seed is not None:
            random = np.random.default_rng([self.seed, epoch])
            self._order = random.permutation(self._order)
            self._places = random.permutation(self._places)
        lengths = self.text.lengths[self._order]
        self._starts = np.cumsum(lengths) - lengths
        self._epoch = epoch


class PackedSamples(TextSequences):
    """Whole samples, each a document of its own, in sequences of `seq_len` tokens whose rest is padding.

        samples     |aaaa|bbb|ccccc|d|     seq_len 6
        sequences   [cccccd] [aaaa..] [bbb...]

    The samples of a sequence are always the same; `seed` draws for each epoch the order in which sequences are visited,
    `None` keeps it. No sample may be longer than `seq_len`.
    """

    packing = "fixed"

    def __init__(self, text: TokenisedText, seq_len: int, seed: int | None) -> None:
        self._contents = best_fit(text.lengths, seq_len)
        if not self._contents:
            raise SlipstreamError("there is no sample to train on; give more data")
        super().__init__(text, seq_len, seed, np.full(len(self._contents), seq_len))

    @property
    def filled(self) -> float:
        """The share of tokens that aren't padding."""
        return len(self.text.tokens) / (self.num_sequences * self.seq_len)

    def _spans(self, index: int) -> list[tuple[int, int]]:
        return [self._span(sample) for sample in self._contents[self._visits[index]]]


def best_fit(lengths: Array, room: int) -> list[list[int]]:
    """Returns the samples of each sequence: the longest first, each to the sequence that has the least room for it
    (best-fit decreasing)."""
    contents: list[list[int]] = []
    sizes: list[int] = []  # sizes of the room left in some sequence, ascending
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
            size = room
            sequence = len(contents)
            contents.append([])
        contents[sequence].append(sample)
        if size > length:
            if size - length not in with_room:
                insort(sizes, size - length)
            with_room.setdefault(size - length, []).append(sequence)
    return contents


# A sequence of this many tokens has one to predict.
_FEWEST = 2


class WholeDocuments(TextSequences):
    """Documents as they are, those of more than `seq_len` tokens cut every `seq_len`.

        documents   |aaaaaaaa|bbb|ccccccccccc|dd|      seq_len 6
        sequences   [aaaaaa] [aa] [bbb] [cccccc] [ccccc] [dd]

    Every sequence is visited once in an epoch, in an order that `seed` draws for it; `None` keeps that of the text. A
    single token at the end of a document is left out, as it predicts nothing.
    """

    packing = "none"

    def __init__(self, text: TokenisedText, seq_len: int, seed: int | None) -> None:
        self._begins, sizes = _cut(text.offsets, seq_len)
        if not len(sizes):
            raise SlipstreamError("no document of the text has two tokens or more; give more text")
        super().__init__(text, seq_len, seed, sizes)

    def _spans(self, index: int) -> list[tuple[int, int]]:
        piece = self._visits[index]
        begin = int(self._begins[piece])
        return [(begin, begin + int(self._sizes[piece]))]


def _cut(offsets: Array, seq_len: int) -> tuple[Array, Array]:
    """Returns where each sequence begins in the text, and its tokens."""
    pieces = [(np.arange(begin, end, seq_len), end) for begin, end in pairwise(offsets.tolist())]
    nothing = np.zeros(0, dtype=np.int64)
    begins = np.concatenate([nothing, *(begin for begin, _ in pieces)])
    lengths = np.concatenate([nothing, *(np.minimum(seq_len, end - begin) for begin, end in pieces)])
    predicts = lengths >= _FEWEST
    return begins[predicts], lengths[predicts]


class PreferencePairs(TextSequences):
    """Pairs of documents that follow each other in the text, each a prompt with an answer.

        documents   |ppccc|ppr|qqqc|qqqrr|      p, q: prompts; c: chosen; r: rejected
        sequences   [ppccc ppr] [qqqc qqqrr]    of which a batch has both answers, each by itself

    Every pair is visited once in an epoch, in an order that `seed` draws for it; `None` keeps that of the text.
    """

    packing, group_size = "none", 2

    def __init__(self, text: TokenisedText, seq_len: int, seed: int | None) -> None:
        """Takes a text whose documents have at most `seq_len` tokens, chosen and rejected in turn."""
        self._lengths = text.lengths.reshape(-1, 2)
        super().__init__(text, seq_len, seed, self._lengths.sum(1))

    def document_lengths(self, index: int) -> list[int]:
        """Returns the tokens of the chosen and of the rejected document; of a rated one, which a step takes alone."""
        lengths: list[int] = self._lengths[self._visits[index]].tolist()
        return lengths if self.text.ratings is None else lengths[:1]

    def row(self, index: int) -> Row:
        """Returns one pair, with the labels and values of its two documents."""
        first = 2 * self._visits[index]
        return super().row(index)._replace(values=None if self.text.values is None else self.text.values[first:][:2])

    def _spans(self, index: int) -> list[tuple[int, int]]:
        first = 2 * self._visits[index]
        return [self._span(first), self._span(first + 1)]


class Mixture(JoinedSequences):
    """Sequences of several sources, round after round, in each of which `seed` draws the order of the sources; None
    puts them one after the other. Each source goes on where it was, in epochs of its own."""

    def __init__(
        self, parts: Sequence[TrainingSequences], shares: Sequence[float], seed: int | None, round_length: int
    ) -> None:
        """Takes sequences of one packing and one `seq_len`, one for each source, and each one's share of a round."""
        self.seed = seed
        self.num_sequences = sum(part.num_sequences for part in parts)
        self.packing = parts[0].packing
        self.seq_len = parts[0].seq_len
        self.group_size = parts[0].group_size
        tokens = [share * part.mean_length for share, part in zip(shares, parts, strict=True)]
        self.mean_length = float(np.average([part.mean_length for part in parts], weights=shares))
        self.typical_length = float(np.average([part.typical_length for part in parts], weights=tokens))
        self._parts = parts
        self._round_length = round_length
        self._round = -1
        self._begins = self._order = self._places = np.zeros(0, dtype=np.int64)

    @abstractmethod
    def _counts(self, rounds: int) -> Array:
        """Returns how many sequences of the first rounds are from each source."""

    def _find(self, index: int) -> tuple[TrainingSequences, int]:
        position = self._enter(index)
        return self._parts[int(self._order[position])], int(self._places[position])

    def _enter(self, index: int) -> int:
        """Draws the order of the sources in the round of a sequence, if it isn't there; returns the place in it."""
        round_index, position = divmod(index, self._round_length)
        if round_index != self._round:
            self._round, self._begins, ends = round_index, self._counts(round_index), self._counts(round_index + 1)
            self._order = np.repeat(np.arange(len(self._parts)), ends - self._begins)
            if self.seed is not None:
                self._order = np.random.default_rng([self.seed, round_index]).permutation(self._order)
            self._places = np.zeros_like(self._order)
            for source in range(len(self._parts)):
                self._places[self._order == source] = np.arange(self._begins[source], ends[source])
        return position


class MixedSequences(Mixture):
    """Sequences of several sources. An epoch has the number of all sources together.

        sources     aaaa bb, weights 1 and 2
        epoch 0     b a b b a b      a third of a; each source goes on where it was, in epochs of its own
        epoch 1     a b b b a b

    Without weights an epoch has each sequence of each source once.
    """

    def __init__(
        self, parts: Sequence[TrainingSequences], seed: int | None, weights: Sequence[float] | None = None
    ) -> None:
        """Takes sequences of one packing and one `seq_len`, one for each source."""
        self.weights = weights
        self.texts = [text for part in parts for text in part.texts]
        self._of_epoch = _counts_of_epoch([part.num_sequences for part in parts], weights)
        if 0 in self._of_epoch:
            total = int(self._of_epoch.sum())
            raise SlipstreamError(
                f"data.sources: number {self._of_epoch.tolist().index(0) + 1} has so small a weight that none of an "
                f"epoch's {total} sequences would be from it; give it a larger one, or leave it out"
            )
        super().__init__(parts, self._of_epoch.tolist(), seed, int(self._of_epoch.sum()))

    def take(self, texts: Sequence[TokenisedText]) -> None:
        self.texts = [*texts]
        for part, text in zip(self._parts, texts, strict=True):
            part.take([text])

    def _counts(self, rounds: int) -> Array:
        return rounds * self._of_epoch


def _counts_of_epoch(sizes: Sequence[int], weights: Sequence[float] | None) -> Array:
    """Returns how many sequences of an epoch are from each source. Their sum is the number of all sequences."""
    if weights is None:
        return np.array(sizes)
    return rounded_counts(weights, sum(sizes))


def rounded_counts(weights: Sequence[float], total: int) -> Array:
    """Returns the share of each weight in a number of sequences, to whole ones."""
    ends = np.cumsum(weights) / np.sum(weights) * total
    return np.diff(np.rint(ends).astype(np.int64), prepend=0)
