"""Steps that follow a plan, with any sequences in a microbatch, any slices and any order, are exact."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream import SlipstreamError, make_schedule
from slipstream.model import causal_cross_entropy
from slipstream.planner.ragged import StepPlan
from support.architectures import BOUND, gradient_error, gradients
from support.examples import examples
from support.forked import launch
from support.paths import WORKERS
from support.pipelines import make_pipe
from support.ragged_batches import MODELS, ORDERS, batch_of, one_by_one, parts, random_plan
from support.sequences.sliced_layers import CASES

PLAN = StepPlan(((2, 0), (1,)), ((5, 9), (6,)), make_schedule("1f1b", 1, 2, [2, 1]))
LENGTHS = [4, 6, 10]


@examples(115, thin=3)
@given(st.data())
def test_gradients_are_those_of_each_sequence_alone(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(2, 40), min_size=1, max_size=7))
    inputs, labels = batch_of(lengths, data.draw(st.integers(0, 99)))
    if all((label[1:] == -100).all() for label in labels):
        labels = inputs
    name, (schedule, v) = data.draw(st.sampled_from(sorted(MODELS))), data.draw(st.sampled_from(ORDERS))
    num_ranks = data.draw(st.integers(1, 2))
    recompute = data.draw(st.sampled_from(["none", "full", "selective"]))
    settings = {"schedule": schedule, "stages_per_rank": v, "num_ranks": num_ranks, "recompute": recompute}
    pipe = make_pipe(copy.deepcopy(MODELS[name]), **settings)
    plan = random_plan(Random(data.draw(st.integers(0, 10**6))), lengths, pipe.order)
    loss, expected = one_by_one(name, inputs, labels)
    assert abs(pipe.step(inputs, labels, plan=plan) - loss) < BOUND
    assert gradient_error(expected, gradients(pipe)) < BOUND
    assert pipe.order is plan.schedule
    assert [each.slices for each in pipe.last_step.microbatches] == [*plan.slices]
    assert pipe.evaluate(inputs, labels, plan=plan) == pytest.approx(float(loss), rel=1e-9)


@pytest.mark.more
@examples(40)
@given(st.data())
def test_layers_behind_cut_tokens_take_sequences_of_different_lengths(data: st.DataObject) -> None:
    name, (schedule, v) = data.draw(st.sampled_from(sorted(CASES))), data.draw(st.sampled_from(ORDERS))
    num_ranks, num_layers = data.draw(st.integers(1, 2)), CASES[name].num_layers
    num_stages = num_ranks * v
    ends = data.draw(st.sets(st.integers(1, num_layers - 1), min_size=num_stages - 1, max_size=num_stages - 1))
    lengths = data.draw(st.lists(st.integers(2, 9), min_size=1, max_size=8))
    inputs, targets = rows_of(name, lengths)
    pipe = make_pipe(
        CASES[name].model(),
        schedule,
        slices=data.draw(st.integers(1, 4)),
        stages_per_rank=v,
        num_ranks=num_ranks,
        partition=[b - a for a, b in pairwise([0, *sorted(ends), num_layers])],
        loss_fn=causal_cross_entropy,
    )
    loss, expected = unsplit(name, inputs, targets)
    plan = None
    if pipe.slices(9) != [9] and data.draw(st.booleans()):
        plan = random_plan(Random(data.draw(st.integers(0, 10**6))), lengths, pipe.order, 3)
        plan = alone(plan, lengths)
    assert abs(pipe.step(inputs, targets, plan=plan) - loss) < BOUND
    assert gradient_error(expected, gradients(pipe)) < BOUND
    assert pipe.evaluate(inputs, targets, plan=plan) == pytest.approx(float(loss), rel=1e-9)


def test_sequences_behind_cut_tokens_are_microbatches() -> None:
    inputs, targets = rows_of("mixed", [9, 4, 6])
    pipe = make_pipe(CASES["mixed"].model(), slices=3, loss_fn=causal_cross_entropy)
    loss, expected = unsplit("mixed", inputs, targets)
    assert abs(pipe.step(inputs, targets) - loss) < BOUND
    assert gradient_error(expected, gradients(pipe)) < BOUND
    assert [each.slices for each in pipe.last_step.microbatches] == [(3, 3, 3), (2, 2), (3, 3)]
    two = StepPlan(((0, 1), (2,)), ((13,), (6,)), make_schedule("1f1b", 1, 2, 1))
    with pytest.raises(SlipstreamError, match=r"packs the sequences \[0, 1\] into one row, but the layers"):
        pipe.step(inputs, targets, plan=two)


def alone(plan: StepPlan, lengths: list[int]) -> StepPlan:
    """A plan of the same kind in which each sequence is a microbatch."""
    random = Random(len(plan.groups))
    slices = tuple(tuple(parts(random, length, 3)) for length in lengths)
    order = plan.schedule
    v = order.num_stages // order.num_ranks
    name = order.name if order.name in dict(ORDERS) else "breadth-first"
    counts = [len(each) for each in slices]
    schedule = make_schedule(name, order.num_ranks, len(counts), counts, v)
    if schedule.placement != order.placement:
        schedule = make_schedule("v-min", order.num_ranks, len(counts), counts, v)
    return StepPlan(tuple((number,) for number in range(len(lengths))), slices, schedule)


def rows_of(name: str, lengths: list[int]) -> tuple[list[Any], list[Tensor]]:
    """The first tokens of the case's rows: of its targets, whatever goes with them stays whole."""
    inputs, targets = CASES[name].batch()
    targets = torch.where(targets == -100, 1, targets)
    cut = [row[:length] for row, length in zip(targets, lengths, strict=False)]
    if isinstance(inputs, tuple):
        return [(inputs[0][n], inputs[1][n, :length]) for n, length in enumerate(lengths)], cut
    return [inputs[n, :length] for n, length in enumerate(lengths)], cut


def unsplit(name: str, inputs: list[Any], targets: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model, count = CASES[name].model(), sum(map(len, targets))
    loss = torch.zeros((), dtype=torch.float64)
    for row, target in zip(inputs, targets, strict=True):
        batch = tuple(tensor[None] for tensor in row) if isinstance(row, tuple) else row[None]
        total, _ = CASES[name].loss_fn(model(batch), target[None])
        (total / count).backward()
        loss += total.detach() / count
    return loss, gradients(model)


def test_a_plan_is_prepared_while_another_step_runs() -> None:
    """It is the one that the step finds; one for other lengths waits, or is forgotten when there are too many."""
    pipe = make_pipe(copy.deepcopy(MODELS["gpt2"]), num_microbatches=2, slices=3, num_ranks=2)
    for lengths, after in pairwise([[9, 40], [30, 30], [5, 5, 8], [9, 40]]):
        pipe.prepare(after)
        inputs, _ = batch_of(lengths)
        loss, _ = one_by_one("gpt2", inputs, inputs)
        assert abs(pipe.step(inputs, inputs) - loss) < BOUND
    for longest in range(10, 20):
        pipe.prepare([5, longest])
    assert len(pipe._runtime.step_planning._waiting) == 4


def test_a_plan_that_can_not_be_made_is_refused_by_its_step() -> None:
    pipe = make_pipe(copy.deepcopy(MODELS["gpt2"]), make_schedule("1f1b", 2, 2, 3))
    pipe.prepare([12])
    inputs, _ = batch_of([12])
    with pytest.raises(SlipstreamError, match="a batch of 1 sequences can't be cut into 2 microbatches"):
        pipe.step(inputs, inputs)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"groups": ((2, 0),), "slices": ((5, 9),)},
            "don't add up to the batch of 3 sequences: sequence 1 is in 0 of t",
        ),
        ({"groups": ((2, 0), (1, 2))}, "sequence 2 is in 2 of them, not in one"),
        ({"groups": ((2, 0), (1, 3))}, "there is no sequence 3"),
        ({"groups": ((2, 0, 1), ())}, "3 sequences: one is empty"),
        (
            {"slices": ((5, 8), (6,))},
            "cuts microbatch 0 into slices of [5, 8] tokens, 13 in all, but its sequences [2, 0]",
        ),
        ({"slices": ((14, 0), (6,))}, "microbatch 0 into slices of [14, 0] tokens"),
        ({"slices": ((5, 9),)}, "the plan has 2 microbatches, but slices of 1"),
        ({"slices": ((5, 9), (3, 3))}, "microbatches of [2, 2] slices, but its schedule '1f1b' of [2, 1]"),
        ({"schedule": make_schedule("1f1b", 2, 2, [2, 1])}, "the schedule '1f1b' is for 2 ranks, but there are 1"),
        ({"schedule": make_schedule("zb-v", 1, 2, [2, 1], 2)}, "has its stages on the ranks [0, 0], but the pipeline"),
    ],
)
def test_a_plan_for_something_else_is_refused(changes: dict[str, Any], words: str) -> None:
    pipe = make_pipe(copy.deepcopy(MODELS["gpt2"]))
    inputs, _ = batch_of(LENGTHS)
    with pytest.raises(SlipstreamError) as problem:
        pipe.step(inputs, inputs, plan=replace(PLAN, **changes))
    assert words in str(problem.value)


def test_a_plan_for_other_lengths_is_refused_and_one_for_rows_of_one_length() -> None:
    pipe = make_pipe(copy.deepcopy(MODELS["gpt2"]))
    inputs, _ = batch_of([4, 7, 10])
    with pytest.raises(SlipstreamError, match=r"its sequences \[1\] have 7: it was made for other lengths\. Make"):
        pipe.step(inputs, inputs, plan=PLAN)
    rows = torch.ones(3, 8, dtype=torch.int64)
    with pytest.raises(SlipstreamError, match=r"plan=\.\.\. is for sequences of different lengths"):
        pipe.step(rows, rows, plan=PLAN)


@pytest.mark.parametrize(
    ("case", "num_processes"),
    [
        pytest.param("replicas", 4, marks=pytest.mark.more, id="replicas"),
        pytest.param("tensor_ranks", 4, marks=pytest.mark.more, id="tensor ranks"),
        pytest.param("preferences", 4, marks=pytest.mark.more, id="preferences"),
        pytest.param("a_batch_that_one_replica_refuses", 2, marks=pytest.mark.more, id="a refused batch"),
        pytest.param("ranks_that_plan_differently", 2, id="different plans"),
    ],
)
def test_processes(case: str, num_processes: int) -> None:
    ended = launch(num_processes, WORKERS / "pipeline/ragged_meshes.py", case, str(examples(40).max_examples))
    assert f"passed {case}\n" in ended.stdout, ended.stderr[-3000:]
