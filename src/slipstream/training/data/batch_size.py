"""How many sequences a step takes: a number of them, or as many as a number of tokens has room for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slipstream.training.data.sequences import TrainingSequences

Batch = tuple[int, int]  # the first sequence, and how many


@dataclass(frozen=True)
class BatchSize:
    """What a step takes, over all replicas.

    Args:
        sequences: the number of them.
        tokens: in place of their number, the most tokens that whole documents of a step have together.
    """

    sequences: int
    tokens: int | None = None

    def at(self, sequences: TrainingSequences, first: int) -> int:
        """Returns the number of sequences of the step that begins with sequence `first`."""
        if self.tokens is None or sequences.packing == "fixed":
            return self.sequences
        return sequences.num_fitting(first, self.tokens)

    def mean(self, sequences: TrainingSequences) -> float:
        """Returns the mean number of sequences of a step, about; with `tokens` as if steps were filled to the last."""
        return self.sequences if self.tokens is None else max(1.0, self.tokens / sequences.mean_length)

    def batches(self, sequences: TrainingSequences, number: int) -> Iterator[Batch]:
        """Yields the full batches of the first `number` sequences."""
        first = 0
        while first + (size := self.at(sequences, first)) <= number:
            yield first, size
            first += size


def spread_batches(batches: Sequence[Batch], limit: int | None = None) -> list[Batch]:
    """Returns all batches, or `limit` of them, spread evenly."""
    count = min(limit or len(batches), len(batches))
    return [batches[index * len(batches) // count] for index in range(count)]
