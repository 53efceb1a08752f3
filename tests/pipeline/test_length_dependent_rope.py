"""Rope of type dynamic and longrope has the frequencies of the length that the unsplit model sees: a list's of each
sequence alone, a batch's of all its rows and their padding."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import Pipeline
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    build,
    gradient_error,
    gradients,
    labels_of,
    no_rounding_inside,
    tokens,
)
from support.exact_steps import document_ids
from support.parameters import each_once, first_of
from support.pipelines import make_pipe
from support.ragged_batches import alone, batch_of, padded_batch, together

NAMES = ["llama, dynamic rope", "phi3, longrope"]  # which change beyond 24 tokens
MODELS = {name: build(ARCHITECTURES[name]) for name in NAMES}
LENGTHS = [30, 12, 40, 24, 25]


@pytest.fixture(autouse=True)
def exact_norms() -> Iterator[None]:
    with no_rounding_inside():
        yield


def pipeline(name: str, **options: Any) -> Pipeline:
    return make_pipe(copy.deepcopy(MODELS[name]), **{"num_ranks": 2, "slices": 3, **options})


def check(pipe: Pipeline, expected: tuple[Tensor, dict[str, Tensor]], *batch: Any, **more: Any) -> None:
    for parameter in pipe.parameters():
        parameter.grad = None
    assert float(pipe.evaluate(*batch, **more)) == pytest.approx(float(expected[0]), rel=BOUND)
    assert float(pipe.step(*batch, **more)) == pytest.approx(float(expected[0]), rel=BOUND)
    assert gradient_error(expected[1], gradients(pipe)) < BOUND


@pytest.mark.parametrize(("name", "num_microbatches"), each_once(NAMES, [1, 3], 1))
def test_each_sequence_of_a_list_is_alone(name: str, num_microbatches: int) -> None:
    inputs, labels = batch_of(LENGTHS)
    check(pipeline(name, num_microbatches=num_microbatches), alone(MODELS[name], inputs, labels), inputs, labels)


@pytest.mark.parametrize("name", first_of(NAMES))
def test_rows_padded_by_lengths_are_alone(name: str) -> None:
    inputs, labels = batch_of(LENGTHS)
    rows = padded_batch(inputs, labels)
    expected = alone(MODELS[name], inputs, labels)
    check(pipeline(name), expected, rows["input_ids"], rows["labels"], lengths=LENGTHS)


@pytest.mark.parametrize("name", first_of(NAMES))
def test_a_sequence_of_documents_has_the_frequencies_of_its_longest(name: str) -> None:
    inputs, labels = batch_of([40, 36])
    cuts = [[10, 30], [12, 24]]
    ids = [torch.arange(2).repeat_interleave(torch.tensor(each)) for each in cuts]
    check(pipeline(name), alone(MODELS[name], inputs, labels, cuts), inputs, labels, document_ids=ids)


@pytest.mark.parametrize(("num_microbatches", "name"), each_once([2, 1], NAMES, 1))
def test_rows_of_documents_have_the_frequencies_of_the_longest_of_all(name: str, num_microbatches: int) -> None:
    """One row has short ones alone; the second batch only these, after longer ones. The unsplit model finds documents
    by their positions."""
    pipe, whole = pipeline(name, num_microbatches=num_microbatches), copy.deepcopy(MODELS[name])
    for cuts in ([(10, 30), (22, 18)], [(10, 12, 10), (20, 8, 4)]):
        ids = tokens(batch=len(cuts), length=sum(cuts[0]))
        positions = torch.stack([torch.cat([*map(torch.arange, each)]) for each in cuts])
        labels = labels_of(ids).masked_fill(positions == 0, -100)
        expected = together(whole, {"input_ids": ids, "position_ids": positions, "labels": labels})
        check(pipe, expected, ids, labels, document_ids=document_ids(*cuts))


@pytest.mark.parametrize(("name", "positions"), each_once(NAMES, ["none", "counted", "beyond the padding"], 2))
def test_a_padded_batch_counts_its_padding(name: str, positions: str) -> None:
    """All its rows would have other frequencies without it."""
    batch = padded_batch(*batch_of([20, 13]), width=22 if positions == "beyond the padding" else 32)
    if positions != "none":
        batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).repeat(2, 1)
    if positions == "beyond the padding":
        batch["position_ids"][1, 13:] = 45
    check(pipeline(name, num_microbatches=2), together(copy.deepcopy(MODELS[name]), batch), batch)


@pytest.mark.parametrize("name", first_of(NAMES, 0))
def test_frequencies_follow_the_batches_of_a_training(name: str) -> None:
    """Type dynamic keeps those of the longest batch: sequences that are alone, rehearsals and the search for what
    carries states change nothing."""
    pipe, whole = pipeline(name, memory_limit=1e9, schedule="gpipe", slices=2), copy.deepcopy(MODELS[name])
    for length, lone in ((36, [40]), (26, [48])):
        ids = tokens(batch=2, length=length)
        check(pipe, together(whole, {"input_ids": ids, "labels": labels_of(ids)}), ids, labels_of(ids))
        inputs, labels = batch_of(lone)
        check(pipe, alone(MODELS[name], inputs, labels), inputs, labels)


def test_a_rotary_forward_of_the_users_own_runs() -> None:
    def of_half(module: Any) -> Any:
        forward = module.forward
        return lambda x, position_ids: tuple(each / 2 for each in forward(x, position_ids))

    models = [copy.deepcopy(MODELS["llama, dynamic rope"]) for _ in range(2)]
    for model in models:
        model.model.rotary_emb.forward = of_half(model.model.rotary_emb)
    ids = tokens(batch=2, length=30)
    pipe = make_pipe(models[0], num_ranks=1, slices=[20, 10])
    check(pipe, together(models[1], {"input_ids": ids, "labels": ids}), ids, ids)
