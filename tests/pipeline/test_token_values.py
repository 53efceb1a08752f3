"""Whatever travels with the tokens is cut, packed, padded, shared and compared by its rule alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream.model import IGNORED
from slipstream.pipeline.agreement import _checksum
from slipstream.pipeline.batch import Batch
from slipstream.pipeline.cut_batch import SplitBatch, cut_batch
from slipstream.pipeline.execution.action_graphs import signature
from slipstream.pipeline.token_values import DOCUMENTS, LABELS, TokenRule, TokenValues
from slipstream.schedule import SlicedMicrobatch
from support.architectures import BOUND, gradient_error, gradients, tokens
from support.pipelines import make_pipe
from support.ragged_batches import MODELS
from support.weighted_labels import unsplit_weighted_step, weighted_step

CPU = torch.device("cpu")
TEACHER = TokenRule("teacher_tokens", fill=-7, is_shifted=True, num_dims=1)
AXES = TokenRule("axes", fill=5, fill_step=2, num_dims=1)
WIDTHS = {LABELS: (), TEACHER: (2,), AXES: (3,)}


@dataclass
class Sequences:
    """Sequences with values that are all different, in groups that are cut into slices with room for added tokens."""

    documents: list[list[int]]
    groups: list[list[int]]
    slices: list[list[int]]
    values: dict[TokenRule, list[Tensor]]

    @property
    def lengths(self) -> list[int]:
        return [len(each) for each in self.documents]

    @property
    def microbatches(self) -> list[SlicedMicrobatch]:
        return [SlicedMicrobatch(1, tuple(each)) for each in self.slices]

    def batch(self) -> Batch:
        ids = [torch.arange(length) for length in self.lengths]
        others = [TokenValues(DOCUMENTS, [torch.tensor(each) for each in self.documents])]
        others += [TokenValues(rule, self.values[rule]) for rule in (TEACHER, AXES)]
        return Batch.of_lengths(CPU, ids, self.values[LABELS], others)

    def split(self) -> SplitBatch:
        return cut_batch(self.batch(), self.microbatches, 0, self.groups)


def parts_of(draw: st.DrawFn, total: int) -> list[int]:
    ends = draw(st.sets(st.integers(1, total - 1), max_size=3)) if total > 1 else set()
    return [b - a for a, b in pairwise([0, *sorted(ends), total])]


@st.composite
def sequences(draw: st.DrawFn) -> Sequences:
    documents = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=5))
    order = draw(st.permutations(range(len(documents))))
    ends = accumulate(parts_of(draw, len(order)), initial=0)
    groups = [order[a:b] for a, b in pairwise(ends)]
    pads = draw(st.booleans())
    rows = [sum(len(documents[number]) for number in group) for group in groups]
    slices = [parts_of(draw, row + (draw(st.integers(0, 3)) if pads else 0)) for row in rows]
    values = {rule: numbered([len(each) for each in documents], width) for rule, width in WIDTHS.items()}
    return Sequences(documents, groups, slices, values)


def numbered(lengths: Sequence[int], width: Sequence[int]) -> list[Tensor]:
    every = torch.arange(sum(lengths) * (width[0] if width else 1)).view(-1, *width)
    return [*torch.split(every, [*lengths])]


# --- a plain reference ------------------------------------------------------------------------------------------------


def expected_row(case: Sequences, rule: TokenRule, group: Sequence[int], length: int) -> list[Any]:
    def added(value: float) -> Any:
        return [value] * WIDTHS[rule][0] if WIDTHS[rule] else value

    row = []
    for number in group:
        values, documents = case.values[rule][number].tolist(), case.documents[number]
        for place in range(len(values)):
            if not rule.is_shifted:
                row.append(values[place])
            elif place + 1 < len(values) and documents[place] == documents[place + 1]:
                row.append(values[place + 1])
            else:
                row.append(added(rule.fill))
    missing = length - len(row)
    for place in range(missing):
        row.append(added(rule.fill + rule.fill_step * place))
    return row


def expected_parts(values: list[Any], size: int, nothing: Any) -> list[list[Any]]:
    parts: list[list[Any]] = []
    for rank in range(size):
        number = len(values) // size + (rank < len(values) % size)
        begin = sum(map(len, parts)) if rank <= len(values) else len(values)
        parts.append(values[begin : begin + number])
    return [part or [nothing] for part in parts]


@given(sequences())
def test_packed_and_padded_rows_are_cut_as_a_loop_cuts_them(case: Sequences) -> None:
    split = case.split()
    for rule in WIDTHS:
        for m, (group, slices) in enumerate(zip(case.groups, case.slices, strict=True)):
            row = expected_row(case, rule, group, sum(slices))
            assert torch.cat(split.values[rule.name].slices[m], 1)[0].tolist() == row
            assert [each.shape[1] for each in split.values[rule.name].slices[m]] == slices
    counts = [expected_row(case, LABELS, group, 0) for group in case.groups]
    assert split.num_valid == sum(label != IGNORED for row in counts for label in row)


@given(sequences(), st.integers(1, 4))
def test_ranks_that_share_slices_have_the_values_of_their_tokens(case: Sequences, size: int) -> None:
    split = case.split()
    ranks = [split.part(rank, size) for rank in range(size)]
    assert {rank.further_bytes for rank in ranks} == {split.further_bytes} == {2 * (2 + 3) * 8 * split.num_tokens}
    for rule in WIDTHS:
        nothing = [rule.fill] * WIDTHS[rule][0] if WIDTHS[rule] else rule.fill
        for m, pieces in enumerate(split.values[rule.name].slices):
            for i, whole in enumerate(pieces):
                expected = expected_parts(whole[0].tolist(), size, nothing)
                assert [rank.values[rule.name].slices[m][i][0].tolist() for rank in ranks] == expected


@given(sequences(), st.data())
def test_a_value_that_differs_is_noticed(case: Sequences, data: st.DataObject) -> None:
    whole = case.batch()
    name = data.draw(st.sampled_from([*whole.companions]))
    values = whole.companions[name]
    row = data.draw(st.integers(0, len(values.rows) - 1))
    rows = [each.clone() for each in values.rows]
    other = replace(whole, companions={**whole.companions, name: replace(values, rows=rows)})
    assert _checksum(other) == _checksum(whole)
    rows[row].view(-1)[data.draw(st.integers(0, rows[row].numel() - 1))] += 1
    assert _checksum(other) != _checksum(whole)


@given(st.integers(1, 4), st.integers(1, 9), st.data())
def test_rows_of_one_length_are_cut_into_their_microbatches(num_rows: int, length: int, data: st.DataObject) -> None:
    counts = parts_of(data.draw, num_rows)
    microbatches = [SlicedMicrobatch(count, tuple(parts_of(data.draw, length))) for count in counts]
    documents = torch.tensor(
        data.draw(st.lists(st.lists(st.integers(0, 1), min_size=length, max_size=length), min_size=num_rows))
    )[:num_rows]
    teacher = torch.arange(num_rows * length * 2).view(num_rows, length, 2)
    ids = torch.arange(num_rows * length).view(num_rows, length)
    others = [TokenValues(TEACHER, teacher), TokenValues(DOCUMENTS, documents)]
    split = cut_batch(Batch.of(CPU, ids, ids, others), microbatches, 0)
    first = 0
    for m, microbatch in enumerate(microbatches):
        for i, (a, b) in enumerate(pairwise(accumulate(microbatch.slices, initial=0))):
            found = split.values[TEACHER.name].slices[m][i]
            assert found.shape == (microbatch.num_sequences, b - a, 2)
            for row in range(microbatch.num_sequences):
                for place in range(a, b):
                    own = documents[first + row]
                    goes_on = place + 1 < length and own[place] == own[place + 1]
                    expected = teacher[first + row, place + 1].tolist() if goes_on else [TEACHER.fill] * 2
                    assert found[row, place - a].tolist() == expected
        first += microbatch.num_sequences
    twice = split.twice(0)
    assert [len(twice.values[name].slices) for name in twice.values] == [2, 2]
    assert signature(split) != signature(replace(split, values={LABELS.name: split.values[LABELS.name]}))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float64], ids=str)
def test_values_have_any_dtype(dtype: torch.dtype) -> None:
    """As they are made by a policy, or a teacher, under inference mode."""
    rule = TokenRule("mask", fill=1, is_shifted=True)
    with torch.inference_mode():
        values = [torch.tensor([0, 1, 0], dtype=dtype), torch.tensor([1, 0], dtype=dtype)]
    ids = [torch.arange(3), torch.arange(2)]
    whole = Batch.of_lengths(CPU, ids, ids, [TokenValues(rule, values)])
    split = cut_batch(whole, [SlicedMicrobatch(1, (3, 4))], 0, [[1, 0]])
    found = torch.cat(split.values["mask"].slices[0], 1)
    assert (found.dtype, found.is_inference()) == (dtype, False)
    assert found.tolist() == torch.tensor([[0, 1, 1, 0, 1, 1, 1]], dtype=dtype).tolist()
    other = [values[0], torch.ones_like(values[1])]
    assert _checksum(Batch.of_lengths(CPU, ids, ids, [TokenValues(rule, other)])) != _checksum(whole)


# --- in a step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(24, 24, 24), (24, 17, 9)], ids=str)
def test_values_go_to_the_prediction_of_their_labels(lengths: tuple[int, ...]) -> None:
    """Of rows, and of sequences that share one: loss and gradients are those of the unsplit model."""
    generator = torch.Generator().manual_seed(0)
    ids = [tokens(batch=1, length=length, seed=length)[0] for length in lengths]
    advantages = [torch.rand(length, dtype=torch.float64, generator=generator) for length in lengths]
    model = copy.deepcopy(MODELS["gpt2"])
    expected = unsplit_weighted_step(model, ids, advantages)
    pipe = make_pipe(copy.deepcopy(MODELS["gpt2"]), slices=3, num_ranks=2, num_microbatches=2)
    if len({*lengths}) == 1:
        loss = weighted_step(pipe, torch.stack(ids), torch.stack(advantages))
    else:
        loss = weighted_step(pipe, ids, advantages)
    assert abs(loss - expected) < BOUND
    assert gradient_error(gradients(model), gradients(pipe)) < BOUND
