"""What layers take besides hidden states crosses the cuts between stages, with the gradients of the unsplit model."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from slipstream import Memory, Pipeline, SlipstreamError
from slipstream.model import causal_cross_entropy
from slipstream.model.hooks.crossing_tensors import find_layer_tensors
from slipstream.model.toy import perturb_parameters, shapes_model
from support.architectures import (
    BOUND,
    build,
    gradient_error,
    labels_of,
    llama,
    no_rounding_inside,
    tokens,
    unsplit_step,
)
from support.crossing import CROSSING, LENGTH
from support.options import grouped
from support.parameters import first_of

SLICES = [5, 1, 30, 28]


def unsplit(name: str) -> PreTrainedModel:
    model = build(CROSSING[name])
    perturb_parameters(model)
    return model


def error_of(name: str, **settings: Any) -> float:
    """The largest relative error of a step's gradients."""
    model = unsplit(name)
    whole, inputs = copy.deepcopy(model), tokens(length=LENGTH)
    with no_rounding_inside():
        expected = unsplit_step(whole, inputs, labels_of(inputs))
        pipe = Pipeline(model, **grouped(**{"slices": SLICES, "num_microbatches": 2, "num_ranks": 2, **settings}))
        loss = pipe.step(inputs, labels_of(inputs))
        assert abs(loss - expected) < BOUND * expected
        assert abs(pipe.evaluate(inputs, labels_of(inputs)) - expected) < BOUND * expected
    return gradient_error(whole, pipe)


def test_where_nothing_crosses_one_run_goes_beyond_the_first_layer() -> None:
    """A run of a deep model takes seconds, though nothing is computed."""
    model = shapes_model(llama())
    layers = list(model.model.layers)
    entered: list[int] = []
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, number=number: entered.append(number))
    found = find_layer_tensors(model, layers)
    assert (found.hidden.row_dim, found.hidden.token_dim, found.crossing) == (0, 1, ())
    assert entered == [*range(len(layers)), 0]


@pytest.mark.parametrize("name", first_of(CROSSING, 3))
def test_gradients_are_those_of_the_unsplit_model(name: str) -> None:
    assert error_of(name) < BOUND


@pytest.mark.parametrize(
    "settings",
    first_of(
        [
            {"schedule": "zb-h1", "recompute": "selective", "num_ranks": 3, "partition": [1, 3, 2]},
            {"schedule": "interleaved-1f1b", "stages_per_rank": 2, "recompute": "full"},
            {"offload": 1.0, "recompute": 1},
            {"num_ranks": 4, "partition": [0, 4, 2, 0]},  # what crosses passes a stage that reads none of it
            {"slices": 1},
        ]
    ),
)
@pytest.mark.parametrize("name", first_of(["gemma3n_text", "gemma4_text"]))
def test_wherever_it_is_cut(name: str, settings: dict[str, Any]) -> None:
    assert error_of(name, self_check=False, **settings) < BOUND


@pytest.mark.more
def test_documents_are_separate_sequences() -> None:
    model, inputs, cuts = unsplit("gemma3n_text"), tokens(length=LENGTH), (0, 22, LENGTH)
    whole = copy.deepcopy(model)
    with no_rounding_inside():
        for a, b in pairwise(cuts):
            logits = whole(input_ids=inputs[:, a:b], use_cache=False).logits
            (causal_cross_entropy(logits[:, :-1], inputs[:, a + 1 : b])[0] / (2 * (LENGTH - 2))).backward()
        pipe = Pipeline(model, slices=SLICES, num_ranks=2, partition=[2, 4])
        ids = torch.arange(LENGTH).ge(22).long().expand(2, -1)
        pipe.step(inputs, inputs, document_ids=ids)
    assert gradient_error(whole, pipe) < BOUND


@pytest.mark.more
def test_what_is_not_counted_or_cut_is_refused() -> None:
    pipe = Pipeline(unsplit("gemma4_text"), slices=4, num_ranks=2, memory=Memory(limit=1e9))
    inputs = tokens(length=LENGTH)
    with pytest.raises(SlipstreamError, match=r"take more than hidden states.*give no memory\.limit"):
        pipe.step(inputs, inputs)
    with pytest.raises(SlipstreamError, match="can't be cut inside layers: they take more than hidden states"):
        Pipeline(unsplit("gemma4_text"), slices=4, num_ranks=2, partition=[2.5, 3.5])
