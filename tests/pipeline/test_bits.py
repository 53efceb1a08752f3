"""For given microbatches and slices, losses and gradients are the same to the bit on any ranks and in any order."""

from __future__ import annotations

import copy
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from slipstream.schedule import SCHEDULES
from support.architectures import VOCABULARY, gradients, labels_of, llama, tokens
from support.parameters import each_once, first_of
from support.pipelines import make_pipe

CONFIGS = {
    "llama, tied": llama(tie_word_embeddings=True, num_hidden_layers=4),
    "gpt2, dropout": GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=4, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
    ),
}
SLICES, NUM_MICROBATCHES = [24, 40], 4


def step(config_name: str, schedule: str, **settings: object) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a step and its gradients."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[config_name]))
    settings = {"slices": SLICES} | settings
    pipe = make_pipe(model, schedule=schedule, num_microbatches=NUM_MICROBATCHES, **settings)
    inputs = tokens(batch=6)
    return pipe.step(inputs, labels_of(inputs)), gradients(pipe)


@cache
def alone(config_name: str, schedule: str) -> tuple[Tensor, dict[str, Tensor]]:
    """On one stage. Breadth-first goes back through the microbatches from the last, all others from the first."""
    return step(config_name, schedule if schedule == "breadth-first" else "gpipe")


def orders(num_stages: int) -> list[tuple[str, int, int]]:
    """Each schedule on as many ranks as have so many stages."""
    return [
        (name, num_stages // v, v)
        for name in SCHEDULES
        for v in (2, 1)
        if v in SCHEDULES[name].stages_per_rank and v <= num_stages
    ]


MOST, FEWER = orders(4), [*orders(2), *orders(1)]


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "stages_per_rank", "config_name"),
    [
        *each_once(MOST, CONFIGS, len(MOST) // 2),
        *first_of([(*order, name) for order, name in product(FEWER, CONFIGS)], 0, "grid"),
    ],
)
def test_nothing_depends_on_stages_and_schedule(
    config_name: str, schedule: str, num_ranks: int, stages_per_rank: int
) -> None:
    loss, expected = alone(config_name, schedule)
    found_loss, found = step(config_name, schedule, num_ranks=num_ranks, stages_per_rank=stages_per_rank)
    assert torch.equal(loss, found_loss)
    assert found.keys() == expected.keys()
    assert [name for name, gradient in expected.items() if not torch.equal(gradient, found[name])] == []
