"""Where order and slices are "auto", each step of sequences that differ in length is planned, and stays exact."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream import Pipeline, SlipstreamError
from slipstream.planner.steps import StageRates
from slipstream.schedule import validate
from support.architectures import BOUND, gradient_error, gradients
from support.examples import examples
from support.pipelines import make_pipe
from support.ragged_batches import MODELS, batch_of, one_by_one


def planned(name: str, **settings: Any) -> Pipeline:
    options = {"schedule": "auto", "slices": "auto", "num_ranks": 2} | settings
    return make_pipe(copy.deepcopy(MODELS[name]), **options)


@examples(15, thin=3)
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
    assert gradient_error(expected, gradients(pipe)) < BOUND
    assert not pipe.is_tuning  # steps are planned; rows of one length would be planned when they come


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


def test_rows_of_one_length_are_planned_when_they_come() -> None:
    pipe = planned("llama, tied")
    inputs, _ = batch_of([5, 6], 0)
    pipe.step(inputs, inputs)
    assert not pipe.is_tuning
    rows = torch.stack([inputs[0], inputs[0]])
    assert torch.isfinite(pipe.evaluate(rows, rows))  # in fewer slices than longer rows would have
    pipe.step(rows, rows)
    assert not pipe.is_tuning
    assert pipe.order.name == "auto"
    assert pipe.last_step.layout.order.num_microbatches == 1


def test_rates_of_another_pipeline_plan_the_same_steps() -> None:
    """Also after JSON, as plan files and checkpoints keep them."""
    lengths = [3, 40, 4, 2, 38, 5]
    inputs, _ = batch_of(lengths, 0)
    pipe = planned("llama, tied")
    pipe.step(inputs, inputs)
    assert pipe.rates is not None
    seconds = {op: each * [1e4, 1, 1] for op, each in pipe.rates.seconds.items()}
    dear = replace(pipe.rates, seconds=seconds, message_bytes=0.1, latency=1 / 3, bandwidth=1e9 / 7)
    kept = StageRates.from_json(json.loads(json.dumps(dear.to_json())))
    assert (kept.message_bytes, kept.latency, kept.bandwidth, kept.windows) == (0.1, 1 / 3, 1e9 / 7, dear.windows)
    for rates in (dear, kept):
        other = planned("llama, tied", schedule="1f1b", rates=rates)
        other.step(inputs, inputs)
        # A slice costs so much more than its tokens that each microbatch is one.
        assert {len(each.slices) for each in other.last_step.microbatches} == {1}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"windows": None}, "the rates of stages can't be read (TypeError"),
        ({"seconds": {"F": [[1, 2, 3]]}}, "the rates of stages have the shapes"),
        ({"activation_bytes": [[1.0]]}, "the rates of stages have the shapes"),
        ({"seconds": {"X": [[1, 2, 3]]}}, "the rates of stages can't be read (ValueError"),
    ],
)
def test_damaged_rates_are_refused(damage: dict[str, Any], words: str) -> None:
    rates = planned("llama, tied").rates
    assert rates is not None
    with pytest.raises(SlipstreamError) as problem:
        StageRates.from_json(rates.to_json() | damage)
    assert words in str(problem.value)


def test_rates_that_are_for_other_stages_are_refused() -> None:
    rates = planned("llama, tied").rates
    with pytest.raises(
        SlipstreamError, match=r"rates of 2 stages for a pipeline of 4\. Give those of one with the same"
    ):
        planned("llama, tied", stages_per_rank=2, rates=rates)
    with pytest.raises(SlipstreamError, match=r"rates=\.\.\.: of an nn\.Sequential each sequence is a microbatch"):
        Pipeline(torch.nn.Sequential(torch.nn.Embedding(9, 4)), rates=rates)
