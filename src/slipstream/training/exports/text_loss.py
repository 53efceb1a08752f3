"""The loss of a model on a held-out text, in one process: that of a validation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slipstream.launch import Progress
from slipstream.model import IGNORED
from slipstream.training.data import TokenisedText, TrainingSequences, sequences_of
from slipstream.training.exports.lone_model import Document, LoneModel

_LARGEST = 700.0  # nats; e to more is no float64


@dataclass(frozen=True)
class TextLoss:
    """What a model loses on a text.

    Attributes:
        num_tokens: of the text.
        num_predicted: those that count: all that have a label but the first of each document, or of its part where it
            is cut.
        loss: the mean cross-entropy of a predicted token, in nats.
    """

    num_tokens: int
    num_predicted: int
    loss: float

    @property
    def perplexity(self) -> float:
        """e to the loss: among how many equally likely tokens the model as good as guesses."""
        return math.exp(self.loss) if self.loss < _LARGEST else math.inf


def measure_text_loss(
    model: LoneModel, texts: Sequence[TokenisedText], packing: str, seq_len: int, room: int, progress: Progress
) -> TextLoss:
    """Returns the loss on all sequences of the texts, as validations have them by `data.packing`: on each document, or
    its part in a sequence, by itself. Short ones are computed together, up to `room` tokens."""
    sequences = sequences_of(texts, packing, seq_len, seed=None, pads=True)
    total, num_predicted, done = 0.0, 0, 0
    with progress.counting("evaluating", total=sum(len(text.tokens) for text in texts)) as show:
        for group in _groups(sequences, room):
            total -= model.log_probability(group)
            num_predicted += sum(int((labels[1:] != IGNORED).sum()) for _, labels in group)
            done += sum(len(tokens) for tokens, _ in group)
            show(done)
    return TextLoss(sum(len(text.tokens) for text in texts), num_predicted, total / max(num_predicted, 1))


def _groups(sequences: TrainingSequences, room: int) -> Iterator[list[Document]]:
    """Yields the documents of all sequences, several together where they have at most `room` tokens."""
    group, size = list[Document](), 0
    for index in range(sequences.num_sequences):
        for document in sequences.row(index).parts():
            if group and size + len(document[0]) > room:
                yield group
                group, size = [], 0
            group.append(document)
            size += len(document[0])
    if group:
        yield group
