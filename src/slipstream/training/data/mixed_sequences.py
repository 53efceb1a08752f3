"""Sequences of several sources, in shares that their weights give."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.training.data.sequences import Row, TrainingSequences


class MixedSequences(TrainingSequences):
    """Sequences of several sources. An epoch has as many as the sources have together.

        sources     aaaa bb, weights 1 and 2
        epoch 0     b a b b a b      a third of a; each source goes on where it was, in epochs of its own
        epoch 1     a b b b a b

    Without weights an epoch has each sequence of each source once. `seed` draws for each epoch the order of the
    sources; `None` puts them one after the other.
    """

    def __init__(
        self, parts: Sequence[TrainingSequences], seed: int | None, weights: Sequence[float] | None = None
    ) -> None:
        """Takes sequences of one packing and one `seq_len`, one for each source."""
        self.parts, self.weights, self.seed = parts, weights, seed
        self.packing, self.seq_len, self.group_size = parts[0].packing, parts[0].seq_len, parts[0].group_size
        self.texts = [text for part in parts for text in part.texts]
        self.num_sequences = sum(part.num_sequences for part in parts)
        self._counts = _counts([part.num_sequences for part in parts], weights)  # in an epoch, of each source
        if 0 in self._counts:
            number, total = self._counts.index(0) + 1, self.num_sequences
            raise SlipstreamError(
                f"data.sources: number {number} has so small a weight that none of an epoch's {total} sequences would "
                "be from it; give it a larger one, or leave it out"
            )
        self._epoch, self._order, self._places = -1, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)

    @property
    def mean_length(self) -> float:
        """The mean tokens of a sequence."""
        lengths = [part.mean_length for part in self.parts]
        return float(np.average(lengths, weights=self._counts))

    @property
    def typical_length(self) -> float:
        """The mean tokens of the sequences in which tokens are: long ones count by their tokens."""
        tokens = [count * part.mean_length for count, part in zip(self._counts, self.parts, strict=True)]
        return float(np.average([part.typical_length for part in self.parts], weights=tokens))

    def length(self, index: int) -> int:
        """Returns the tokens of a sequence."""
        source, place = self._find(index)
        return self.parts[source].length(place)

    def document_lengths(self, index: int) -> list[int]:
        """Returns the tokens of each document of a sequence without packing."""
        source, place = self._find(index)
        return self.parts[source].document_lengths(place)

    def row(self, index: int) -> Row:
        """Returns one sequence."""
        source, place = self._find(index)
        return self.parts[source].row(place)

    def _find(self, index: int) -> tuple[int, int]:
        """Returns the source of a sequence, and the sequence's number there."""
        epoch, position = divmod(index, self.num_sequences)
        if epoch != self._epoch:
            self._enter(epoch)
        return int(self._order[position]), int(self._places[position])

    def _enter(self, epoch: int) -> None:
        """Draws the order of the sources in an epoch."""
        self._epoch, self._order = epoch, np.repeat(np.arange(len(self.parts)), self._counts)
        if self.seed is not None:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self._order)
        self._places = np.zeros_like(self._order)
        for source, count in enumerate(self._counts):
            self._places[self._order == source] = np.arange(epoch * count, (epoch + 1) * count)


def _counts(sizes: Sequence[int], weights: Sequence[float] | None) -> list[int]:
    """Returns how many sequences of an epoch are from each source; together as many as all have."""
    if weights is None:
        return [*sizes]
    ends = np.cumsum(weights) / np.sum(weights) * sum(sizes)
    return [int(count) for count in np.diff(np.rint(ends).astype(np.int64), prepend=0)]
