"""Rope of type dynamic and longrope has the frequencies of the length that the unsplit model sees: a list's of each
sequence alone, a batch's of all its rows and their padding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from slipstream import Pipeline
from slipstream.model import causal_cross_entropy
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
from support.forked import launch
from support.options import grouped
from support.parameters import each_once, first_of
from support.paths import WORKERS
from support.pipelines import make_pipe
from support.ragged_batches import batch_of

NAMES = ["llama, dynamic rope", "phi3, longrope"]  # which change beyond 24 tokens
MODELS = {name: build(ARCHITECTURES[name]) for name in NAMES}
LENGTHS = [30, 12, 40, 24, 25]


def pipeline(name: str, **options: Any) -> Pipeline:
    given = {"num_ranks": 2, "slices": 3, "self_check": False, "schedule": "1f1b", **options}
    return Pipeline(copy.deepcopy(MODELS[name]), **grouped(**given))


def alone(
    name: str, inputs: list[Tensor], labels: list[Tensor], documents: list[list[int]] | None = None
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of an unsplit model for each sequence, as the mean over all labels. Of documents, each is run
    by a model that has seen the longest of its sequence."""
    count = total = 0.0
    found: dict[str, Tensor] = {}
    for row, (ids, label) in enumerate(zip(inputs, labels, strict=True)):
        whole, cuts = copy.deepcopy(MODELS[name]), [len(ids)] if documents is None else documents[row]
        with no_rounding_inside():
            for part, targets in zip(ids.split(cuts), label.split(cuts), strict=True):
                positions = torch.arange(len(part))
                if len(part) < max(cuts):  # another token, which no other sees, says how long the sequence is
                    part, positions = (torch.cat([each, torch.tensor([max(cuts) - 1])]) for each in (part, positions))
                logits = whole(input_ids=part[None], position_ids=positions[None], use_cache=False).logits
                loss, number = causal_cross_entropy(logits[:, : len(targets) - 1], targets[None, 1:])
                loss.backward()
                total, count = total + float(loss.detach()), count + int(number)
        for key, gradient in gradients(whole).items():
            found[key] = found.get(key, 0) + gradient
    return total / count, {key: each / count for key, each in found.items()}


def together(whole: Any, batch: Any) -> tuple[float, dict[str, Tensor]]:
    whole.zero_grad()
    with no_rounding_inside():
        loss = whole(**batch, use_cache=False).loss
        loss.backward()
    return float(loss.detach()), gradients(whole)


def check(pipe: Pipeline, expected: tuple[float, dict[str, Tensor]], *batch: Any, **more: Any) -> None:
    for parameter in pipe.parameters():
        parameter.grad = None
    with no_rounding_inside():
        assert float(pipe.evaluate(*batch, **more)) == pytest.approx(expected[0], rel=BOUND)
        assert float(pipe.step(*batch, **more)) == pytest.approx(expected[0], rel=BOUND)
    assert gradient_error(expected[1], gradients(pipe)) < BOUND


def padded(lengths: list[int], width: int) -> dict[str, Tensor]:
    inputs, labels = batch_of([*lengths, width])
    rows = (pad_sequence(each, batch_first=True)[:-1] for each in (inputs, [torch.ones_like(each) for each in inputs]))
    targets = pad_sequence(labels, batch_first=True, padding_value=-100)[:-1]
    return dict(zip(("input_ids", "attention_mask", "labels"), (*rows, targets), strict=True))


@pytest.mark.parametrize(("name", "num_microbatches"), each_once(NAMES, [1, 3], 1))
def test_each_sequence_of_a_list_is_alone(name: str, num_microbatches: int) -> None:
    inputs, labels = batch_of(LENGTHS)
    check(pipeline(name, num_microbatches=num_microbatches), alone(name, inputs, labels), inputs, labels)


@pytest.mark.parametrize("name", first_of(NAMES))
def test_rows_padded_by_lengths_are_alone(name: str) -> None:
    inputs, labels = batch_of(LENGTHS)
    rows = pad_sequence(inputs, batch_first=True), pad_sequence(labels, batch_first=True)
    check(pipeline(name), alone(name, inputs, labels), *rows, lengths=LENGTHS)


@pytest.mark.parametrize("name", first_of(NAMES))
def test_a_sequence_of_documents_has_the_frequencies_of_its_longest(name: str) -> None:
    inputs, labels = batch_of([40, 36])
    cuts = [[10, 30], [12, 24]]
    ids = [torch.arange(2).repeat_interleave(torch.tensor(each)) for each in cuts]
    check(pipeline(name), alone(name, inputs, labels, cuts), inputs, labels, document_ids=ids)


def documents_of(cuts: list[list[int]]) -> tuple[dict[str, Tensor], Tensor]:
    """A batch for the unsplit model, which finds documents by their positions, and the documents' numbers."""
    ids = tokens(batch=len(cuts), length=sum(cuts[0]))
    positions = torch.stack([torch.cat([*map(torch.arange, each)]) for each in cuts])
    labels = labels_of(ids).masked_fill(positions == 0, -100)
    numbers = torch.stack([torch.arange(len(each)).repeat_interleave(torch.tensor(each)) for each in cuts])
    return {"input_ids": ids, "position_ids": positions, "labels": labels}, numbers


@pytest.mark.parametrize(("num_microbatches", "name"), each_once([2, 1], NAMES, 1))
def test_rows_of_documents_have_the_frequencies_of_the_longest_of_all(name: str, num_microbatches: int) -> None:
    """One row has short ones alone; the second batch only these, after longer ones."""
    pipe, whole = pipeline(name, num_microbatches=num_microbatches), copy.deepcopy(MODELS[name])
    for cuts in ([[10, 30], [22, 18]], [[10, 12, 10], [20, 8, 4]]):
        batch, numbers = documents_of(cuts)
        expected = together(whole, batch)
        check(pipe, expected, batch["input_ids"], batch["labels"], document_ids=numbers)


@pytest.mark.parametrize(("name", "positions"), each_once(NAMES, ["none", "counted", "beyond the padding"], 2))
def test_a_padded_batch_counts_its_padding(name: str, positions: str) -> None:
    """All its rows would have other frequencies without it."""
    batch = padded([20, 13], width=22 if positions == "beyond the padding" else 32)
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
        check(pipe, alone(name, inputs, labels), inputs, labels)


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


@pytest.mark.parametrize(
    ("case", "name"),
    each_once(["rows", "padded", "lists", "documents", "document lists", "documents and positions"], NAMES, count=2),
)
def test_replicas_have_what_one_device_would(case: str, name: str) -> None:
    ended = launch(2, WORKERS / "pipeline/length_dependent_rope.py", name, case)
    assert ended.returncode == 0, ended.stderr[-3000:]
