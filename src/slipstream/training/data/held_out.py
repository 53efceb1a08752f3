"""Batches that have each sequence of a held-out text once."""

from __future__ import annotations

from slipstream.model import IGNORED
from slipstream.training.data.batch_size import Batch, BatchSize, spread_batches
from slipstream.training.data.sequences import TokenBatch, TrainingSequences


class HeldOutBatches:
    """Batches of sequences without a seed. The last one is filled up with the first sequences, which count only once.

    sequences   a b c d e      3 of them in a batch
    batches     [a b c] [d e a]     in the second one no label of a counts
    """

    def __init__(self, sequences: TrainingSequences, size: BatchSize) -> None:
        self.sequences, self._number = sequences, sequences.num_sequences
        self._batches = list[Batch]()
        first = 0
        while first < self._number:
            self._batches.append((first, size.at(sequences, first)))
            first += self._batches[-1][1]

    def chosen(self, limit: int | None = None) -> list[Batch]:
        """Returns all batches, or `limit` of them, spread evenly."""
        return spread_batches(self._batches, limit)

    def counts(self, batch: Batch, replica: int = 0, num_replicas: int = 1) -> list[bool]:
        """Returns of each sequence in a replica's part of a batch whether it counts."""
        return [index < self._number for index in self.sequences.share(*batch, replica, num_replicas)]

    def batch(self, batch: Batch, replica: int = 0, num_replicas: int = 1) -> TokenBatch:
        """Returns a replica's part of a batch; of sequences in groups, such as pairs, those that don't count keep their
        labels, of which a loss of them is made."""
        found, counts = self.sequences.batch(*batch, replica, num_replicas), self.counts(batch, replica, num_replicas)
        if self.sequences.group_size == 1:
            for labels, is_counted in zip(found.labels, counts, strict=True):
                if not is_counted:
                    labels.fill_(IGNORED)  # in place: a row of a tensor, or one of a list
        return found
