"""What is passed to a Pipeline and its `step` by mistake, and the words of the error that says what to give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from slipstream import Pipeline, Runtime, SlipstreamError

CONFIG = LlamaConfig(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    vocab_size=300,
    max_position_embeddings=64,
)
TOKENS = torch.arange(4 * 32).reshape(4, 32)

ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"schedule": "1f1p"}, "schedule='1f1p' is not known; did you mean '1f1b'"),
    ({"schedule": 5}, "schedule=5: give a name, such as '1f1b', or a slipstream.Schedule."),
    ({"schedule": None}, "schedule=None: give a name"),
    ({"stages_per_rank": 3}, "stages_per_rank=3, but the schedule '1f1b' has exactly 1. Give stages_per_rank=1"),
    ({"slices": 0}, "slices=0: give a count from 1"),
    ({"slices": "two"}, "slices='two': give a count from 1, such as 8"),
    ({"slices": [16, 0]}, "slices=[16, 0]: give a count from 1, such as 8, or the token lengths"),
    ({"slices": [8, "x"]}, "slices=[8, 'x']: give a count from 1"),
    ({"num_microbatches": 0}, "num_microbatches=0: give a whole number from 1"),
    ({"num_microbatches": "2"}, "num_microbatches='2': give a whole number from 1"),
    ({"num_microbatches": 1.5}, "num_microbatches=1.5: give a whole number from 1"),
    ({"partition": [1]}, "partition=[1] has 1 stages and 1 layers"),
    ({"device": "gpu"}, "device='gpu' isn't one of torch's; give 'cpu', 'cuda' or 'cuda:0'"),
    ({"device": "cuda:99"}, "device='cuda:99' isn't there: this machine's GPUs are"),
    ({"mesh": "pp"}, "mesh='pp': give one made by slipstream.make_mesh"),
    ({"memory": {"limit": 1}}, "give a slipstream.Memory"),
    ({"precision": "bf16"}, "give a slipstream.Precision"),
]

BATCHES: list[tuple[tuple[Any, Any], str]] = [
    ((TOKENS, TOKENS[:2]), "targets are (2, 32) int64, inputs (4, 32) int64: they must have one shape"),
    ((TOKENS, TOKENS[:, :16]), "targets are (4, 16) int64, inputs (4, 32) int64"),
    ((TOKENS.float(), TOKENS), "inputs are (4, 32) float32; expected token ids, (batch, sequence) int64"),
    ((TOKENS, TOKENS.float()), "targets are (4, 32) float32; expected token ids or -100, int64"),
    ((TOKENS[0], TOKENS[0]), "inputs are (32,) int64; expected token ids"),
    ((TOKENS[:1], TOKENS[:1]), "a batch of 1 sequences can't be cut into 2 microbatches"),
    ((TOKENS[:0], TOKENS[:0]), "the batch has no tokens: inputs are (0, 32)"),
    ((TOKENS + 290, TOKENS), "there is a token id 417, but the model has a vocabulary of 300"),
    ((TOKENS - 1, TOKENS), "there is a token id -1"),
    ((torch.cat([TOKENS] * 3, dim=1),) * 2, "the sequence has 96 tokens, but 'llama' has max_position_embeddings=64"),
    ((TOKENS[:, :1], TOKENS[:, :1]), "slices=2: a sequence of 1 tokens takes 1 to 1 slices"),
    ((TOKENS.numpy(), TOKENS), "inputs are of type ndarray: give a tensor"),
    ((TOKENS, None), "targets are missing: give step(inputs, targets)"),
]


def pipeline(**arguments: Any) -> Pipeline:
    given = {"num_microbatches": 2, "slices": 2, "runtime": Runtime(self_check=False), "device": "cpu"} | arguments
    return Pipeline.from_config(CONFIG, **given)


@pytest.fixture(scope="module")
def built() -> Pipeline:
    return pipeline()


@pytest.mark.parametrize(("arguments", "words"), ARGUMENTS, ids=[str(arguments) for arguments, _ in ARGUMENTS])
def test_an_argument(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(SlipstreamError) as refusal:
        pipeline(**arguments)
    assert words in str(refusal.value)


@pytest.mark.parametrize(("batch", "words"), BATCHES, ids=[words for _, words in BATCHES])
def test_a_batch(built: Pipeline, batch: tuple[Any, Any], words: str) -> None:
    with pytest.raises(SlipstreamError) as refusal:
        built.step(*batch)
    assert words in str(refusal.value)
    assert all(parameter.grad is None for parameter in built.parameters())  # nothing ran
