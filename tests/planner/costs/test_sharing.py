"""What one of the ranks that share work has of it follows from what each way divides and sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest

import slipstream.options
from slipstream.cost import (
    WAYS,
    CountedCosts,
    CountedOperations,
    Degrees,
    Divided,
    Exchange,
    ModelCount,
    PartCount,
    Sharing,
    Work,
    divided_by,
    load_cluster,
)
from slipstream.cost.sharing import Way, all_degrees
from slipstream.options import SHARED_WORK, SharedWork
from slipstream.profile import count_model
from slipstream.schedule import Op
from support.architectures import ARCHITECTURES

SLICES = (64, 32)
SHARED = [Degrees(*sizes) for sizes in product((1, 2), (1, 2), (1, 2), ("heads", "keys"))]


@pytest.fixture(scope="module")
def model() -> ModelCount:
    return count_model(ARCHITECTURES["mixtral"], 64)


@pytest.mark.parametrize("shares_tokens", [False, True])
def test_ways_to_share_work_commute(shares_tokens: bool) -> None:
    for degrees in SHARED:
        divided = [way.divide(degrees, shares_tokens) for way in WAYS.values()]
        found = {reduce(Divided.beside, order) for order in permutations(divided)}
        assert found == {divided_by(degrees, shares_tokens)}


def test_ranks_have_all_work_together(model: ModelCount) -> None:
    """Products, scores and parameters of all ranks are those of one; nothing is sent where nothing is shared."""
    whole = CountedOperations(model)
    for degrees in SHARED:
        part = CountedOperations(model, degrees)
        num_ranks = degrees.tensor * degrees.context
        for op in (Op.F, Op.I, Op.W):
            one, own = (costs.each_seconds(Work.of_slices(op, SLICES)) for costs in (whole, part))
            if degrees.exchange == "keys" and degrees.context > 1 and op is not Op.W:
                assert (num_ranks * own >= (1 - 1e-12) * one).all()  # the last rank has most scores
            else:
                np.testing.assert_allclose(num_ranks * own, one, rtol=1e-12)
        sharing = Sharing(model, degrees)
        ways = product(model.of_kind, WAYS.values())
        sent = [each for kind, way in ways for each in way.exchanges(sharing, kind, Op.F, 64)]
        assert all(each.num_ranks in (degrees.tensor, degrees.context, degrees.experts) for each in sent)
        assert (sum(each.num_ranks > 1 and each.times > 0 for each in sent) == 0) == (degrees.num_ranks == 1)


def test_degrees_are_tried_where_they_are_possible_or_asked_for(model: ModelCount) -> None:
    """Any number of ranks may gather keys, so that a number of ranks that share slices is tried if asked for."""
    possible = {"tensor": (1, 2), "context": (1, 2), "experts": (1,)}
    unasked = {way.named.choice: None for way in WAYS.values()}
    assert [*all_degrees(possible, unasked)] == [Degrees(t, c) for t, c in product((1, 2), (1, 2))]
    asked: dict[str, Any] = unasked | {"context_parallel": (3,), "tensor_parallel": (2, 3)}
    assert [*all_degrees(possible, asked)] == [Degrees(2, 3)]


def test_the_least_number_of_ranks_holds_all_ways() -> None:
    for degrees in (Degrees(t, c, e) for t, c, e in product((1, 2, 3), (1, 2, 4), (1, 2, 6))):
        copies = degrees.num_ranks // degrees.tensor
        assert copies % degrees.context == copies % degrees.experts == 0
        assert all(smaller % degrees.context or smaller % degrees.experts for smaller in range(1, copies))
        assert degrees.num_shared == degrees.tensor * degrees.context
        assert degrees.mesh["dp"] * degrees.num_shared == degrees.num_ranks


# --- a way of one's own -----------------------------------------------------------------------------------------------


class _RowDegrees(Degrees):
    """Degrees with a way more."""

    rows = 2


class _Rows(Way):
    """Ranks that share the sequences of a microbatch, and tell each other of each layer's output."""

    degree = "rows"
    rule = "must divide the {devices}"

    def possible(self, model: ModelCount) -> tuple[int, ...]:
        return (1, 2)

    def divide(self, degrees: Degrees, shares_tokens: bool) -> Divided:
        return Divided(tokens=getattr(degrees, "rows", 1))

    def exchanges(self, own: Sharing, part: PartCount, op: Op, length: Any) -> Sequence[Exchange]:
        return [Exchange(own.hidden_bytes(length), own.degrees.rows, own.degrees.num_shared)] if op is Op.F else []  # type: ignore[attr-defined]


@pytest.fixture
def shared_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[Degrees]:
    divided_by.cache_clear()
    way = SharedWork("rp", "rows", "row_parallel", "ranks that share sequences", shares_tokens=True)
    monkeypatch.setattr(slipstream.options, "SHARED_WORK", (*SHARED_WORK, way))
    monkeypatch.setitem(WAYS, "rows", _Rows())  # type: ignore[arg-type]
    yield _RowDegrees(1, 2, 1)
    divided_by.cache_clear()  # tuples with other names compare as equal


def test_costs_follow_from_a_way_that_is_added(model: ModelCount, shared_rows: Degrees) -> None:
    """A row of the table and a class: products, bytes, messages, exchanges and the number of ranks are then told."""
    assert (shared_rows.num_ranks, shared_rows.num_shared, shared_rows.token_ranks) == (4, 4, 4)
    costs = CountedOperations(model, shared_rows)
    four = CountedOperations(model, Degrees(1, 4, 1))
    work = Work.of_slices(Op.W, SLICES)
    np.testing.assert_array_equal(costs.each_seconds(work), four.each_seconds(work))  # without attention
    assert costs.message_bytes(64) == four.message_bytes(64)
    on_cluster = CountedCosts(model, load_cluster("h100-dgx"), shared_rows)
    *_, sent = on_cluster.each_exchange(Work.of_slices(Op.F, SLICES))
    hidden = on_cluster.message_bytes(np.array(SLICES))
    expected = [on_cluster.cluster.all_to_all_seconds(each, 2, 4) for each in hidden]
    np.testing.assert_allclose(sent, [expected] * len(model.of_kind))
