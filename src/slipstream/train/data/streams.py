"""Sequences of data that is read while it is trained on, and never wholly in memory, from one source or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.train.config import Config, SourceSection
from slipstream.train.data import sequences_of
from slipstream.train.data.chat_templates import ChatTemplate
from slipstream.train.data.open_source import CONVERSATIONS, find_form, find_loss
from slipstream.train.data.packing import Mixture, rounded_counts
from slipstream.train.data.samples import SampleReader, read_samples
from slipstream.train.data.sequences import JoinedSequences, TokenBatch, TrainingSequences
from slipstream.train.data.sources import digest_of, find_bad_line, read_rows, row_files, with_given_keys
from slipstream.train.data.tokenised_text import Array, TokenisedText, load_texts, load_tokenizer, tokenise

State = dict[str, Any]


class RowStream:
    """The rows of a source in their order, `block_rows` at a time, epoch after epoch; none spans two epochs."""

    def __init__(self, source: SourceSection, block_rows: int) -> None:
        """Raises SlipstreamError where the data set can't be read, or is empty."""
        self._source = source
        self._block_rows = block_rows
        self._epoch, self._num_read = 0, 0  # rows of this epoch
        self._open()
        first = self._read(1)
        if not first:
            raise SlipstreamError(f"{source.name} holds no row; give a data set with at least one")
        self.columns = [*first[0]]
        self._open()

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that decide the order of rows: of files what they hold, too."""
        source = self._source
        files = row_files(self._source)
        what = source.dataset if source.files is None else source.name
        stream = f"{what}/{source.dataset_config}/{source.split}"
        if source.max_samples is not None:
            stream += f", {source.max_samples} rows"
        return {"stream": stream, "files": [digest_of(file) for file in files]}

    def state(self) -> State:
        """Returns a state with which `go_to` goes on with the next block, as JSON can hold it."""
        return {"epoch": self._epoch, "num_read": self._num_read, "rows": self._rows.state_dict()}

    def go_to(self, state: State) -> None:
        """Goes on where `state` was taken."""
        self._epoch = state["epoch"]
        self._num_read = state["num_read"]
        self._open(state["rows"])

    def next_block(self) -> tuple[str, list[dict[str, Any]]]:
        """Returns the next rows, and which they are in words."""
        rows = self._read(self._block_rows)
        if not rows:
            self._epoch = self._epoch + 1
            self._num_read = 0
            self._open()
            rows = self._read(self._block_rows)
        first = self._num_read + 1
        self._num_read = self._num_read + len(rows)
        return f"{self._source.name}, rows {first:,} to {self._num_read:,}", rows

    def _open(self, state: Any = None) -> None:
        self._rows = read_rows(self._source, streaming=True)
        if state is not None:
            self._rows.load_state_dict(state)
        self._iterator = iter(self._rows)

    def _read(self, number: int) -> list[dict[str, Any]]:
        try:
            return [*with_given_keys(islice(self._iterator, number), self._rows.features)]
        # `datasets` raises many types, all of which mean that the data can't be read.
        except Exception as error:
            where = f"after row {self._num_read:,}" if self._num_read else "from its beginning"
            if line := find_bad_line(row_files(self._source)):
                raise SlipstreamError(f"{self._source.option}={line}") from error
            raise SlipstreamError(f"can't read {self._source.name} {where}: {error}") from error


_MOST_EMPTY = 100  # blocks in a row without a sequence before the run ends
Tokenise = Callable[[str, list[dict[str, Any]]], TokenisedText]


class _Block(NamedTuple):
    number: int
    first: int  # the number of its first sequence
    sequences: TrainingSequences
    state: State  # the stream's, at the beginning of the block

    @property
    def end(self) -> int:
        return self.first + self.sequences.num_sequences


class StreamedSequences(JoinedSequences):
    """Sequences of a stream of rows. Each block of rows is shuffled, packed and trained on, then the next.

    Every rank reads the same rows. The next block is tokenised in a thread while this one is trained on. Sequences are
    asked for in their order; `state` says where a run that is resumed has to begin.
    """

    origin: dict[str, Any]
    seed: int

    def __init__(
        self,
        stream: RowStream,
        tokenise: Tokenise,
        facts: dict[str, Any],
        packing: str,
        seq_len: int,
        seed: int,
    ) -> None:
        """`tokenise` gets a name for a block's rows, and the rows. `facts` are further facts that tell samples apart.

        Raises:
            SlipstreamError: as `tokenise` does, for the first block, and where no block has a sequence.
        """
        self.packing = packing
        self.seq_len = seq_len
        self.seed = seed
        self.texts = []
        self.origin = {**stream.facts, **facts}
        self._stream = stream
        self._tokenise = tokenise
        self._thread = ThreadPoolExecutor(1)
        self._blocks = [self._make(0, 0)]
        first = self._blocks[0].sequences
        self.mean_length = first.mean_length
        self.typical_length = first.typical_length
        self.num_sequences = first.num_sequences
        self.first_text = first.texts[0]
        self._next: Future[_Block] | None = None

    def batch(self, first: int, size: int, replica: int = 0, num_replicas: int = 1) -> TokenBatch:
        """Returns one replica's part of a batch. Earlier batches can't be asked for any more."""
        self.read_ahead()
        batch = super().batch(first, size, replica, num_replicas)
        self.forget_before(first)
        return batch

    def read_ahead(self) -> None:
        """Begins to read and to tokenise the next block."""
        self._next = self._next or self._begin()

    def forget_before(self, index: int) -> None:
        """Lets go of blocks whose sequences are all before `index`, which mustn't be asked for any more."""
        while self._blocks[0].end <= index and len(self._blocks) > 1:
            del self._blocks[0]

    def state(self, index: int) -> State:
        """Returns where a run begins to read whose next sequence is `index`, as JSON can hold it."""
        block = self._block(index)
        return {"number": block.number, "first": block.first, "stream": block.state}

    def go_to(self, state: State) -> None:
        """Begins with the block of `state`."""
        if self._next is not None:
            self._next.cancel()
        self._thread.submit(self._stream.go_to, state["stream"]).result()
        self._blocks = [self._thread.submit(self._make, state["number"], state["first"]).result()]
        self._next = None

    def _find(self, index: int) -> tuple[TrainingSequences, int]:
        block = self._block(index)
        return block.sequences, index - block.first

    def _block(self, index: int) -> _Block:
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
            if (text.lengths > 1).any():
                seed = int(np.random.default_rng([self.seed, number]).integers(2**31))
                sequences = sequences_of([text], self.packing, self.seq_len, seed, pads=True)
                return _Block(number, first, sequences, state)
        raise SlipstreamError(f"{_MOST_EMPTY} blocks of rows hold nothing to train on; see the messages above")


_ROUND = 256  # sequences


class MixedStreams(Mixture):
    """Sequences of several streams, interleaved by weight.

        streams   aaaa..., bbbb..., weights 1 and 2
        round 0   b a b b a b      a third of a; each stream goes on where it was, in epochs of its own
        round 1   a b b b a b

    A round has 256 sequences, in which the shares are those of the weights but for rounding, which the next rounds make
    up for. Which stream a sequence is from depends only on its number, so that a resumed run needs no more than the
    place of each stream.
    """

    weights: Sequence[float]

    def __init__(self, parts: Sequence[StreamedSequences], weights: Sequence[float], seed: int) -> None:
        """Takes streams of one packing and one `seq_len`."""
        super().__init__(parts, weights, seed, _ROUND)
        self.parts = parts
        self.weights = weights
        self.texts = []
        self.origin = {"sources": [part.origin for part in parts], "weights": [*weights]}

    def batch(self, first: int, size: int, replica: int = 0, num_replicas: int = 1) -> TokenBatch:
        """Returns one replica's part of a batch. Earlier batches can't be asked for any more."""
        for part in self.parts:
            part.read_ahead()
        batch = super().batch(first, size, replica, num_replicas)
        for part, place in zip(self.parts, self._next_places(first), strict=True):
            part.forget_before(place)
        return batch

    def state(self, index: int) -> State:
        """Returns where each stream begins to read in a run whose next sequence is `index`, as JSON can hold it."""
        places = zip(self.parts, self._next_places(index), strict=True)
        return {"streams": [part.state(place) for part, place in places]}

    def go_to(self, state: State) -> None:
        """Begins with the blocks of `state`."""
        for part, part_state in zip(self.parts, state["streams"], strict=True):
            part.go_to(part_state)

    def _next_places(self, index: int) -> list[int]:
        """Returns the number of each stream's next sequence, where those before `index` are done."""
        position = self._enter(index)
        done: list[int] = (self._begins + np.bincount(self._order[:position], minlength=len(self.parts))).tolist()
        return done

    def _counts(self, rounds: int) -> Array:
        return rounded_counts(self.weights, rounds * _ROUND)


def load_sequences(config: Config, inputs: Path, say: Callable[[str], None]) -> TrainingSequences:
    """Returns the sequences of a run whose inputs are in this folder. `say` gets a line on rows left out."""
    section = config.data
    training = config.training
    if section.streaming:
        return stream_sequences(config, load_tokenizer(str(inputs), config.model.trust_remote_code), say)
    texts = load_texts(inputs, "train")
    return sequences_of(texts, section.packing, training.seq_len, training.seed, section.weights)


def stream_sequences(
    config: Config, tokenizer: Any, say: Callable[[str], None], vocab_size: int | None = None
) -> StreamedSequences | MixedStreams:
    """Opens the data sets as streams, and reads the first block of each. Given tokens are below `vocab_size`.

    Raises:
        SlipstreamError: where one can't be read, or its columns fit no form.
    """
    streams = [_stream(config, source, tokenizer, say, vocab_size) for source in config.data.all_sources]
    weights = config.data.weights
    return streams[0] if weights is None else MixedStreams(streams, weights, config.training.seed)


def _stream(
    config: Config, source: SourceSection, tokenizer: Any, say: Callable[[str], None], vocab_size: int | None
) -> StreamedSequences:
    section = config.data
    seq_len = config.training.seq_len
    stream = RowStream(source, section.shuffle_rows)
    form = find_form(source, stream.columns)
    loss = find_loss(source, form)
    needs_template = form in CONVERSATIONS or section.chat_template
    template = ChatTemplate(tokenizer, section.chat_template) if needs_template else None
    reader = SampleReader(source, form, loss, tokenizer, template, vocab_size)

    def make(name: str, rows: list[dict[str, Any]]) -> TokenisedText:
        if form != "text":
            text, report = read_samples(rows, reader, name, seq_len)
        else:
            texts = [row[source.text_column] for row in rows]
            documents = [document for document in texts if isinstance(document, str) and document.strip()]
            left_out = len(texts) - len(documents)
            report = f"left out {left_out:,} of {len(texts):,} documents without text" if left_out else ""
            text = tokenise(tokenizer, documents, Progress(None))
        if report:
            say(f"{name}: {report}")
        return text

    facts = {"form": form, "loss": loss, "shuffle_rows": section.shuffle_rows}
    return StreamedSequences(stream, make, facts, section.packing, seq_len, config.training.seed)
