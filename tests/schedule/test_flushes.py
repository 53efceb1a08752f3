"""Gradient accumulation over flushes repeats one flush, with one flush's memory."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.schedule import (
    SCHEDULES,
    Action,
    Op,
    ScheduleError,
    add_communication,
    check_communication,
    gpipe,
    in_flushes,
    make_schedule,
    one_f_one_b,
    validate,
)
from slipstream.simulator import simulate
from slipstream.simulator.costs import UnitCost
from support.examples import examples


def test_the_docstrings_picture_is_the_timeline() -> None:
    lines = [line for line in inspect.getdoc(in_flushes).splitlines() if line.startswith("    rank ")]
    picture = textwrap.dedent("\n".join(lines))
    assert simulate(in_flushes(gpipe(2, 2), 2), UnitCost(backward=1)).to_text() == picture


@examples(60)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
def test_memory_is_one_flushs_and_the_step_no_longer_than_flushes_in_a_row(
    name: str, p: int, m: int, s: int, num_flushes: int
) -> None:
    once = make_schedule(name, p, m, s, max(v for v in (1, 2) if v in SCHEDULES[name].stages_per_rank))
    repeated = in_flushes(once, num_flushes)
    check_communication(add_communication(repeated))
    assert repeated.num_microbatches == num_flushes * m
    one, all_of_them = simulate(once, UnitCost()), simulate(repeated, UnitCost())
    assert all_of_them.peak_memory == one.peak_memory
    assert all_of_them.makespan <= num_flushes * one.makespan
    assert num_flushes > 1 or repeated == once


def test_gradients_are_reduced_once_and_documents_repeat() -> None:
    plain = one_f_one_b(2, 2, 2)
    rows = tuple((*row, Action(Op.REDUCE_GRAD, rank)) for rank, row in enumerate(plain.actions))
    schedule = in_flushes(replace(plain, actions=rows, reach=((0, 0), (0, 1))), 2)
    validate(schedule)
    assert schedule.reach == ((0, 0), (0, 1), (0, 0), (0, 1))
    for rank, row in enumerate(schedule.actions):
        assert [action.op for action in row].index(Op.REDUCE_GRAD) == len(row) - 1
        assert [a.microbatch for a in row if a.op is Op.F] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert row[-1] == Action(Op.REDUCE_GRAD, rank)


def test_refusals() -> None:
    with pytest.raises(ScheduleError, match="num_flushes=0: give 1 or more"):
        in_flushes(gpipe(2, 2), 0)
    with pytest.raises(ScheduleError, match="gpipe has sends and receives already; repeat it before"):
        in_flushes(add_communication(gpipe(2, 2)), 2)
