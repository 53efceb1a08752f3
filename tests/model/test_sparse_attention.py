"""Queries see the keys that an indexer selects among all tokens before, with the gradients of the unsplit model."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from slipstream import Pipeline
from slipstream.model import causal_cross_entropy
from slipstream.model.toy import perturb_parameters
from support.architectures import (
    BOUND,
    gradient_error,
    labels_of,
    no_rounding_inside,
    tokens,
    unsplit_step,
)
from support.options import grouped
from support.parameters import first_of
from support.sparse import LENGTH, SPARSE

SLICES = [5, 1, 46, 44]


def unsplit(config: PretrainedConfig) -> PreTrainedModel:
    """The model in float64 with its own attention, under the name by which its own code selects keys."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    perturb_parameters(model)
    return model


def error_of(config: PretrainedConfig, **settings: Any) -> float:
    """The largest relative error of a step's gradients."""
    model, inputs = unsplit(config), tokens(length=LENGTH)
    whole = copy.deepcopy(model)
    with no_rounding_inside():
        expected = unsplit_step(whole, inputs, labels_of(inputs))
        pipe = Pipeline(model, **grouped(**{"slices": SLICES, "num_microbatches": 2, "num_ranks": 2, **settings}))
        loss = pipe.step(inputs, labels_of(inputs))
        assert abs(loss - expected) < BOUND * expected
        assert abs(pipe.evaluate(inputs, labels_of(inputs)) - expected) < BOUND * expected
    return gradient_error(whole, pipe)


@pytest.mark.parametrize("name", first_of(SPARSE, 2))
def test_gradients_are_those_of_the_unsplit_model(name: str) -> None:
    assert error_of(SPARSE[name]) < BOUND


def test_the_selection_matters_here() -> None:
    everything = copy.deepcopy(SPARSE["deepseek_v32"])
    everything.index_topk = LENGTH
    inputs, some, all_keys = tokens(length=LENGTH), unsplit(SPARSE["deepseek_v32"]), unsplit(everything)
    for each in (some, all_keys):
        unsplit_step(each, inputs, inputs)
    assert gradient_error(some, all_keys) > 1e-2


@pytest.mark.parametrize(
    "settings",
    first_of(
        [
            {"schedule": "zb-h1", "recompute": "selective", "num_ranks": 3, "partition": [1, 2, 1]},
            {"schedule": "interleaved-1f1b", "stages_per_rank": 2, "recompute": "full"},
            {"offload": 1.0, "recompute": 1},
            {"slices": 1},
        ]
    ),
)
@pytest.mark.parametrize("name", first_of(SPARSE))
def test_with_split_backwards_recomputation_and_offload(name: str, settings: dict[str, Any]) -> None:
    assert error_of(SPARSE[name], self_check=False, **settings) < BOUND


def test_documents_are_separate_sequences() -> None:
    model, inputs, cuts = unsplit(SPARSE["deepseek_v32"]), tokens(length=LENGTH), (0, 40, LENGTH)
    whole = copy.deepcopy(model)
    with no_rounding_inside():
        for a, b in pairwise(cuts):
            logits = whole(input_ids=inputs[:, a:b], use_cache=False).logits
            (causal_cross_entropy(logits[:, :-1], inputs[:, a + 1 : b])[0] / (2 * (LENGTH - 2))).backward()
        pipe = Pipeline(model, slices=SLICES, num_ranks=2)
        pipe.step(inputs, inputs, document_ids=torch.arange(LENGTH).ge(40).long().expand(2, -1))
    assert gradient_error(whole, pipe) < BOUND
