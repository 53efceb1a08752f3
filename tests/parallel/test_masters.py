"""The masters of one process keep small updates, and their buckets hold every parameter once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from slipstream.errors import SlipstreamError
from slipstream.parallel import RankGroup
from slipstream.parallel.gradients import (
    GradientReduction,
    MasterParameters,
    flatten_tensors,
    in_buckets,
    pack_rows,
    rows_of,
    shapes_of_rows,
    take_rows,
    unflatten_tensors,
)
from support.architectures import ARCHITECTURES, build, tokens
from support.parallel.replica import held_by

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6)


def alone(model: nn.Module, masters: MasterParameters, *whole: str) -> GradientReduction:
    return GradientReduction(
        {0: [*model.named_parameters()]}, held_by(RankGroup()), RankGroup(), lambda _: (), masters, whole=whole
    )


def loss(model: nn.Module) -> Tensor:
    return model(input_ids=tokens(length=8), labels=tokens(length=8), use_cache=False).loss


@pytest.mark.parametrize("shard", [False, True])
def test_alone_the_parameters_are_the_masters_and_their_gradients_stay_where_they_are(shard: bool) -> None:
    model = build(ARCHITECTURES["llama"])
    masters = MasterParameters([*model.named_parameters()], held_by(RankGroup()), shard)
    gradients = alone(model, masters)
    assert all(a is b for (_, a), b in zip(masters.named_parameters(), model.parameters(), strict=True))
    memory = []
    for _ in range(2):
        gradients.begin()
        loss(model).backward()
        gradients.reduce(0)
        gradients.finish()
        masters.publish()
        memory.append([parameter.grad for parameter in model.parameters()])
    assert all(first is second for first, second in zip(*memory, strict=True))


def test_masters_of_one_process_collect_gradients_in_their_dtype() -> None:
    model = build(ARCHITECTURES["llama"]).bfloat16()
    masters = MasterParameters([*model.named_parameters()], held_by(RankGroup()), dtype=torch.float32)
    gradients = alone(model, masters)
    for _ in range(2):
        gradients.begin()
        loss(model).backward()
        seen = [parameter.grad.clone() for parameter in model.parameters()]
        gradients.reduce(0)
        gradients.finish()
    for (name, master), parameter, once in zip(masters.named_parameters(), model.parameters(), seen, strict=True):
        assert parameter.grad is None
        assert master.dtype == once.dtype == torch.float32
        assert torch.equal(master.grad, once + once), name
    with torch.no_grad():
        master.add_(1e-3)
    masters.publish()
    assert torch.equal(parameter, master.bfloat16())


def test_a_frozen_parameter_is_its_own_master() -> None:
    model = build(ARCHITECTURES["llama"]).bfloat16()
    model.lm_head.weight.requires_grad_(False)
    masters = dict(
        MasterParameters([*model.named_parameters()], held_by(RankGroup()), dtype=torch.float32).named_parameters()
    )
    assert masters["lm_head.weight"] is model.lm_head.weight
    assert masters["model.norm.weight"].dtype == torch.float32


def test_freezing_later_is_respected_or_refused() -> None:
    model = build(ARCHITECTURES["llama"])
    gradients = alone(model, MasterParameters([*model.named_parameters()], held_by(RankGroup())))
    model.lm_head.weight.requires_grad_(False)
    gradients.begin()
    loss(model).backward()
    gradients.finish()
    assert model.lm_head.weight.grad is None
    for frozen in (True, False):
        model = build(ARCHITECTURES["llama"]).bfloat16()
        masters = MasterParameters([*model.named_parameters()], held_by(RankGroup()), dtype=torch.float32)
        gradients = alone(model, masters)
        parameters = model.named_parameters() if frozen else masters.named_parameters()
        dict(parameters)["lm_head.weight"].requires_grad_(False)
        with pytest.raises(SlipstreamError, match=r"requires_grad of lm_head\.weight was changed"):
            gradients.begin()


def test_masters_that_would_lose_digits_are_refused() -> None:
    model = build(ARCHITECTURES["llama"])
    with pytest.raises(SlipstreamError, match=r"torch\.float32 can't hold the values of .*, which is torch\.float64"):
        MasterParameters([*model.named_parameters()], held_by(RankGroup()), dtype=torch.float32)
    with pytest.raises(SlipstreamError, match=r"Give torch\.float32"):
        MasterParameters([*model.half().named_parameters()], held_by(RankGroup()), dtype=torch.bfloat16)


def test_a_step_that_failed_leaves_nothing_to_the_next() -> None:
    name = "model.embed_tokens.weight"
    model, fresh = build(ARCHITECTURES["llama"]).bfloat16(), build(ARCHITECTURES["llama"]).bfloat16()
    found = []
    for each in (model, fresh):
        masters = MasterParameters([*each.named_parameters()], held_by(RankGroup()), dtype=torch.float32)
        gradients = alone(each, masters, name)
        if each is model:
            gradients.begin()
            loss(each).backward()
        gradients.begin()
        loss(each).backward()
        gradients.reduce(0)
        gradients.finish()
        gradients.deliver(name, each.get_parameter(name).grad)
        assert each.get_parameter(name).grad is None
        found.append([master.grad for _, master in masters.named_parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@given(SHAPES, st.integers(1, 5))
def test_rows_come_back_from_their_owners(shapes: list[list[int]], num_owners: int) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    packed = pack_rows(tensors, num_owners)
    assert packed.shape[0] == num_owners
    for owner in range(num_owners):
        pieces = unflatten_tensors(packed[owner], shapes_of_rows(tensors, owner, num_owners))
        for piece, tensor in zip(pieces, tensors, strict=True):
            assert torch.equal(piece, take_rows(tensor, rows_of(tensor, owner, num_owners)))
    for tensor in tensors:
        rows = [row for owner in range(num_owners) for row in rows_of(tensor, owner, num_owners)]
        assert rows == list(range(len(tensor) if tensor.ndim else 1))


@given(SHAPES)
def test_tensors_come_back_from_a_flat_one(shapes: list[list[int]]) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    for found, tensor in zip(unflatten_tensors(flatten_tensors(tensors), shapes), tensors, strict=True):
        assert torch.equal(found, tensor)


@given(SHAPES, st.integers(1, 200))
def test_buckets_hold_every_parameter_once_and_no_more_than_they_may(shapes: list[list[int]], size: int) -> None:
    dtypes = [torch.float32, torch.bfloat16]
    parameters = [(str(i), nn.Parameter(torch.empty(shape, dtype=dtypes[i % 2]))) for i, shape in enumerate(shapes)]
    buckets = in_buckets(parameters, lambda parameter: parameter.dtype, size)
    assert sorted((name for bucket in buckets for name, _ in bucket), key=int) == [name for name, _ in parameters]
    for bucket in buckets:
        assert len({parameter.dtype for _, parameter in bucket}) == 1
        filled = [parameter for _, parameter in bucket if parameter.numel()]
        assert len(filled) <= 1 or sum(parameter.nbytes for parameter in filled) <= size
