"""Sequences of several data sets that are read while they are trained on, in shares that their weights give."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.training.data.samples.row_stream import State
from slipstream.training.data.samples.streamed_sequences import StreamedSequences
from slipstream.training.data.sequences import Row, TokenBatch, TrainingSequences
from slipstream.training.data.tokenised_text import Array

_ROUND = 256  # sequences


class MixedStreams(TrainingSequences):
    """Sequences of several streams, interleaved by weight.

        streams   aaaa..., bbbb..., weights 1 and 2
        round 0   b a b b a b      a third of a; each stream goes on where it was, in epochs of its own
        round 1   a b b b a b

    `seed` draws the order in each round of 256 sequences, in which the shares are those of the weights but for
    rounding, which the next rounds make up for. Which stream a sequence is from depends only on its number, so that a
    resumed run needs no more than the place of each stream.
    """

    def __init__(self, parts: Sequence[StreamedSequences], weights: Sequence[float], seed: int) -> None:
        """Takes streams of one packing and one `seq_len`."""
        self.parts, self.weights, self.seed, self.texts = parts, weights, seed, []
        self.packing, self.seq_len = parts[0].packing, parts[0].seq_len
        self.num_sequences = sum(part.num_sequences for part in parts)
        self.origin = {"sources": [part.origin for part in parts], "weights": [*weights]}
        self._round = -1
        self._order = self._places = self._begins = np.zeros(0, dtype=np.int64)

    @property
    def mean_length(self) -> float:
        """The mean tokens of a sequence, by the first block of each stream."""
        assert self.weights is not None
        return float(np.average([part.mean_length for part in self.parts], weights=self.weights))

    @property
    def typical_length(self) -> float:
        """The mean tokens of the sequences in which tokens are, by the first block of each stream."""
        assert self.weights is not None
        tokens = [weight * part.mean_length for weight, part in zip(self.weights, self.parts, strict=True)]
        return float(np.average([part.typical_length for part in self.parts], weights=tokens))

    def length(self, index: int) -> int:
        """Returns the tokens of a sequence."""
        stream, place = self._find(index)
        return self.parts[stream].length(place)

    def row(self, index: int) -> Row:
        """Returns one sequence."""
        stream, place = self._find(index)
        return self.parts[stream].row(place)

    def batch(self, first: int, size: int, replica: int = 0, num_replicas: int = 1) -> TokenBatch:
        """Returns one replica's part of a batch. What is before it can't be asked for any more."""
        for part in self.parts:
            part.read_ahead()
        found = super().batch(first, size, replica, num_replicas)
        for part, place in zip(self.parts, self._next_places(first), strict=True):
            part.forget_before(place)
        return found

    def state(self, index: int) -> State:
        """Returns where each stream begins to read in a run whose next sequence is `index`, as JSON can hold it."""
        places = zip(self.parts, self._next_places(index), strict=True)
        return {"streams": [part.state(place) for part, place in places]}

    def go_to(self, state: State) -> None:
        """Begins with the blocks of `state`."""
        for part, each in zip(self.parts, state["streams"], strict=True):
            part.go_to(each)

    def _find(self, index: int) -> tuple[int, int]:
        """Returns the stream of a sequence, and the sequence's number there."""
        position = self._enter(index)
        return int(self._order[position]), int(self._places[position])

    def _next_places(self, index: int) -> list[int]:
        """Returns the number of each stream's next sequence, where those before `index` are done."""
        position = self._enter(index)
        done: list[int] = (self._begins + np.bincount(self._order[:position], minlength=len(self.parts))).tolist()
        return done

    def _enter(self, index: int) -> int:
        """Draws the order of the streams in the round of a sequence, if it isn't there; returns the place in it."""
        number, position = divmod(index, _ROUND)
        if number != self._round:
            self._begins, ends = self._counts(number), self._counts(number + 1)
            order = np.repeat(np.arange(len(self.parts)), ends - self._begins)
            self._round, self._order = number, np.random.default_rng([self.seed or 0, number]).permutation(order)
            self._places = np.zeros_like(self._order)
            for stream in range(len(self.parts)):
                self._places[self._order == stream] = np.arange(self._begins[stream], ends[stream])
        return position

    def _counts(self, rounds: int) -> Array:
        """Returns how many sequences of the first rounds are from each stream."""
        assert self.weights is not None
        ends = np.rint(np.cumsum(self.weights) / np.sum(self.weights) * rounds * _ROUND).astype(np.int64)
        return np.diff(ends, prepend=0)
