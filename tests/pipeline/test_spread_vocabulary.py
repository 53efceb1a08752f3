"""A head whose rows are spread over the ranks, tied or not, has the loss and the gradients of the whole one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CohereConfig, GraniteConfig, PhiConfig

from slipstream.schedule import SCHEDULES, make_schedule, spread_vocabulary
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    build,
    gradient_error,
    gradients,
    labels_of,
    llama,
    no_rounding_inside,
    tokens,
    unsplit_step,
)
from support.exact_steps import documents_error, exact_pipe, sequences_error
from support.parameters import each_once, first_of
from support.pipelines import make_pipe
from support.refusals import refused

LENGTH = 24
_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
PHI = PhiConfig(**_SMALL, vocab_size=97, max_position_embeddings=64, tie_word_embeddings=False)  # a head with a bias
UNTIED = ARCHITECTURES["llama"]


@pytest.fixture(autouse=True)
def exact_norms() -> Iterator[None]:
    with no_rounding_inside():
        yield


FIRST = [("1f1b", 2), ("zb-v", 2), ("interleaved-1f1b", 2)]
ORDERS = [(name, p) for name in SCHEDULES for p in (1, 2, 4) if p * SCHEDULES[name].stages_per_rank.start <= 4]
ORDERS.sort(key=lambda order: order not in FIRST)


@pytest.mark.parametrize(("name", "num_ranks", "model"), each_once(ORDERS, ["llama, tied", "llama"], len(FIRST)))
def test_every_named_schedule_takes_it(model: str, name: str, num_ranks: int) -> None:
    inputs, whole = tokens(batch=3, length=LENGTH), build(ARCHITECTURES[model])
    order = {"num_ranks": num_ranks, "stages_per_rank": SCHEDULES[name].stages_per_rank.start, "num_microbatches": 2}
    pipe = make_pipe(copy.deepcopy(whole), name, slices=[5, 4, 15], vocabulary="spread", **order)
    expected = unsplit_step(whole, inputs, labels_of(inputs))
    assert abs(pipe.step(inputs, labels_of(inputs)) - expected) < BOUND
    assert gradient_error(whole, pipe) < BOUND
    assert abs(pipe.evaluate(inputs, labels_of(inputs)) - expected) < BOUND


@pytest.mark.parametrize("model", first_of(["gpt2", "llama"]))
def test_documents_that_end_inside_slices(model: str) -> None:
    whole, inputs = build(ARCHITECTURES[model]), tokens(batch=2, length=LENGTH)
    assert documents_error(whole, inputs, [(7, 17), (24,)], slices=3, vocabulary="spread") < BOUND


@pytest.mark.parametrize(
    ("name", "schedule"), first_of([("gpt2", "zb-h1"), ("llama", "1f1b"), ("llama, tied", "1f1b")])
)
def test_sequences_of_different_lengths(name: str, schedule: str) -> None:
    """Packed under document masks, they have the gradients of each alone."""
    cut = {"schedule": schedule, "slices": 3, "vocabulary": "spread"}
    assert sequences_error(build(ARCHITECTURES[name]), [9, 24, 5, 17], **cut) < BOUND


def test_a_frozen_head_gets_no_gradient() -> None:
    model = build(PHI)
    model.lm_head.requires_grad_(requires_grad=False)
    pipe = exact_pipe(model, tokens(length=LENGTH), slices=3, vocabulary="spread")
    assert dict(pipe.named_parameters()).keys() - gradients(pipe).keys() == {"lm_head.weight", "lm_head.bias"}


def test_a_frozen_tied_matrix_gets_no_gradient() -> None:
    model = build(ARCHITECTURES["gemma3"])
    model.lm_head.weight.requires_grad_(requires_grad=False)
    exact_pipe(model, tokens(length=LENGTH), slices=3, vocabulary="spread")


@pytest.mark.parametrize("schedule", first_of(["zb-v", "1f1b"]))
def test_lookups_of_the_padding_id_leave_no_gradient(schedule: str) -> None:
    """The head does leave one in that row."""
    inputs = tokens(length=LENGTH)
    inputs[:, ::3] = 5
    cut = {"schedule": schedule, "slices": 3, "stages_per_rank": 2 if schedule == "zb-v" else 1}
    exact_pipe(build(llama(tie_word_embeddings=True, pad_token_id=5)), inputs, vocabulary="spread", **cut)


def test_a_tied_head_with_a_bias() -> None:
    config = PhiConfig(**_SMALL, vocab_size=97, max_position_embeddings=64, tie_word_embeddings=True)
    exact_pipe(build(config), tokens(length=LENGTH), slices=3, vocabulary="spread")


@pytest.mark.more
def test_dropout_after_the_embedding_is_that_of_a_whole_one() -> None:
    config = copy.deepcopy(ARCHITECTURES["gpt2"])
    config.embd_pdrop = 0.5
    losses = []
    for where in ("whole", "spread"):
        torch.manual_seed(7)
        pipe = make_pipe(build(config), slices=3, num_ranks=2, vocabulary=where)
        losses.append(pipe.step(tokens(length=LENGTH), tokens(length=LENGTH)))
    assert abs(losses[0] - losses[1]) < BOUND


WITHOUT_EMBEDDING = spread_vocabulary(make_schedule("1f1b", 2, 1, 2))


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (
            ARCHITECTURES["llama, tied"],
            {"schedule": WITHOUT_EMBEDDING},
            "has V's but no E's, which spread model.embed_tokens.weight, to which lm_head.weight is tied",
        ),
        (
            UNTIED,
            {"schedule": spread_vocabulary(make_schedule("1f1b", 2, 1, 2), embedding=True)},
            "has E's, which spread the embedding, but it isn't tied to the head",
        ),
        (
            CohereConfig(**_SMALL, vocab_size=97, tie_word_embeddings=False),
            {},
            "'cohere' changes what its head returns",
        ),
        (GraniteConfig(**_SMALL, vocab_size=97, logits_scaling=2.0), {}, "'granite' changes what its head returns"),
        (UNTIED, {"loss_fn": lambda outputs, targets: (outputs.sum(), 1)}, "with loss_fn=...: no rank has all logits"),
        (UNTIED, {"shard": "parameters"}, "with parallel.shard='parameters'"),
        (UNTIED, {"schedule": "auto"}, "with schedule='auto'"),
        (UNTIED, {"slices": "auto"}, "or slices='auto'"),
        (UNTIED, {"vocabulary": "half"}, "vocabulary='half': give one of auto, whole, spread"),
        (
            UNTIED,
            {"vocabulary": "whole", "schedule": WITHOUT_EMBEDDING},
            "vocabulary='whole', but the schedule '1f1b' has V's",
        ),
        (nn.Sequential(nn.Linear(3, 3)), {"num_ranks": 1}, "an nn.Sequential has no head that is known"),
    ],
)
def test_what_cannot_be_is_refused_by_name(config: Any, options: dict[str, Any], words: str) -> None:
    with refused(words):
        make_pipe(config, **{"vocabulary": "spread", "num_ranks": 2} | options)
