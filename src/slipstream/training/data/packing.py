"""Documents one after the other, cut into equally long sequences."""

from __future__ import annotations

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.model import IGNORED
from slipstream.training.data.sequences import PADDING, Row, TrainingSequences
from slipstream.training.data.tokenised_text import TokenisedText


class PackedSequences(TrainingSequences):
    """Documents in a row, cut every `seq_len` tokens.

        documents   |aaaaaaaa|bbb|ccccccccccc|dd|
        sequences   [aaaaaa|aabbbc|cccccc|ccccdd]     a document continues in the next sequence

    For each epoch, `seed` draws the order of the documents, and the order in which the sequences are visited, so that
    the parts of a long document don't follow each other. `None` keeps both orders. Nothing is dropped except the end of
    an epoch, less than one sequence; with `pads` that becomes a sequence, too, whose rest is padding.
    """

    packing = "fixed"

    def __init__(self, text: TokenisedText, seq_len: int, seed: int | None, pads: bool = False) -> None:
        self.text, self.seq_len, self.seed = text, seq_len, seed
        self.texts = [text]
        self.num_sequences = -(-len(text.tokens) // seq_len) if pads else len(text.tokens) // seq_len
        if self.num_sequences == 0:
            raise SlipstreamError(
                f"the text has {len(text.tokens)} tokens, less than one sequence of {seq_len}; "
                f"give more text or a smaller training.seq_len"
            )
        self._epoch = -1
        self._order = self._starts = self._visits = np.zeros(0, dtype=np.int64)

    @property
    def mean_length(self) -> float:
        """The tokens of each sequence."""
        return float(self.seq_len)

    def length(self, index: int) -> int:
        """Returns the tokens of a sequence: all have as many."""
        return self.seq_len

    def row(self, index: int) -> Row:
        """Returns one sequence."""
        epoch, position = divmod(index, self.num_sequences)
        self._enter(epoch)
        start = int(self._visits[position]) * self.seq_len
        stop = start + self.seq_len
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        last = int(np.searchsorted(self._starts, stop, side="left"))
        places = range(first, last)  # in this epoch's order, of the documents that are in the sequence
        parts = [
            self.text.document(int(self._order[place]))[max(start - begin, 0) : stop - begin]
            for place, begin in zip(places, self._starts[first:last], strict=True)
        ]
        tokens, documents = np.concatenate(parts).astype(np.int64), np.repeat(places, [len(part) for part in parts])
        rest = (0, self.seq_len - len(tokens))
        labels, padding = (
            np.pad(tokens, rest, constant_values=IGNORED),
            np.pad(documents, rest, constant_values=PADDING),
        )
        return Row(np.pad(tokens, rest), labels, padding)

    def _enter(self, epoch: int) -> None:
        """Draws the orders of an epoch, and computes where each document starts in it."""
        if epoch == self._epoch:
            return
        self._order, self._visits = np.arange(self.text.num_documents), np.arange(self.num_sequences)
        if self.seed is not None:
            random = np.random.default_rng([self.seed, epoch])
            self._order, self._visits = random.permutation(self._order), random.permutation(self._visits)
        lengths = self.text.lengths[self._order]
        self._starts, self._epoch = np.cumsum(lengths) - lengths, epoch
