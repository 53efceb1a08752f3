"""Every generated schedule is valid for every count, and looks like the picture in its docstring."""

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.schedule import (
    SCHEDULES,
    Op,
    ScheduleError,
    add_communication,
    check_communication,
    interleaved_one_f_one_b,
    make_schedule,
    validate,
)
from slipstream.simulator import simulate
from slipstream.simulator.costs import UnitCost
from support.examples import examples

PICTURED = {
    "gpipe": (2, 2, 2),
    "1f1b": (2, 2, 2),
    "interleaved-1f1b": (2, 4, 1, 2),
    "breadth-first": (2, 3, 1, 2),
    "zb-h1": (2, 2, 2),
    "zb-h2": (2, 2, 2),
    "zb-v": (2, 3, 1),
    "v-half": (3, 3, 1),
    "v-min": (3, 3, 1),
}


def picture(function: Callable[..., Any]) -> str:
    """The lines of the docstring that begin with `rank`."""
    lines = [line for line in inspect.getdoc(function).splitlines() if line.startswith("    rank ")]
    return textwrap.dedent("\n".join(lines))


@pytest.mark.parametrize(("name", "counts"), PICTURED.items(), ids=PICTURED)
def test_the_docstrings_picture_is_the_timeline(name: str, counts: tuple[int, ...]) -> None:
    timeline = simulate(SCHEDULES[name].make(*counts), UnitCost(backward=1))
    assert picture(SCHEDULES[name].make) == timeline.to_text()


@examples(50)
@given(st.integers(1, 8), st.integers(1, 7), st.integers(1, 6), st.integers(1, 4))
def test_interleaving_with_lead_one_is_valid_and_lowers(p: int, m: int, s: int, v: int) -> None:
    check_communication(add_communication(interleaved_one_f_one_b(p, m, s, v, lead=1)))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_of_small_counts_is_valid(name: str) -> None:
    for p in range(1, 5):
        for m in range(1, 5):
            for s in range(1, 4):
                for v in (v for v in (1, 2, 3) if v in SCHEDULES[name].stages_per_rank):
                    schedule = make_schedule(name, p, m, s, v)
                    validate(schedule)
                    assert make_schedule(name, p, m, [s] * m, v) == schedule
                    assert (schedule.name, schedule.num_ranks, schedule.num_stages) == (name, p, p * v)
                    assert (schedule.num_microbatches, schedule.num_slices) == (m, s)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v", "v-half", "v-min"])
def test_backwards_are_split(name: str) -> None:
    schedule = SCHEDULES[name].make(2, 2, 2)
    assert {action.op for row in schedule.actions for action in row} == {Op.F, Op.I, Op.W}


def test_without_a_second_stage_interleaving_is_1f1b_and_breadth_first_is_gpipe_turned_round() -> None:
    for p, m, s in [(1, 2, 3), (3, 4, 1), (4, 3, 5), (4, 2, 1)]:
        assert interleaved_one_f_one_b(p, m, s, 1, lead=1).actions == SCHEDULES["1f1b"].make(p, m, s).actions
        forward = [row[: m * s] for row in SCHEDULES["gpipe"].make(p, m, s).actions]
        assert [row[: m * s] for row in SCHEDULES["breadth-first"].make(p, m, s, 1).actions] == forward


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("counts", [(0, 1, 1), (1, 0, 1), (1, 1, -2)])
def test_counts_below_one_are_refused(name: str, counts: tuple[int, int, int]) -> None:
    with pytest.raises(ScheduleError, match=rf"^{name} needs at least 1 of \w+, not (0|-2)\.$"):
        SCHEDULES[name].make(*counts)


@pytest.mark.parametrize("lead", [0, 3])
def test_other_leads_are_refused(lead: int) -> None:
    with pytest.raises(ScheduleError, match=f"lead={lead}: give 2, .* or 1"):
        interleaved_one_f_one_b(2, 2, 2, 2, lead=lead)


def test_a_schedule_by_name_is_the_generators() -> None:
    assert make_schedule("1f1b", 3, 4, 2) == SCHEDULES["1f1b"].make(3, 4, 2)
    assert make_schedule("zb-v", 3, 4, 2, 2) == SCHEDULES["zb-v"].make(3, 4, 2)
    assert make_schedule("breadth-first", 3, 4, 2, 5) == SCHEDULES["breadth-first"].make(3, 4, 2, 5)


@pytest.mark.parametrize(
    ("name", "stages_per_rank", "message"),
    [
        ("1f2b", 1, "schedule='1f2b' is not known; did you mean '1f1b'? Choose one of gpipe, 1f1b, "),
        ("ZB-V", 2, "schedule='ZB-V' is not known; did you mean 'zb-v'?"),
        ("interleaved", 2, "did you mean 'interleaved-1f1b'?"),
        ("?", 1, "schedule='?' is not known. Choose one of gpipe, "),
        ("gpipe", 2, "stages_per_rank=2, but the schedule 'gpipe' has exactly 1. Give stages_per_rank=1, "),
        ("1f1b", 3, "or a schedule that can have 3: interleaved-1f1b, breadth-first."),
        ("v-min", 1, "stages_per_rank=1, but the schedule 'v-min' has exactly 2. Give stages_per_rank=2"),
        (
            "breadth-first",
            0,
            "stages_per_rank=0, but the schedule 'breadth-first' has at least 1. Give stages_per_rank=1",
        ),
    ],
)
def test_what_a_name_does_not_allow_is_refused(name: str, stages_per_rank: int, message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        make_schedule(name, 2, 2, 2, stages_per_rank)
