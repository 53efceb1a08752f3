"""Microbatches that differ in rows, slices and lengths have the gradients of each sequence alone, in steps by a named
schedule, by a given plan, or by one that is made for them."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from itertools import combinations, pairwise
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from slipstream import Pipeline, find_order, make_schedule, slice_batch
from slipstream.model import causal_cross_entropy
from slipstream.pipeline.batch import Batch
from slipstream.pipeline.cut_batch import consecutive_groups
from slipstream.pipeline.token_values import DOCUMENTS, TokenValues
from slipstream.planner.ragged import StageRates, StepPlan
from slipstream.schedule import validate
from slipstream.simulator import UnitCost
from support.architectures import BOUND, gradient_error, gradients, tokens
from support.examples import examples
from support.live_memory import limit_that_would_do
from support.parameters import first_of
from support.pipelines import make_pipe
from support.ragged_batches import MODELS, ORDERS, batch_of, one_by_one, parts, random_plan
from support.refusals import refused
from support.sequences.sliced_layers import CASES

LENGTH = 24
Microbatches = list[tuple[int, list[int]]]


@st.composite
def microbatches(draw: st.DrawFn, num_rows: int, length: int, most_slices: int = 5) -> Microbatches:
    """Any rows to each, and of each any slices."""

    def pieces(whole: int, most: int) -> list[int]:
        cuts = draw(st.sets(st.integers(1, whole - 1), max_size=most - 1))
        return [b - a for a, b in pairwise([0, *sorted(cuts), whole])]

    return [(rows, pieces(length, most_slices)) for rows in pieces(num_rows, num_rows)]


def pipe_of(name: str, *order: Any, **settings: Any) -> Pipeline:
    return make_pipe(copy.deepcopy(MODELS[name]), *order, **settings)


def apart(rows: list[Tensor], documents: list[Tensor]) -> list[Tensor]:
    """The documents of all rows, each by itself."""
    counts = [torch.unique_consecutive(ids, return_counts=True)[1].tolist() for ids in documents]
    return [part for row, count in zip(rows, counts, strict=True) for part in row.split(count)]


HOW = ["rows and slices of each", "lists", "padded rows", "a plan"]


@pytest.mark.parametrize("how", HOW)
@examples(125, thin=3)
@given(data=st.data())
def test_gradients_are_those_of_each_sequence_alone(how: str, data: st.DataObject) -> None:
    is_rows = how == HOW[0]
    several = st.lists(st.integers(1, 40), min_size=1, max_size=7).filter(lambda found: max(found) > 1)
    lengths = [LENGTH] * 4 if is_rows else data.draw(several)
    seed = data.draw(st.integers(0, 10**6))
    inputs, labels = batch_of(lengths, seed % 100)
    if all((label[1:] == -100).all() for label in labels):
        labels = inputs
    name, (schedule, v) = data.draw(st.sampled_from(sorted(MODELS))), data.draw(st.sampled_from(ORDERS))
    settings: dict[str, Any] = {
        "schedule": schedule,
        "stages_per_rank": v,
        "num_ranks": data.draw(st.integers(1, 2)),
        "recompute": data.draw(st.sampled_from(["none", "full", "selective"])),
        "offload": data.draw(st.sampled_from([0.0, 0.5])),
    }
    loss, expected = one_by_one(name, inputs, labels)
    batch: list[Any] = [inputs, labels]
    more: dict[str, Any] = {}
    if is_rows:
        batch = [torch.stack(rows) for rows in batch]
        settings["microbatches"] = data.draw(microbatches(4, LENGTH))
        if data.draw(st.booleans()):
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randint(0, 2, (4, LENGTH), generator=generator).cumsum(dim=1) // 6
            loss, expected = one_by_one(name, *(apart(rows, [*ids]) for rows in (inputs, labels)))
            more["document_ids"] = ids
    elif how != "a plan":
        settings["num_microbatches"] = data.draw(st.integers(1, len(lengths)))
        settings["slices"] = data.draw(st.integers(1, 6))
    if how == "padded rows":
        batch, more["lengths"] = [pad_sequence(rows, batch_first=True) for rows in batch], lengths
    pipe = pipe_of(name, **settings)
    if how == "a plan":
        more["plan"] = random_plan(Random(seed), lengths, pipe.order)
    assert abs(pipe.step(*batch, **more) - loss) < BOUND
    assert gradient_error(expected, gradients(pipe)) < BOUND
    slices = [each.slices for each in pipe.last_step.microbatches]
    assert tuple(map(len, slices)) == pipe.layout.training.slice_counts
    if how == "a plan":
        assert pipe.order is more["plan"].schedule
        assert slices == [*more["plan"].slices]
        assert [*map(tuple, pipe.last_step.groups)] == [*more["plan"].groups]
    elif is_rows:
        assert slices == [tuple(each) for _, each in settings["microbatches"]]
    else:
        assert sum(map(sum, slices)) == sum(lengths)
    assert pipe.evaluate(*batch, **more) == pytest.approx(float(loss), rel=1e-9)


# --- rows of one length -----------------------------------------------------------------------------------------------


@pytest.mark.more
def test_what_slice_batch_returns_runs_as_it_is_by_name_and_in_a_found_order() -> None:
    found = slice_batch(lambda rows, tokens, context: 1 + rows * tokens * (tokens + 2 * context), 5, LENGTH, 2)
    counts = [len(each.slices) for each in found.microbatches]
    inputs = tokens(batch=5, length=LENGTH)
    _, expected = one_by_one("gpt2", [*inputs], [*inputs])
    order = find_order([0, 1], len(counts), counts, UnitCost(), effort=1e4)
    for schedule in ("1f1b", order):
        pipe = pipe_of("gpt2", schedule, microbatches=found, num_ranks=2)
        pipe.step(inputs, inputs)
        assert gradient_error(expected, gradients(pipe)) < BOUND
        assert list(pipe.last_step.microbatches) == list(found.microbatches)


# --- layers behind CutTokens ------------------------------------------------------------------------------------------


@pytest.mark.more
@examples(40)
@given(data=st.data())
def test_layers_behind_cut_tokens_take_sequences_of_different_lengths(data: st.DataObject) -> None:
    name, (schedule, v) = data.draw(st.sampled_from(sorted(CASES))), data.draw(st.sampled_from(ORDERS))
    num_ranks, num_layers = data.draw(st.integers(1, 2)), CASES[name].num_layers
    ends = data.draw(st.sets(st.integers(1, num_layers - 1), min_size=num_ranks * v - 1, max_size=num_ranks * v - 1))
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
    loss, expected = unsplit_rows(name, inputs, targets)
    plan = None
    if pipe.slices(9) != [9] and data.draw(st.booleans()):
        plan = random_plan(Random(data.draw(st.integers(0, 10**6))), lengths, pipe.order, 3)
        plan = each_by_itself(plan, lengths)
    assert abs(pipe.step(inputs, targets, plan=plan) - loss) < BOUND
    assert gradient_error(expected, gradients(pipe)) < BOUND
    assert pipe.evaluate(inputs, targets, plan=plan) == pytest.approx(float(loss), rel=1e-9)


def test_sequences_behind_cut_tokens_are_microbatches() -> None:
    inputs, targets = rows_of("mixed", [9, 4, 6])
    pipe = make_pipe(CASES["mixed"].model(), slices=3, loss_fn=causal_cross_entropy)
    loss, expected = unsplit_rows("mixed", inputs, targets)
    assert abs(pipe.step(inputs, targets) - loss) < BOUND
    assert gradient_error(expected, gradients(pipe)) < BOUND
    assert [each.slices for each in pipe.last_step.microbatches] == [(3, 3, 3), (2, 2), (3, 3)]
    two = StepPlan(((0, 1), (2,)), ((13,), (6,)), make_schedule("1f1b", 1, 2, 1))
    with refused("packs the sequences [0, 1] into one row, but the layers"):
        pipe.step(inputs, targets, plan=two)


def each_by_itself(plan: StepPlan, lengths: list[int]) -> StepPlan:
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


def unsplit_rows(name: str, inputs: list[Any], targets: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model, count = CASES[name].model(), sum(map(len, targets))
    loss = torch.zeros((), dtype=torch.float64)
    for row, target in zip(inputs, targets, strict=True):
        batch = tuple(tensor[None] for tensor in row) if isinstance(row, tuple) else row[None]
        total, _ = CASES[name].loss_fn(model(batch), target[None])
        (total / count).backward()
        loss += total.detach() / count
    return loss, gradients(model)


# --- sequences of different lengths -----------------------------------------------------------------------------------


def test_steps_of_any_shape_follow_each_other() -> None:
    """Each has its own schedule, which may be prepared while the one before runs; rows of one length afterwards have
    theirs again, and preparations for other lengths are forgotten when there are too many."""
    pipe = pipe_of("gpt2", "1f1b", num_microbatches=2, slices=3, num_ranks=2)
    even = pipe.layout
    for lengths, after in pairwise([[9, 40], [40, 9], [9, 40], [30, 30], [5, 5, 8], [40]]):
        pipe.prepare(after)
        inputs, _ = batch_of(lengths)
        loss, _ = one_by_one("gpt2", inputs, inputs)
        assert abs(pipe.step(inputs, inputs) - loss) < BOUND
    rows = tokens(batch=2)
    loss, _ = one_by_one("gpt2", [*rows], [*rows])
    assert abs(pipe.step(rows, rows) - loss) < BOUND
    assert pipe.layout is even
    assert pipe.evaluate(*batch_of([9, 40])) > 0
    assert pipe.evaluate(rows, rows) == pytest.approx(float(loss), rel=1e-9)
    for longest in range(10, 20):
        pipe.prepare([5, longest])
    assert len(pipe._runtime.plans.of_lengths._waiting) == 4


def test_a_plan_that_can_not_be_made_is_refused_by_its_step() -> None:
    pipe = pipe_of("gpt2", make_schedule("1f1b", 2, 2, 3))
    pipe.prepare([12])
    inputs, _ = batch_of([12])
    with refused("a batch of 1 sequences can't be cut into 2 microbatches"):
        pipe.step(inputs, inputs)


def exact_slices(pipe: Pipeline, lengths: list[int]) -> list[tuple[int, ...]]:
    """The slices of the microbatches of a step on gpt2, which is exact."""
    inputs, _ = batch_of(lengths)
    loss, expected = one_by_one("gpt2", inputs, inputs)
    for parameter in pipe.parameters():
        parameter.grad = None
    assert abs(pipe.step(inputs, inputs) - loss) < BOUND
    assert gradient_error(expected, gradients(pipe)) < BOUND
    return [each.slices for each in pipe.last_step.microbatches]


def test_fewer_sequences_than_microbatches_are_one_each() -> None:
    slices = exact_slices(pipe_of("gpt2", num_microbatches=3, slices=2, num_ranks=2), [9, 30])
    assert sorted(map(sum, slices)) == [9, 30]


@pytest.mark.parametrize("name", first_of(["1f1b", "gpipe", "zb-h1"]))
def test_under_a_name_sequences_share_microbatches_by_their_cost(name: str) -> None:
    """In whatever order they come, one long sequence is alone, and the short ones are together."""
    pipe = pipe_of("gpt2", name, num_microbatches=2, slices=4, num_ranks=2)
    for lengths in ([40, 9, 10, 11, 8], [9, 10, 40, 11, 8]):
        slices = exact_slices(pipe, lengths)
        assert {sum(each): len(each) for each in slices} == {40: 4, 38: 3}  # of less attention
        assert pipe.order.ops == make_schedule(name, 2, 2, 4).ops  # backwards are split as the name says


def test_a_schedule_that_was_given_cuts_each_microbatch_into_its_slices() -> None:
    slices = exact_slices(pipe_of("gpt2", make_schedule("1f1b", 2, 2, 4)), [40, 11])
    assert slices == [(10, 10, 10, 10), (3, 3, 3, 2)]


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_documents_within_a_sequence_are_kept_apart(num_microbatches: int) -> None:
    inputs, labels = batch_of([30, 20])
    documents = [torch.arange(30) // 13, torch.arange(20) // 7]
    loss, expected = one_by_one("gpt2", apart(inputs, documents), apart(labels, documents))
    pipe = pipe_of("gpt2", num_microbatches=num_microbatches, slices=3)
    assert abs(pipe.step(inputs, labels, document_ids=documents) - loss) < BOUND
    assert gradient_error(expected, gradients(pipe)) < BOUND


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=5), st.randoms())
def test_no_document_of_a_row_runs_on_into_the_next_sequence(documents: list[list[int]], random: Any) -> None:
    """Whatever numbers they have, and in whatever order sequences share a row."""
    ids = [torch.tensor(each) for each in documents]
    group = random.sample(range(len(ids)), len(ids))
    whole = Batch.of_lengths(torch.device("cpu"), ids, ids, [TokenValues(DOCUMENTS, ids)])
    (row,) = whole.packed([group])
    runs = [torch.unique_consecutive(each, return_counts=True)[1].tolist() for each in (ids[n] for n in group)]
    packed = row.companions[DOCUMENTS.name].rows[0]
    found = torch.unique_consecutive(packed, return_counts=True)[1].tolist()
    assert found == [count for each in runs for count in each]


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


def test_a_step_that_is_only_rehearsed_or_refused_leaves_the_next_one_alone() -> None:
    pipe = pipe_of("gpt2", num_ranks=2, slices=3, num_microbatches=2)
    lists, rows = batch_of([30, 20, 9]), tokens(batch=2, length=LENGTH)
    pipe.step(*lists)
    layout, ran = pipe.layout, pipe.last_step
    pipe.memory_table(rows, rows)
    with refused("num_targets=1, but 46 targets"):
        pipe.step(rows, rows, num_targets=1)
    with refused("torch.no_grad() would give no gradients"), torch.no_grad():
        pipe.step(rows, rows)
    assert (pipe.layout, pipe.last_step) == (layout, ran)
    pipe.step(rows, rows)
    assert pipe.layout is not layout
    assert pipe.last_step.layout is pipe.layout
    assert len(pipe.last_step.microbatches) == 2


# --- within a memory limit --------------------------------------------------------------------------------------------


def limited(limit: float, **settings: Any) -> Pipeline:
    return pipe_of("gpt2", "gpipe", memory_limit=limit, **settings)


def least_limit(*batch: Any, **settings: Any) -> int:
    """What would do, as the refusal of a lower limit says; with it the step runs."""
    with refused("memory.limit=1000 (1.00 kB), but rank .. would hold") as problem:
        limited(1000, **settings).step(*batch)
    least = limit_that_would_do(problem.value)
    assert limited(least, **settings).step(*batch) > 0
    return least


@pytest.mark.more
def test_each_microbatch_has_its_own_memory() -> None:
    """The limit is checked against a table for each: the largest microbatch decides, wherever it stands."""
    inputs, cuts = tokens(batch=4, length=LENGTH), {3: [12, 12], 1: [LENGTH]}
    first, last = (
        least_limit(inputs, inputs, num_ranks=2, microbatches=[[rows, cuts[rows]] for rows in sizes])
        for sizes in ((3, 1), (1, 3))
    )
    assert first == pytest.approx(last, rel=0.1)


@pytest.mark.more
def test_memory_is_limited_for_each_batch() -> None:
    inputs, longer = (batch_of(lengths)[0] for lengths in ([40, 12], [50, 60]))
    pipe = limited(least_limit(inputs, inputs, num_microbatches=2, slices=2), num_microbatches=2, slices=2)
    with refused("would hold .. The longest sequence is inputs[1], of 60 tokens: cut it"):
        pipe.step(longer, longer)


@pytest.mark.more
def test_memory_of_few_batches_is_kept() -> None:
    pipe = limited(1e9, num_microbatches=2, slices=2)
    limit = pipe._runtime.memory_limit
    limit.most_steps = 2
    for length in (10, 11, 12, 10):
        inputs, _ = batch_of([30, length, 2])
        assert pipe.step(inputs, inputs) > 0
    assert (len(limit._tables), len(limit._fitting)) == (0, 2)  # what rows hold follows from a few


# --- planned by what they cost ----------------------------------------------------------------------------------------


def planned(name: str = "llama, tied", **settings: Any) -> Pipeline:
    return pipe_of(name, **{"schedule": "auto", "slices": "auto", "num_ranks": 2} | settings)


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


MIXED = [3, 40, 4, 2, 38, 5]


def test_short_sequences_share_a_microbatch_and_long_ones_are_cut() -> None:
    pipe, (inputs, _) = planned(slices=4), batch_of(MIXED)
    pipe.step(inputs, inputs)
    slices = [each.slices for each in pipe.last_step.microbatches]
    assert sum(map(sum, slices)) == sum(MIXED)
    assert len(slices) < len(MIXED)
    assert 1 < max(map(len, slices)) <= 4
    validate(pipe.order)


def test_a_number_of_microbatches_is_kept() -> None:
    pipe, (inputs, _) = planned(num_microbatches=3), batch_of([5, 6, 7, 8])
    pipe.step(inputs, inputs)
    assert len(pipe.last_step.microbatches) == 3


def test_rows_of_one_length_are_planned_when_they_come() -> None:
    pipe, (inputs, _) = planned(), batch_of([5, 6])
    pipe.step(inputs, inputs)
    assert not pipe.is_tuning
    rows = torch.stack([inputs[0], inputs[0]])
    assert torch.isfinite(pipe.evaluate(rows, rows))  # in fewer slices than longer rows would have
    pipe.step(rows, rows)
    assert not pipe.is_tuning
    assert pipe.order.name == "auto"
    assert pipe.last_step.layout.order.num_microbatches == 1


@pytest.fixture(scope="module")
def rates() -> StageRates:
    found = planned().rates
    assert found is not None
    return found


def test_rates_of_another_pipeline_plan_the_same_steps(rates: StageRates) -> None:
    """Also after JSON, as plan files and checkpoints keep them."""
    inputs, _ = batch_of(MIXED)
    seconds = {op: each * [1e4, 1, 1] for op, each in rates.rates.items()}
    dear = replace(rates, rates=seconds, token_bytes=0.1, latency=1 / 3, bandwidth=1e9 / 7)
    kept = StageRates.from_json(json.loads(json.dumps(dear.to_json())))
    assert (kept.token_bytes, kept.latency, kept.bandwidth, kept.windows) == (0.1, 1 / 3, 1e9 / 7, dear.windows)
    for given_rates in (dear, kept):
        other = planned(schedule="1f1b", rates=given_rates)
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
def test_damaged_rates_are_refused(damage: dict[str, Any], words: str, rates: StageRates) -> None:
    with refused(words):
        StageRates.from_json(rates.to_json() | damage)


def test_rates_that_are_for_other_stages_are_refused(rates: StageRates) -> None:
    with refused("rates of 2 stages for a pipeline of 4. Give those of one with the same"):
        planned(stages_per_rank=2, rates=rates)
    with refused("rates=...: of an nn.Sequential each sequence is a microbatch"):
        Pipeline(torch.nn.Sequential(torch.nn.Embedding(9, 4)), rates=rates)
