"""Noise on embeddings (NEFTune) is the same for every slicing and split; gradients are those of the unsplit model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream import Memory, Pipeline, Runtime
from slipstream.errors import SlipstreamError
from slipstream.keyed_draws import keyed_seed
from slipstream.model.causal_lm_stage import _drawn
from slipstream.model.hooks.token_slice import TokenSlice
from slipstream.train.config.config_values import parse_config
from support.architectures import BOUND, gradient_error, gradients, no_rounding_inside
from support.tiny_training import tiny_llama

ALPHA, LENGTH = 7.0, 80
SHAPE = tiny_llama(
    hidden_size=16, intermediate_size=32, vocab_size=61, max_position_embeddings=96, initializer_range=0.2
)
TOKENS = torch.randint(1, 61, (4, LENGTH), generator=torch.Generator().manual_seed(2))


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)).double()


def noisy(**options: Any) -> Pipeline:
    order = {"num_ranks": 2, "slices": 4, "num_microbatches": 2, "runtime": Runtime(self_check=False), **options}
    pipe = Pipeline(llama(), **order)
    pipe.add_embedding_noise(ALPHA, LENGTH)
    return pipe


def noise_of(pipe: Pipeline, microbatch: int, rows: int, width: int) -> Tensor:
    """The noise that the next step adds to a microbatch, as if it were one slice."""
    ids = torch.zeros(rows, LENGTH, dtype=torch.long)
    step = keyed_seed(*pipe.random_state, 0)
    whole = TokenSlice(ids, ids, None, 0, LENGTH, LENGTH, microbatch=microbatch, seed=step)
    return _drawn(whole, torch.empty(rows, LENGTH, width, dtype=torch.float64), ALPHA / math.sqrt(LENGTH * width))


@pytest.mark.parametrize(
    "order",
    [
        {},
        {"slices": [33, 31, 7, 9]},
        {"slices": 1},
        {"num_ranks": 1, "slices": [1, 62, 17]},
        {"schedule": "zb-h1", "slices": [64, 16]},
        {"schedule": "interleaved-1f1b", "stages_per_rank": 2, "slices": 5},
    ],
    ids=str,
)
def test_a_step_is_that_of_the_unsplit_model_with_the_noise(order: dict[str, Any]) -> None:
    pipe, model = noisy(**order), llama().train()
    embedding = model.get_input_embeddings()
    noise = torch.cat([noise_of(pipe, m, 2, embedding.embedding_dim) for m in range(2)])
    handle = embedding.register_forward_hook(lambda _module, _given, found: found + noise)
    with no_rounding_inside():
        loss = model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
        loss.backward()
        found = pipe.step(TOKENS, TOKENS)
    handle.remove()
    assert float(found) == pytest.approx(loss.item(), rel=BOUND)
    assert gradient_error(gradients(model), gradients(pipe)) < BOUND


def test_recomputation_has_the_same_noise() -> None:
    with no_rounding_inside():
        plain, recomputed = noisy(), noisy(memory=Memory(recompute="full"), slices=[50, 30])
        assert float(plain.step(TOKENS, TOKENS)) == pytest.approx(float(recomputed.step(TOKENS, TOKENS)), rel=BOUND)
    assert gradient_error(gradients(plain), gradients(recomputed)) < BOUND


def test_every_step_and_microbatch_has_another_noise_within_the_bound() -> None:
    pipe = noisy()
    width = SHAPE["hidden_size"]
    first = noise_of(pipe, 0, 2, width)
    bound = ALPHA / math.sqrt(LENGTH * width)
    assert 0.98 * bound < first.abs().max() <= bound
    assert abs(first.mean()) < 0.05 * bound
    assert not torch.equal(first, noise_of(pipe, 1, 2, width))
    pipe.step(TOKENS, TOKENS)
    assert not torch.equal(first, noise_of(pipe, 0, 2, width))


def test_an_evaluation_has_none() -> None:
    pipe = noisy()
    with no_rounding_inside(), torch.no_grad():
        expected = llama()(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
        assert float(pipe.evaluate(TOKENS, TOKENS)) == pytest.approx(float(expected), rel=BOUND)


def test_an_embedding_that_ranks_share_is_refused() -> None:
    with pytest.raises(SlipstreamError, match="a tied one in a vocabulary that is spread"):
        noisy(vocabulary="spread")
    given = {"model": {"config": tiny_llama()}, "data": {"files": ["x"]}}
    training = {"output": "x", "steps": 1, "seq_len": 8, "neftune_alpha": 5}
    for section, words in (
        ({"parallel": {"tensor": 2}}, "parallel.tensor=2"),
        ({"pipeline": {"vocabulary": "spread", "slices": 1}}, "spread"),
    ):
        with pytest.raises(SlipstreamError, match=f"training.neftune_alpha with .*{words}"):
            parse_config({**given, "training": training, **section})
