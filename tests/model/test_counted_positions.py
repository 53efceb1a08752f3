"""Positions that don't count padding, as RoBERTa's, are those of the unsplit model, or the batch is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import RobertaConfig

from slipstream import SlipstreamError
from support.architectures import build, labels_of
from support.exact_steps import exact_pipe
from support.pipelines import make_pipe

PADDING, LONGEST = 3, 60
CONFIG = RobertaConfig(
    is_decoder=True,
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=LONGEST + PADDING + 1,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    pad_token_id=PADDING,
)


def tokens(length: int = LONGEST) -> torch.Tensor:
    return torch.randint(PADDING + 1, 61, (2, length), generator=torch.Generator().manual_seed(0))


def test_positions_begin_after_the_padding_tokens_id() -> None:
    inputs = tokens()
    inputs[0, 50:] = PADDING
    labels = labels_of(inputs)
    labels[0, 50:] = -100
    exact_pipe(build(CONFIG), inputs, labels, slices=[5, 1, 44, 10])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (tokens().index_fill(1, torch.tensor([0, 7]), PADDING), r"row 0 .* padding \(token id 3\) before other tokens"),
        (tokens(LONGEST + 1), "max_position_embeddings=64, of which the first 4 are reserved. Use at most 60"),
    ],
    ids=["padding", "too long"],
)
def test_other_batches_are_refused(inputs: torch.Tensor, message: str) -> None:
    pipe = make_pipe(build(CONFIG), slices=4, num_ranks=2)
    with pytest.raises(SlipstreamError, match=message):
        pipe.step(inputs, inputs)
