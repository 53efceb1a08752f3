"""The loss of a model on a text, in one process, long documents in token slices."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.model import check_length, load_config, longest_sequence
from slipstream.options import Runtime
from slipstream.pipeline import Pipeline
from slipstream.pipeline.batch import slice_lengths
from slipstream.planner.steps import StepPlan
from slipstream.schedule import gpipe
from slipstream.training.data import TokenisedText, WholeDocuments

_LARGEST = 700.0  # nats; e to more is no float64


@dataclass(frozen=True)
class TextLoss:
    """What a model loses on a text.

    Attributes:
        num_tokens: of the text.
        num_predicted: all but the first of each document, or of its part where it is cut.
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
    model: str, text: TokenisedText, seq_len: int | None, slice_len: int, progress: Progress
) -> TextLoss:
    """Evaluates a model's folder on each document by itself.

    Documents of more than `seq_len` tokens (default: the model's longest sequence) are cut there. Of each piece,
    `slice_len` tokens at a time are computed, which attend to all before them: the loss is that of the whole piece, and
    only keys and values of the rest are in memory.

    Raises:
        SlipstreamError: where the model can't be loaded, or doesn't take such a text.
    """
    sequences = WholeDocuments(text, _longest(model, seq_len, text), seed=None)
    lengths = sequences.lengths(0, sequences.num_sequences)
    pipe = Pipeline.from_pretrained(
        model,
        slices=1,
        device="cuda" if torch.cuda.is_available() else "cpu",
        runtime=Runtime(self_check=max(lengths) > slice_len),
    )
    total, done = 0.0, 0
    with progress.counting("evaluating", total=sum(lengths)) as show:
        for index, length in enumerate(lengths):
            batch = sequences.batch(index, 1)
            loss = pipe.evaluate(batch.input_ids, batch.labels, plan=_one_after_the_other(length, slice_len))
            total, done = total + float(loss) * batch.num_predicted, done + length
            show(done)
    num_predicted = sum(lengths) - len(lengths)
    return TextLoss(len(text.tokens), num_predicted, total / num_predicted)


def _longest(model: str, seq_len: int | None, text: TokenisedText) -> int:
    """Returns the most tokens of a sequence."""
    config = load_config(model)
    if seq_len is None:
        return longest_sequence(config) or len(text.tokens)
    if seq_len < 2:
        raise SlipstreamError(f"--seq-len={seq_len}: a sequence needs 2 tokens, so that one is predicted")
    check_length(config, seq_len, "--seq-len")
    return seq_len


def _one_after_the_other(length: int, slice_len: int) -> StepPlan:
    """Returns the plan of one sequence, in as few slices as have at most `slice_len` tokens."""
    slices = slice_lengths(-(-length // slice_len), length)
    return StepPlan(((0,),), (tuple(slices),), gpipe(1, 1, len(slices)))
