"""Losses of whole sequences, such as those of preferences: the gradients of the unsplit model, however it is cut."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from slipstream import Pipeline, SequenceLoss
from slipstream.errors import SlipstreamError
from support.architectures import ARCHITECTURES, BOUND, build, gradient_error, no_rounding_inside, tokens
from support.examples import examples
from support.parameters import first_of
from support.pipelines import make_pipe
from support.preferences import log_probabilities, preference, references

PAIRS = 2


def answers(num_rows: int = 4, length: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, labels of which those of a prompt and of padding don't count, and a reference's log-probabilities."""
    inputs = tokens(num_rows, length)
    labels = inputs.clone()
    for row in range(num_rows):
        labels[row, : 3 + row] = -100
        labels[row, length - 5 * (row % 3) :] = -100
    return inputs, labels, references(num_rows)


def unsplit_loss(model: PreTrainedModel, inputs: Tensor, labels: Tensor, reference: Tensor) -> float:
    with no_rounding_inside():
        loss = preference(log_probabilities(model, inputs, labels), reference).mean()
        loss.backward()
    return loss.item()


def pipeline(model: PreTrainedModel, **options: Any) -> Pipeline:
    return make_pipe(model, **{"num_ranks": 2, "loss_fn": SequenceLoss(preference, PAIRS)} | options)


def check(name: str, **options: Any) -> None:
    model = build(ARCHITECTURES[name])
    whole = copy.deepcopy(model)
    loss = unsplit_loss(whole, *answers())
    inputs, labels, reference = answers()
    pipe = pipeline(model, **options)
    with no_rounding_inside():
        evaluated = pipe.evaluate(inputs, labels, sequence_values=reference).item()
        expected = log_probabilities(whole, inputs, labels)
        torch.testing.assert_close(pipe.sequence_log_probabilities(), expected, rtol=BOUND, atol=0)
        stepped = pipe.step(inputs, labels, sequence_values=reference, loss_scale=1024.0).item()
    assert math.isclose(evaluated, loss, rel_tol=BOUND)
    assert math.isclose(stepped, loss, rel_tol=BOUND)
    assert gradient_error(whole, pipe) < BOUND


@pytest.mark.parametrize(
    "options",
    first_of(
        [
            {"slices": [7, 1, 32]},
            {"slices": 2, "num_microbatches": 2, "schedule": "interleaved-1f1b", "stages_per_rank": 2, "offload": 0.5},
            {"microbatches": [[2, [5, 35]], [2, [20, 19, 1]]]},
            {"slices": 3, "num_microbatches": 2, "recompute": "full"},
            {"slices": 3, "num_microbatches": 2, "schedule": "gpipe", "recompute": "selective"},
            {"slices": 3, "num_microbatches": 2, "schedule": "zb-h1"},
            {"slices": 4, "num_microbatches": 2, "schedule": "zb-v", "stages_per_rank": 2},
            {"slices": 1, "num_ranks": 1},
        ],
        3,
    ),
    ids=str,
)
def test_preferences_of_pairs(options: dict[str, Any]) -> None:
    check("llama", **options)


@pytest.mark.parametrize("name", first_of(["llama, tied", "mistral, window of 7"]))
def test_a_tied_head_and_windows(name: str) -> None:
    check(name, slices=[9, 31])


@pytest.mark.more
@examples(50)
@given(st.lists(st.tuples(st.integers(2, 40), st.integers(2, 40)), min_size=1, max_size=4), st.integers(1, 5))
def test_pairs_of_different_lengths(lengths: list[tuple[int, int]], slices: int) -> None:
    model = build(ARCHITECTURES["llama"])
    whole = copy.deepcopy(model)
    sequences = [row[:length] for row, length in zip(tokens(2 * len(lengths), 40), sum(lengths, ()), strict=True)]
    reference = references(len(sequences))
    with no_rounding_inside():
        found = [log_probabilities(whole, each[None], each[None]) for each in sequences]
        loss = preference(torch.cat(found), reference).mean()
        loss.backward()
        pipe = pipeline(model, slices=slices, num_microbatches=min(2, len(lengths)))
        own = pipe.step(sequences, sequences, sequence_values=reference)
        torch.testing.assert_close(pipe.sequence_log_probabilities(), torch.cat(found), rtol=BOUND, atol=0)
    assert math.isclose(own.item(), loss.item(), rel_tol=BOUND)
    assert gradient_error(whole, pipe) < BOUND


def test_a_loss_of_single_sequences_without_values() -> None:
    """Cross-entropy by sequences: each one's mean, whatever its length."""
    model = build(ARCHITECTURES["llama"])
    inputs, labels, _ = answers()
    expected = -log_probabilities(model, inputs, labels).square().mean().item()
    pipe = pipeline(model, slices=3, num_microbatches=3, loss_fn=SequenceLoss(lambda found: -found.square()))
    assert math.isclose(pipe.step(inputs, labels).item(), expected, rel_tol=BOUND)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_rows": 3}, r"a batch of 3 sequences with SequenceLoss\(group_size=2\): give a multiple"),
        ({"num_rows": 6, "num_microbatches": 2}, r"microbatches of \[3, 3\] rows.*multiple of 4 rows"),
        ({"values": torch.ones(3)}, r"sequence_values are \(3,\) for 4 sequences"),
        ({"labels": -100}, r"targets\[0\] has no label that counts"),
        ({"document_ids": torch.zeros(4, 40, dtype=torch.int64)}, "document_ids or position_ids with a SequenceLoss"),
        ({"function": lambda found, values: found}, r"returned \(4,\) for 4 sequences; expected \(2,\)"),
        ({"function": lambda found, values: found.detach()[::2]}, "losses without a gradient"),
    ],
)
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    inputs, labels, reference = answers(given.get("num_rows", 4))
    function = given.get("function", preference)
    settings = {"loss_fn": SequenceLoss(function, PAIRS), "num_microbatches": given.get("num_microbatches", 1)}
    pipe = pipeline(build(ARCHITECTURES["llama"]), slices=3, **settings)
    if "labels" in given:
        labels[0] = given["labels"]
    with pytest.raises(SlipstreamError, match=message):
        pipe.step(
            inputs, labels, document_ids=given.get("document_ids"), sequence_values=given.get("values", reference)
        )


def test_arguments_that_are_refused() -> None:
    model = build(ARCHITECTURES["llama"])
    inputs, labels, reference = answers()
    with pytest.raises(SlipstreamError, match="sequence_values without a SequenceLoss"):
        make_pipe(model, slices=3).step(inputs, labels, sequence_values=reference)
    for loss_fn in (None, SequenceLoss(preference, PAIRS)):
        with pytest.raises(SlipstreamError, match="no log-probabilities of sequences are known"):
            make_pipe(model, slices=3, loss_fn=loss_fn).sequence_log_probabilities()
    with pytest.raises(SlipstreamError, match=r"router_loss='per_layer' with a SequenceLoss"):
        pipeline(build(ARCHITECTURES["mixtral"]), router_loss="per_layer")
    with pytest.raises(SlipstreamError, match=r"SequenceLoss\(group_size=0\)"):
        SequenceLoss(preference, 0)
    with pytest.raises(SlipstreamError, match=r"SequenceLoss\('dpo'\): give a function"):
        SequenceLoss("dpo")  # type: ignore[arg-type]
    with pytest.raises(SlipstreamError, match="a loss of token sequences, for causal LMs"):
        Pipeline(torch.nn.Sequential(torch.nn.Linear(2, 2)), loss_fn=SequenceLoss(preference))
