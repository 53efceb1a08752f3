"""Sequences of different lengths have the gradients of each alone, in steps that are planned or refused by name."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream import Memory, Pipeline, Runtime, SlipstreamError, make_schedule
from slipstream.pipeline.batch import Batch
from slipstream.pipeline.cut_batch import consecutive_groups
from slipstream.planner.ragged import StageRates
from slipstream.schedule import validate
from support.architectures import BOUND, LENGTH, gradient_error, gradients, tokens
from support.examples import examples
from support.live_memory import limit_that_would_do
from support.parameters import first_of
from support.pipelines import make_pipe
from support.ragged_batches import MODELS, ORDERS, batch_of, one_by_one

UNCHECKED = Runtime(self_check=False)


@examples(125, thin=3)
@given(st.data())
def test_gradients_are_those_of_each_sequence_alone(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=7).filter(lambda found: max(found) > 12))
    inputs, labels = batch_of(lengths, data.draw(st.integers(0, 99)))
    if all((label[1:] == -100).all() for label in labels):
        labels = inputs
    name, (schedule, v) = data.draw(st.sampled_from(sorted(MODELS))), data.draw(st.sampled_from(ORDERS))
    settings = {
        "schedule": schedule,
        "stages_per_rank": v,
        "num_ranks": data.draw(st.integers(1, 2)),
        "num_microbatches": data.draw(st.integers(1, len(lengths))),
        "slices": data.draw(st.integers(1, 6)),
        "recompute": data.draw(st.sampled_from(["none", "full", "selective"])),
        "offload": data.draw(st.sampled_from([0.0, 0.5])),
    }
    pipe = make_pipe(copy.deepcopy(MODELS[name]), **settings)
    loss, expected = one_by_one(name, inputs, labels)
    if data.draw(st.booleans()):
        found = pipe.step(inputs, labels)
        assert pipe.evaluate(inputs, labels) == pytest.approx(float(loss), rel=1e-9)
    else:
        padded = [torch.nn.utils.rnn.pad_sequence(each, batch_first=True) for each in (inputs, labels)]
        found = pipe.step(*padded, lengths=lengths)
        assert pipe.evaluate(*padded, lengths=lengths) == pytest.approx(float(loss), rel=1e-9)
    assert abs(found - loss) < BOUND
    assert gradient_error(expected, gradients(pipe)) < BOUND
    slices = [each.slices for each in pipe.last_step.microbatches]
    assert sum(map(sum, slices)) == sum(lengths)
    assert tuple(map(len, slices)) == pipe.layout.training.slice_counts


def test_steps_of_any_shape_follow_each_other() -> None:
    """Each has its own schedule; rows of one length afterwards have theirs again."""
    pipe = make_pipe(copy.deepcopy(MODELS["gpt2"]), num_microbatches=2, slices=3, num_ranks=2)
    even = pipe.layout
    for lengths in ([9, 40], [40, 9], [9, 40], [30, 30], [5, 5, 8]):
        inputs, _ = batch_of(lengths)
        loss, _ = one_by_one("gpt2", inputs, inputs)
        assert abs(pipe.step(inputs, inputs) - loss) < BOUND
    rows = tokens(batch=2)
    loss, _ = one_by_one("gpt2", [*rows], [*rows])
    assert abs(pipe.step(rows, rows) - loss) < BOUND
    assert pipe.layout is even
    assert pipe.evaluate(*batch_of([9, 40])) > 0
    assert pipe.evaluate(rows, rows) == pytest.approx(float(loss), rel=1e-9)


def test_fewer_sequences_than_microbatches_are_one_each() -> None:
    pipe = make_pipe(copy.deepcopy(MODELS["gpt2"]), num_microbatches=3, slices=2, num_ranks=2)
    inputs, _ = batch_of([9, 30])
    loss, _ = one_by_one("gpt2", inputs, inputs)
    assert abs(pipe.step(inputs, inputs) - loss) < BOUND
    assert sorted(sum(each.slices) for each in pipe.last_step.microbatches) == [9, 30]


@pytest.mark.parametrize("name", first_of(["1f1b", "gpipe", "zb-h1"]))
def test_under_a_name_sequences_share_microbatches_by_their_cost(name: str) -> None:
    """In whatever order they come, one long sequence is alone, and the short ones are together."""
    pipe = make_pipe(copy.deepcopy(MODELS["gpt2"]), name, num_microbatches=2, slices=4, num_ranks=2)
    for lengths in ([40, 9, 10, 11, 8], [9, 10, 40, 11, 8]):
        inputs, _ = batch_of(lengths)
        loss, expected = one_by_one("gpt2", inputs, inputs)
        for parameter in pipe.parameters():
            parameter.grad = None
        assert abs(pipe.step(inputs, inputs) - loss) < BOUND
        assert gradient_error(expected, gradients(pipe)) < BOUND
        rows = {sum(each.slices): len(each.slices) for each in pipe.last_step.microbatches}
        assert rows == {40: 4, 38: 3}  # of less attention
        assert pipe.order.ops == make_schedule(name, 2, 2, 4).ops  # backwards are split as the name says


def test_documents_within_a_sequence_are_kept_apart() -> None:
    inputs, labels = batch_of([30, 20])
    documents = [torch.arange(30) // 13, torch.arange(20) // 7]
    pieces = [range(0, 13), range(13, 26), range(26, 30)], [range(0, 7), range(7, 14), range(14, 20)]

    def cut(rows: list[Tensor]) -> list[Tensor]:
        return [row[part.start : part.stop] for row, parts in zip(rows, pieces, strict=True) for part in parts]

    loss, expected = one_by_one("gpt2", cut(inputs), cut(labels))
    for num_microbatches in (1, 2):
        options: dict[str, Any] = {"num_microbatches": num_microbatches, "slices": 3, "runtime": UNCHECKED}
        pipe = Pipeline(copy.deepcopy(MODELS["gpt2"]), **options)
        assert abs(pipe.step(inputs, labels, document_ids=documents) - loss) < BOUND
        assert gradient_error(expected, gradients(pipe)) < BOUND


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=5), st.randoms())
def test_no_document_of_a_row_runs_on_into_the_next_sequence(documents: list[list[int]], random: Any) -> None:
    """Whatever numbers they have, and in whatever order sequences share a row."""
    ids = [torch.tensor(each) for each in documents]
    group = random.sample(range(len(ids)), len(ids))
    (row,) = Batch((ids,), False, ids, document_ids=ids).packed([group])
    runs = [torch.unique_consecutive(each, return_counts=True)[1].tolist() for each in (ids[n] for n in group)]
    assert row.document_ids is not None
    found = torch.unique_consecutive(row.document_ids[0], return_counts=True)[1].tolist()
    assert found == [count for each in runs for count in each]


def test_a_schedule_that_was_given_cuts_each_microbatch_into_its_slices() -> None:
    inputs, _ = batch_of([40, 11])
    loss, expected = one_by_one("gpt2", inputs, inputs)
    schedule = make_schedule("1f1b", 2, 2, 4)
    pipe = make_pipe(copy.deepcopy(MODELS["gpt2"]), schedule)
    assert abs(pipe.step(inputs, inputs) - loss) < BOUND
    assert gradient_error(expected, gradients(pipe)) < BOUND
    assert [each.slices for each in pipe.last_step.microbatches] == [(10, 10, 10, 10), (3, 3, 3, 2)]


@pytest.mark.more
def test_memory_is_limited_for_each_batch() -> None:
    def pipeline(limit: float) -> Pipeline:
        options: dict[str, Any] = {"runtime": UNCHECKED, "memory": Memory(limit=limit)}
        return Pipeline(copy.deepcopy(MODELS["gpt2"]), "gpipe", num_microbatches=2, slices=2, **options)

    inputs, _ = batch_of([40, 12])
    with pytest.raises(SlipstreamError, match="would hold") as problem:
        pipeline(1000).step(inputs, inputs)
    held = limit_that_would_do(problem.value)
    pipe = pipeline(held)
    assert pipe.step(inputs, inputs) > 0
    longer, _ = batch_of([50, 60])
    with pytest.raises(SlipstreamError, match=r"would hold.*The longest sequence is inputs\[1\], of 60 tokens: cut it"):
        pipe.step(longer, longer)


@pytest.mark.more
def test_memory_of_few_batches_is_kept() -> None:
    options: dict[str, Any] = {"runtime": UNCHECKED, "memory": Memory(limit=10**9)}
    pipe = Pipeline(copy.deepcopy(MODELS["gpt2"]), "gpipe", num_microbatches=2, slices=2, **options)
    limit = pipe._runtime.memory_limit
    limit.most_steps = 2
    for length in (10, 11, 12, 10):
        inputs, _ = batch_of([30, length, 2])
        assert pipe.step(inputs, inputs) > 0
    assert (len(limit._tables), len(limit._fitting)) == (0, 2)  # what rows hold follows from a few


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.data())
def test_the_largest_group_is_as_small_as_it_can_be(lengths: list[int], data: st.DataObject) -> None:
    number = data.draw(st.integers(1, len(lengths)))
    groups = consecutive_groups(lengths, number)
    assert [row for group in groups for row in group] == [*range(len(lengths))]
    assert len(groups) == number
    assert all(groups)
    cuts = combinations(range(1, len(lengths)), number - 1)
    sizes = [max(sum(lengths[a:b]) for a, b in pairwise((0, *each, len(lengths)))) for each in cuts]
    assert max(sum(lengths[row] for row in group) for group in groups) == min(sizes)


def ids(*lengths: int) -> list[Tensor]:
    return [torch.ones(length, dtype=torch.int64) for length in lengths]


@pytest.mark.parametrize(
    ("options", "inputs", "given", "words"),
    [
        ({}, ids(4, 0), {}, "inputs[1] is an empty sequence. Leave it out."),
        ({}, [], {}, "inputs are a list without a sequence: give at least one, or leave the step out."),
        ({}, ids(1, 1), {}, "no label of this batch counts: all are -100"),
        ({}, ids(4, LENGTH + 1), {}, f"the length of inputs[1]={LENGTH + 1} is more than the model's {LENGTH} positio"),
        (
            {},
            ids(4, 3),
            {"targets": ids(4, 4)},
            "targets[1] are (4,) int64, inputs[1] (3,) int64: they must have one shape",
        ),
        ({}, ids(4, 3), {"targets": ids(4)}, "targets are 1 sequences, inputs 2"),
        ({}, [torch.ones(4)], {}, "inputs[0] are (4,) float32; expected token ids, (tokens,) int64"),
        ({}, ids(4), {"targets": torch.ones(1, 4)}, "targets must be a list of tensors"),
        (
            {"schedule": make_schedule("gpipe", 1, 3, 2)},
            ids(4, 3),
            {},
            "a batch of 2 sequences can't be cut into 3 mic",
        ),
        ({}, torch.ones(2, 4, dtype=torch.int64), {"lengths": [4, 5]}, "lengths[1]=5, but inputs have room for 4"),
        ({}, torch.ones(2, 4, dtype=torch.int64), {"lengths": [4, 0]}, "inputs[1] is an empty sequence"),
        ({}, torch.ones(2, 4, dtype=torch.int64), {"lengths": [4]}, "inputs are (2, 4) for 1 lengths"),
        ({}, ids(4, 3), {"position_ids": torch.ones(2, 4)}, "position_ids with sequences of different lengths"),
        ({"slices": [2, 2]}, ids(4, 3), {}, "slices=[...] with sequences of different lengths"),
        ({"microbatches": [[2, [4]]]}, ids(4, 3), {}, "microbatches=... with sequences of different lengths"),
        ({"schedule": make_schedule("gpipe", 1, 2, 4)}, ids(4, 3), {}, "slices=4: a sequence of 3 tokens takes 1 to 3"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    options: dict[str, Any], inputs: Any, given: dict[str, Any], words: str
) -> None:
    pipe = Pipeline(copy.deepcopy(MODELS["gpt2"]), **{"runtime": UNCHECKED} | options)
    with pytest.raises(SlipstreamError) as problem:
        pipe.step(inputs, **{"targets": inputs} | given)
    assert words in str(problem.value)


def test_layers_of_a_sequence_take_rows_of_one_length() -> None:
    pipe = Pipeline(torch.nn.Sequential(torch.nn.Embedding(9, 4)))
    with pytest.raises(SlipstreamError, match=r"layers of this nn\.Sequential take whole microbatches"):
        pipe.step(ids(4, 3), ids(4, 3))


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
def test_planned_steps_have_the_gradients_of_each_sequence_alone(
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
