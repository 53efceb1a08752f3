"""Logits and log-probabilities of a batch are those of the unsplit model, however it is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream import Pipeline, SequenceLoss, SlipstreamError
from support.architectures import ARCHITECTURES, BOUND, build, labels_of, no_rounding_inside, tokens
from support.examples import examples
from support.pipelines import make_pipe
from support.preferences import log_probabilities, preference, references
from support.ragged_batches import MODELS, ORDERS, batch_of, padded_batch


def pipeline(name: str = "llama, tied", **options: Any) -> Pipeline:
    config = ARCHITECTURES[name]
    return make_pipe(build(config), **{"num_ranks": 2, "slices": 3, **options})


@torch.no_grad()
def unsplit(name: str, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and of each label that counts its log-probability given what is before it."""
    with no_rounding_inside():
        logits = MODELS[name](input_ids=inputs, use_cache=False).logits
    each = logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    found = torch.zeros(labels.shape, dtype=torch.float64)
    found[:, 1:] = each.masked_fill(labels[:, 1:] == -100, 0)
    return logits, found


def close(found: Any, expected: Tensor) -> bool:
    return found.shape == expected.shape and float((found - expected).abs().max()) < BOUND


@examples(8, thin=3)
@given(st.data())
def test_rows_and_sequences_are_those_of_the_unsplit_model(data: st.DataObject) -> None:
    name, (schedule, v) = data.draw(st.sampled_from(sorted(MODELS))), data.draw(st.sampled_from(ORDERS))
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=3, max_size=6))
    pipe = pipeline(
        name,
        schedule=schedule,
        stages_per_rank=v,
        num_ranks=data.draw(st.integers(1, 2)),
        num_microbatches=data.draw(st.integers(1, 3)),
        recompute=data.draw(st.sampled_from(["none", "full"])),
    )
    inputs, labels = batch_of(lengths)
    with no_rounding_inside():
        of_rows = pipe.logits(tokens(3, 20)), pipe.log_probabilities(tokens(3, 20), labels_of(tokens(3, 20)))
        logits, found = pipe.logits(inputs), pipe.log_probabilities(inputs, labels)
    assert all(map(close, of_rows, unsplit(name, tokens(3, 20), labels_of(tokens(3, 20)))))
    assert isinstance(logits, list)
    assert isinstance(found, list)
    for row, both in enumerate(zip(inputs, labels, strict=True)):
        expected = unsplit(name, *(each[None] for each in both))
        assert close(logits[row], expected[0][0])
        assert close(found[row], expected[1][0])


def test_microbatches_of_their_own_rows_and_slices() -> None:
    inputs = tokens(3, 40)
    pipe = pipeline(microbatches=[[2, [5, 35]], [1, [20, 19, 1]]], slices=None)
    with no_rounding_inside():
        found = pipe.logits(inputs), pipe.log_probabilities(inputs, inputs)
    assert all(map(close, found, unsplit("llama, tied", inputs, inputs)))


def test_padded_rows_have_zeros_at_padding() -> None:
    batch = padded_batch(*batch_of([30, 12]))
    padded, mask, targets = batch["input_ids"], batch["attention_mask"], batch["labels"]
    expected = [each * mask.view(2, 30, *[1] * (each.dim() - 2)) for each in unsplit("llama, tied", padded, targets)]
    pipe = pipeline()
    with no_rounding_inside():
        assert close(pipe.logits(batch), expected[0])
        assert close(pipe.log_probabilities(batch), expected[1])
        assert close(pipe.log_probabilities(padded, targets, lengths=[30, 12]), expected[1])
        del batch["labels"]
        assert close(pipe.logits(batch), expected[0])


def test_documents_end_what_tokens_say_of_the_next() -> None:
    """The mean over the labels that count is the loss."""
    inputs = tokens()
    documents = (torch.arange(64) // 25).repeat(2, 1)
    pipe = pipeline("mistral, window of 7")
    with no_rounding_inside():
        found = pipe.log_probabilities(inputs, inputs, document_ids=documents)
        loss = pipe.evaluate(inputs, inputs, document_ids=documents)
    assert isinstance(found, Tensor)
    assert (found[:, [0, 25, 50]] == 0).all()
    assert float(-found.sum() / (found != 0).sum()) == pytest.approx(float(loss), rel=BOUND)


def test_nothing_of_a_step_changes() -> None:
    """Dropout is off, gradients and random numbers are as they were, and a batch without labels has zeros."""
    inputs = tokens()
    pipe, other = pipeline("gpt2"), pipeline("gpt2")
    assert not torch.as_tensor(pipe.log_probabilities(inputs, torch.full_like(inputs, -100))).any()
    assert [each.shape for each in pipe.logits([inputs[0, :1]]) or ()] == [(1, 61)]
    assert all(each.grad is None for each in pipe.parameters())
    assert pipe.step(inputs, inputs) == other.step(inputs, inputs)


def test_a_reference_of_preferences() -> None:
    """What a SequenceLoss is given of a reference model comes from a pipeline of it, or from the same one before."""
    inputs = tokens(4, 40)
    pipe = pipeline(loss_fn=SequenceLoss(preference, 2), num_microbatches=2)
    with no_rounding_inside():
        sums = torch.as_tensor(pipe.log_probabilities(inputs, inputs)).sum(1)
        expected = log_probabilities(MODELS["llama, tied"], inputs, inputs).detach()
        loss = pipe.evaluate(inputs, inputs, sequence_values=references(4))
    assert close(sums, expected)
    assert float(preference(sums, references(4)).mean()) == pytest.approx(float(loss), rel=BOUND)


def test_what_has_no_logits_is_refused() -> None:
    pipe = pipeline(vocabulary="spread")
    for run in (pipe.logits, lambda inputs: pipe.log_probabilities(inputs, inputs)):
        with pytest.raises(SlipstreamError, match=r"no rank has all logits.*vocabulary='whole'"):
            run(tokens())
    with pytest.raises(SlipstreamError, match=r"inputs are a tuple of 2; a causal LM takes token ids"):
        pipeline().logits((tokens(), tokens()))
    with pytest.raises(SlipstreamError, match=r"labels are missing: give log_probabilities\(tokens, labels\)"):
        pipe.log_probabilities(tokens())
    layers = Pipeline(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), loss_fn=lambda *_: None)
    with pytest.raises(SlipstreamError, match=r"is for models of transformers.*evaluate"):
        layers.logits(tokens())
