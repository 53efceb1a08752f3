"""The table of operations is open: a row is all that an operation needs to be read, checked, timed and drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from slipstream.schedule import (
    OPERATIONS,
    Action,
    Held,
    Lane,
    Op,
    Operation,
    Schedule,
    ScheduleError,
    add_communication,
    add_operation,
    check_communication,
    one_f_one_b,
    rules,
    validate,
)
from slipstream.schedule.action import NUMBERS, OPS
from slipstream.simulator import UnitCost, activation_peaks, simulate, step_seconds
from slipstream.timeline import draw_timelines
from support.pictures import drawn_text

GATHERING = 0.5  # seconds


@dataclass(frozen=True)
class ShardedCost(UnitCost):
    """Gathering a stage's weights takes time on the lane of copies, and 7 bytes while they are whole."""

    def copy_seconds(self, copy: Action) -> float:
        return GATHERING if copy.op == "UNSHARD" else 0

    def own_bytes(self, action: Action) -> float:
        return 7


@pytest.fixture
def sharding() -> Iterator[tuple[Op, Op]]:
    """UNSHARD and RESHARD, which exist in this test alone."""
    reshard = add_operation(
        "RESHARD",
        Operation(
            lambda action, _: (action.with_op(Op("UNSHARD")), action.with_op(Op.F)),
            "weights are dropped once they have been used",
            lane=Lane.COPIES,
            seconds=0,
            is_timed=False,
            frees=Held.OWN,
            label="weights dropped",
        ),
    )
    unshard = add_operation(
        "UNSHARD",
        Operation(
            lambda *_: (),
            "weights may be gathered at any time",
            serves=frozenset({Op.F}),
            needed="a forward needs its stage's whole weights",
            undone_by=reshard,
            lane=Lane.COPIES,
            seconds=0,
            is_timed=False,
            takes=Held.OWN,
            label="weights gathered",
            colors=("#123456", "#123456"),
        ),
    )
    yield unshard, reshard
    for op in (unshard, reshard):
        del OPERATIONS[op]
        OPS.remove(op)
        del NUMBERS[op]
        delattr(Op, op)
    rules._helpers.cache_clear()


def sharded(schedule: Schedule, unshard: Op, reshard: Op) -> Schedule:
    """Gathers a stage's weights right before each forward, and drops them right after it."""

    def around(action: Action) -> tuple[Action, ...]:
        return (action.with_op(unshard), action, action.with_op(reshard)) if action.op is Op.F else (action,)

    rows = tuple(tuple(each for action in row for each in around(action)) for row in schedule.actions)
    return replace(schedule, actions=rows)


def test_an_operation_that_is_added_to_the_table_is_checked_timed_and_drawn(
    sharding: tuple[Op, Op], tmp_path: Path
) -> None:
    plain = one_f_one_b(2, 1, 2)
    schedule = sharded(plain, *sharding)
    assert Schedule.parse(str(schedule)) == schedule
    assert "0UNSHARD0.1 0F0.1 0RESHARD0.1" in str(schedule)
    validate(schedule)
    lowered = add_communication(schedule)
    check_communication(lowered)

    cost = ShardedCost()
    timeline = simulate(schedule, cost)
    # Both of the first rank's forwards wait; the second one's weights for its first are there before its input.
    assert timeline.makespan == simulate(plain, UnitCost()).makespan + 2 * GATHERING == step_seconds(schedule, cost)
    assert simulate(lowered, cost).makespan == timeline.makespan
    assert activation_peaks(schedule, cost) == list(timeline.peak_memory) == [1 + 7 + 1, 1 + 7 + 1]

    draw_timelines(tmp_path / "picture.svg", timeline)
    assert {"weights gathered", "weights dropped"} <= drawn_text(tmp_path / "picture.svg")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0UNSHARD0 0F0 0B0", "0UNSHARD0 is never undone: add 0RESHARD0 after it"),
        ("0F0 0UNSHARD0 0RESHARD0 0B0", r"0F0 \(rank 0\) waits for 0UNSHARD0, .*: a forward needs its stage's whole"),
        ("0UNSHARD0 0RESHARD0 0F0 0B0", r"0RESHARD0 \(rank 0\) waits for 0F0, .*: weights are dropped once"),
        ("0UNSHARD0 0UNSHARD0 0F0 0RESHARD0 0B0", "0UNSHARD0 comes a second time"),
    ],
)
@pytest.mark.usefixtures("sharding")
def test_its_place_is_checked_by_its_row(row: str, message: str) -> None:
    text = f"schedule: mine\nplacement: 0\nmicrobatches: 1\nslices: 1\nrank 0: {row}"
    with pytest.raises(ScheduleError, match=message):
        validate(Schedule.parse(text))


def test_an_operation_without_a_row_is_unknown() -> None:
    with pytest.raises(ScheduleError, match="'0UNSHARD0' is not an action"):
        Action.parse("0UNSHARD0")
    with pytest.raises(ValueError, match="'UNSHARD' is no operation"):
        Op("UNSHARD")
