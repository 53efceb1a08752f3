"""Sequences of a data set that is read while it is trained on, and never wholly in memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.training.data import PackedSamples, PackedSequences, TokenisedText, WholeDocuments
from slipstream.training.data.samples.row_stream import RowStream, State
from slipstream.training.data.sequences import Row, TokenBatch, TrainingSequences

_MOST_EMPTY = 100  # blocks in a row without a sequence, before the run ends
Tokenise = Callable[[str, list[dict[str, Any]]], TokenisedText]


class _Block(NamedTuple):
    number: int
    first: int  # the number of its first sequence
    sequences: TrainingSequences
    state: State  # of the stream, where the block begins

    @property
    def end(self) -> int:
        return self.first + self.sequences.num_sequences


class StreamedSequences(TrainingSequences):
    """Sequences of a stream of rows. Each block of rows is shuffled, packed and trained on, then the next.

    Every rank reads the same rows. The next block is tokenised in a thread while this one is trained on. Sequences are
    asked for in their order; `state` says where a run that is resumed has to begin.
    """

    origin: dict[str, Any]

    def __init__(
        self,
        stream: RowStream,
        tokenise: Tokenise,
        facts: dict[str, Any],
        packing: str,
        seq_len: int,
        seed: int,
    ) -> None:
        """`tokenise` gets what a block's rows are called, and the rows. `facts` are what else tells samples apart.

        Raises:
            SlipstreamError: as `tokenise` does, for the first block, and where no block has a sequence.
        """
        self._seed = seed
        self.packing, self.seq_len, self.seed, self.texts = packing, seq_len, seed, []
        self.origin = {**stream.facts, **facts}
        self._stream, self._tokenise = stream, tokenise
        self._thread = ThreadPoolExecutor(1)
        self._blocks = [self._make(0, 0)]
        first = self._blocks[0].sequences
        self._mean, self._typical, self.num_sequences = first.mean_length, first.typical_length, first.num_sequences
        self.first_text = first.texts[0]
        self._next: Future[_Block] | None = None

    @property
    def mean_length(self) -> float:
        """The mean tokens of a sequence of the first block."""
        return self._mean

    @property
    def typical_length(self) -> float:
        """The mean tokens of the first block's sequences in which tokens are."""
        return self._typical

    def length(self, index: int) -> int:
        """Returns the tokens of a sequence."""
        block = self._find(index)
        return block.sequences.length(index - block.first)

    def row(self, index: int) -> Row:
        """Returns one sequence."""
        block = self._find(index)
        return block.sequences.row(index - block.first)

    def batch(self, first: int, size: int, replica: int = 0, num_replicas: int = 1) -> TokenBatch:
        """Returns one replica's part of a batch. What is before it can't be asked for any more."""
        self.read_ahead()
        found = super().batch(first, size, replica, num_replicas)
        self.forget_before(first)
        return found

    def read_ahead(self) -> None:
        """Begins to read and to tokenise the next block."""
        self._next = self._next or self._begin()

    def forget_before(self, index: int) -> None:
        """Lets go of blocks whose sequences are all before `index`, which mustn't be asked for any more."""
        while self._blocks[0].end <= index and len(self._blocks) > 1:
            del self._blocks[0]

    def state(self, index: int) -> State:
        """Returns where a run begins to read whose next sequence is `index`, as JSON can hold it."""
        block = self._find(index)
        return {"number": block.number, "first": block.first, "stream": block.state}

    def go_to(self, state: State) -> None:
        """Begins with the block of `state`."""
        if self._next is not None:
            self._next.cancel()
        self._thread.submit(self._stream.go_to, state["stream"]).result()
        self._blocks, self._next = [self._thread.submit(self._make, state["number"], state["first"]).result()], None

    def _find(self, index: int) -> _Block:
        """Returns the block with a sequence; reads on where that is a later one."""
        if index < self._blocks[0].first:
            raise IndexError(f"sequence {index} of a stream that has passed {self._blocks[0].first}")
        while index >= self._blocks[-1].end:
            made = (self._next or self._begin()).result()
            self._blocks.append(made)
            self._next = self._begin()
        return next(block for block in self._blocks if index < block.end)

    def _begin(self) -> Future[_Block]:
        last = self._blocks[-1]
        return self._thread.submit(self._make, last.number + 1, last.end)

    def _make(self, number: int, first: int) -> _Block:
        """Reads the next block that has a sequence."""
        for _ in range(_MOST_EMPTY):
            state = self._stream.state()
            text = self._tokenise(*self._stream.next_block())
            if sequences := self._sequences_of(text, number):
                return _Block(number, first, sequences, state)
        raise SlipstreamError(f"{_MOST_EMPTY} blocks of rows hold nothing to train on; see what was said of them")

    def _sequences_of(self, text: TokenisedText, number: int) -> TrainingSequences | None:
        if not (text.lengths > 1).any():
            return None
        seed = int(np.random.default_rng([self._seed, number]).integers(2**31))
        if self.packing == "none":
            return WholeDocuments(text, self.seq_len, seed)
        if text.labels is not None:
            return PackedSamples(text, self.seq_len, seed)
        return PackedSequences(text, self.seq_len, seed, pads=True)
