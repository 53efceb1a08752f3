"""A Pipeline's step next to the unsplit model's: on whole rows, on documents, and on sequences of different lengths."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream import Pipeline
from slipstream.model import causal_cross_entropy
from support.architectures import BOUND, gradient_error, gradients, labels_of, no_rounding_inside, tokens, unsplit_step
from support.options import grouped
from support.pipelines import in_usual_order, make_pipe


def exact_pipe(
    model: PreTrainedModel, inputs: Tensor, labels: Tensor | None = None, bound: float = BOUND, **settings: Any
) -> Pipeline:
    """Makes a pipeline of two ranks, whose step on these inputs has loss and gradients of the unsplit model."""
    whole, labels = copy.deepcopy(model), inputs if labels is None else labels
    with no_rounding_inside():
        expected = unsplit_step(whole, inputs, labels)
        pipe = make_pipe(model, **{"num_ranks": 2} | settings)
        loss = pipe.step(inputs, labels)
    assert abs(loss - expected) < bound * expected
    found, wanted = gradients(pipe), gradients(whole)
    assert found.keys() == wanted.keys()
    assert gradient_error(wanted, found) < bound
    return pipe


def exact_until_planned(
    pipe: Pipeline, inputs: Any, targets: Any, loss: Tensor, expected: dict[str, Tensor]
) -> list[int]:
    """Steps until all is planned, each of which has this loss and these gradients; returns the numbers of slices."""
    counts = []
    while pipe.is_tuning:
        for parameter in pipe.parameters():
            parameter.grad = None
        assert abs(pipe.step(inputs, targets) - loss) < BOUND
        assert gradient_error(expected, gradients(pipe)) < BOUND
        counts.append(len(pipe.last_step.slices))
    return counts


def step_error(model: PreTrainedModel, inputs: Tensor, **settings: Any) -> float:
    """The largest relative error of a step's gradients; the losses of the step and of an evaluation are asserted."""
    whole, labels = copy.deepcopy(model), labels_of(inputs)
    with no_rounding_inside():
        expected = unsplit_step(whole, inputs, labels)
        pipe = _pipe(model, settings)
        assert abs(pipe.step(inputs, labels) - expected) < BOUND * expected
        assert abs(pipe.evaluate(inputs, labels) - expected) < BOUND * expected
    return gradient_error(whole, pipe)


def documents_error(
    model: PreTrainedModel, inputs: Tensor, lengths: Sequence[tuple[int, ...]], **settings: Any
) -> float:
    """The error next to each document alone, where rows hold documents of these lengths."""
    whole = copy.deepcopy(model)
    with no_rounding_inside():
        steps_alone(whole, [part for row, cut in zip(inputs, lengths, strict=True) for part in row.split(cut)])
        pipe = _pipe(model, {"num_microbatches": 1, "self_check": False} | settings)
        pipe.step(inputs, inputs, document_ids=document_ids(*lengths))
    return gradient_error(whole, pipe)


def sequences_error(model: PreTrainedModel, lengths: Sequence[int], **settings: Any) -> float:
    """The error next to each sequence alone, given a list of sequences of these lengths."""
    rows = tokens(len(lengths), max(lengths))
    whole, sequences = copy.deepcopy(model), [row[:length] for row, length in zip(rows, lengths, strict=True)]
    with no_rounding_inside():
        steps_alone(whole, sequences)
        pipe = _pipe(model, {"self_check": False} | settings)
        pipe.step(sequences, sequences)
    return gradient_error(whole, pipe)


def document_ids(*lengths: tuple[int, ...]) -> Tensor:
    """The number of each token's document, given the documents' lengths in each row."""
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])


def _pipe(model: PreTrainedModel, settings: dict[str, Any]) -> Pipeline:
    return Pipeline(model, **grouped(**in_usual_order(**{"num_microbatches": 2, "num_ranks": 2} | settings)))


def steps_alone(model: PreTrainedModel, sequences: Sequence[Tensor]) -> None:
    """The gradients of the mean over the targets of all sequences, each run by itself."""
    count = sum(map(len, sequences)) - len(sequences)
    for each in sequences:
        logits = model(input_ids=each[None], use_cache=False).logits
        (causal_cross_entropy(logits[:, :-1], each[None, 1:])[0] / count).backward()
