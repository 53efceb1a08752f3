"""Where order and slices are "auto", each step of sequences that differ in length is planned, and stays exact."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream import Pipeline, Runtime
from slipstream.schedule import validate
from support.architectures import BOUND, gradient_error, gradients
from support.examples import examples
from support.ragged_batches import MODELS, batch_of, one_by_one

UNCHECKED = Runtime(self_check=False)


def planned(name: str, **settings: Any) -> Pipeline:
    options = {"schedule": "auto", "slices": "auto", "num_ranks": 2} | settings
    return Pipeline(copy.deepcopy(MODELS[name]), runtime=UNCHECKED, **options)


@examples(15)
@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=7),
    st.sampled_from(sorted(MODELS)),
    st.sampled_from([{}, {"stages_per_rank": 2}, {"schedule": "auto-v", "stages_per_rank": 2}, {"schedule": "1f1b"}]),
    st.sampled_from([{}, {"slices": 3}]),
)
def test_gradients_are_those_of_each_sequence_alone(
    lengths: list[int], name: str, order: dict[str, Any], slices: dict[str, Any]
) -> None:
    inputs, _ = batch_of(lengths, 0)
    pipe = planned(name, **order, **slices)
    loss, expected = one_by_one(name, inputs, inputs)
    assert pipe.step(inputs, inputs) == pytest.approx(float(loss), rel=1e-9)
    assert gradient_error(expected, gradients(pipe.named_parameters())) < BOUND
    assert not pipe.is_tuning  # steps are planned; rows of one length would be learned from


def test_short_sequences_share_a_microbatch_and_long_ones_are_cut() -> None:
    lengths = [3, 40, 4, 2, 38, 5]
    pipe = planned("llama, tied", slices=4)
    inputs, _ = batch_of(lengths, 0)
    pipe.step(inputs, inputs)
    rows = [sum(each.slices) for each in pipe.last_step.microbatches]
    assert sum(rows) == sum(lengths)
    assert len(rows) < len(lengths)
    assert 1 < max(len(each.slices) for each in pipe.last_step.microbatches) <= 4
    validate(pipe.order)


def test_a_number_of_microbatches_is_kept() -> None:
    pipe = planned("llama, tied", num_microbatches=3)
    inputs, _ = batch_of([5, 6, 7, 8], 0)
    pipe.step(inputs, inputs)
    assert len(pipe.last_step.microbatches) == 3


def test_rows_of_one_length_are_still_learned_from() -> None:
    pipe = planned("llama, tied")
    inputs, _ = batch_of([5, 6], 0)
    pipe.step(inputs, inputs)
    assert not pipe.is_tuning
    rows = torch.stack([inputs[0], inputs[0]])
    pipe.step(rows, rows)
    assert pipe.is_tuning
