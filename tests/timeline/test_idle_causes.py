"""Every wait has its known cause, and waiting and computing add up to the step."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.schedule import Action, Op, Schedule, add_communication, gpipe, one_f_one_b, split_backwards
from slipstream.simulator import simulate
from slipstream.simulator.costs import TableCost, UnitCost
from slipstream.timeline import Cause, Span, Timeline, find_waits, idle_by_cause
from support.examples import examples
from support.schedules import named_schedules

POSITIVE = st.integers(1, 50)


def described(timeline: Timeline) -> list[str]:
    """`rank start-end cause: next awaits before of its rank`."""

    def text(action: Action | None) -> str:
        return "" if action is None else timeline.schedule.text(action)

    return [
        f"{wait.rank} {float(wait.start):g}-{float(wait.end):g} {wait.cause}: "
        f"{text(wait.action)} awaits {text(wait.before)} of {wait.source}"
        for wait in find_waits(timeline)
    ]


def spans(*texts: str) -> tuple[Span, ...]:
    """From `rank action start end`."""
    words = [text.split() for text in texts]
    return tuple(Span(int(w[0]), Action.parse(w[1]), float(w[2]), float(w[3])) for w in words)


@pytest.mark.parametrize("lowered", [False, True])
def test_the_causes_of_a_flush(lowered: bool) -> None:
    """Two ranks, two slices, F 1, B 2, messages 1/4:

    rank 0  F0 F1                  m B1----- B0-----    (4.5+.25 .. 8.75)
    rank 1    m F0 F1 B1----- B0-----
    """
    schedule = gpipe(2, 1, 2)
    timeline = simulate(add_communication(schedule) if lowered else schedule, UnitCost(link=Fraction(1, 4)))
    assert described(timeline) == [
        "0 2-5.25 compute: 0B0.1 awaits 1B0.1 of 1",
        "0 5.25-5.5 message: 0B0.1 awaits 1B0.1 of 1",
        "1 0-1.25 fill: 1F0.0 awaits 0F0.0 of 0",
        "1 7.25-9.5 drain:  awaits  of None",
    ]
    assert idle_by_cause(timeline) == (
        {Cause.COMPUTE: Fraction(13, 4), Cause.MESSAGE: Fraction(1, 4)},
        {Cause.FILL: Fraction(5, 4), Cause.DRAIN: Fraction(9, 4)},
    )


def test_a_send_that_stands_late_keeps_the_other_rank_waiting_for_the_sender() -> None:
    text = (
        "schedule: late\nplacement: 0 1\nmicrobatches: 2\nslices: 1\n"
        "rank 0: 0F0 0SEND_F0 0F1 0RECV_B0 0B0 0SEND_F1 0RECV_B1 0B1\n"
        "rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    )
    timeline = simulate(Schedule.parse(text), UnitCost(link=Fraction(1, 2)))
    # rank 0: F0 0-1, F1 1-2, B0 5-7, and only then F1 leaves; rank 1: F0 1.5-2.5, B0 2.5-4.5, F1 7.5
    assert "1 4.5-7 compute: 1F1 awaits 0F1 of 0" in described(timeline)
    assert "1 7-7.5 message: 1F1 awaits 0F1 of 0" in described(timeline)


MEASURED = (
    "0 0F0 100.2 103",
    "0 0SEND_F0 103.1 103.2",
    "1 1RECV_F0 100 104.5",
    "1 1F0 104.75 106",
    "1 1B0 106.5 108",
    "1 1SEND_B0 108 108.1",
    "0 0RECV_B0 103.2 109",
    "0 0B0 109 110",
)


def test_what_the_executor_adds_is_told_from_waiting() -> None:
    timeline = Timeline(spans(*MEASURED), 2, measured=True)
    assert described(timeline) == [
        "0 100-100.2 overhead: 0F0 awaits  of None",
        "0 103-108 compute: 0B0 awaits 1B0 of 1",
        "0 108-109 message: 0B0 awaits 1B0 of 1",
        "1 100-104.5 fill: 1F0 awaits 0F0 of 0",
        "1 104.5-104.75 overhead: 1F0 awaits  of None",
        "1 106-106.5 overhead: 1B0 awaits  of None",
        "1 108-110 drain:  awaits  of None",
    ]


@pytest.mark.parametrize("skew", [-0.5, -1e-6, 1e-6, 0.5, 3.0])
def test_clocks_that_disagree_change_causes_by_as_much_and_nothing_else(skew: float) -> None:
    """Rank 1's clock is off: effects may come before their reasons."""
    true = Timeline(spans(*MEASURED), 2, measured=True)
    off = Timeline(tuple(Span(s.rank, s.action, s.start + skew * s.rank, s.end + skew * s.rank) for s in true.spans), 2)
    for rank in (0, 1):
        assert sum(idle_by_cause(off)[rank].values()) + off.busy(rank) == pytest.approx(off.makespan)
        assert all(wait.seconds > 0 for wait in find_waits(off))
    for cause in (Cause.COMPUTE, Cause.MESSAGE):
        difference = idle_by_cause(off)[0].get(cause, 0) - idle_by_cause(true)[0][cause]
        assert abs(difference) <= abs(skew) + 1e-9


def test_waiting_for_a_copy_from_the_host() -> None:
    texts = ("0 0F0 0 1", "0 0OFFLOAD0 1 2", "0 0RELOAD0 2.5 5", "0 0B0 5 6")
    timeline = Timeline(spans(*texts), 1)
    assert timeline.busy(0) == 2
    assert idle_by_cause(timeline) == ({Cause.COPY: 4},)
    assert [str(wait.before) for wait in find_waits(timeline)] == ["0OFFLOAD0.0", "0RELOAD0.0"]


def test_a_rank_without_work_and_a_timeline_without_spans() -> None:
    assert described(Timeline(spans("0 0F0 1 3"), 2)) == ["1 1-3 drain:  awaits  of None"]
    assert find_waits(Timeline((), 2)) == ()
    assert idle_by_cause(Timeline((), 2)) == ({}, {})


@st.composite
def simulations(draw: st.DrawFn) -> Timeline:
    """Any schedule of the papers, split, lowered or as it is, with any costs and links."""
    schedule = draw(named_schedules(most=3, most_stages=2))
    if draw(st.booleans()):
        schedule = split_backwards(schedule)
    if draw(st.booleans()):
        schedule = add_communication(schedule, ahead=draw(st.integers(0, 3)))
    exact = draw(st.booleans())
    number = POSITIVE if exact else st.floats(0, 10)
    stages, slices = range(schedule.num_stages), range(schedule.num_slices)
    times = {(g, i, op): draw(number) for g in stages for i in slices for op in (Op.F, Op.B, Op.I, Op.W)}
    return simulate(
        schedule, TableCost(times, [draw(number) for _ in slices], draw(number), Fraction(2) if exact else 2.0)
    )


@examples(150)
@given(simulations())
def test_waiting_and_computing_make_up_the_step(timeline: Timeline) -> None:
    """In a simulation ranks start as soon as they can: nothing is overhead, and what is awaited ends or arrives when
    the wait does."""
    waits, computing = find_waits(timeline), timeline.compute_spans
    for rank in range(timeline.num_ranks):
        own = sorted((wait for wait in waits if wait.rank == rank), key=lambda wait: wait.start)
        idle = sum(wait.seconds for wait in own)
        assert float(idle) == pytest.approx(float(sum(idle_by_cause(timeline)[rank].values())))
        assert float(timeline.busy(rank) + idle) == pytest.approx(float(timeline.makespan))
        assert all(first.end <= second.start for first, second in pairwise(own))
        spans_of_rank = [span for span in computing if span.rank == rank]
        assert not any(span.start < wait.end and wait.start < span.end for wait in own for span in spans_of_rank)
    for wait in waits:
        assert wait.cause in (Cause.FILL, Cause.COMPUTE, Cause.MESSAGE, Cause.DRAIN)
        if wait.before is None:
            assert wait.cause is Cause.DRAIN
            assert all(span.start < wait.end and span.end <= wait.start for span in computing if span.rank == wait.rank)
            continue
        producer = timeline.span_of[wait.before]
        assert producer.rank == wait.source != wait.rank
        if wait.cause is Cause.COMPUTE and not timeline.schedule.is_lowered:
            assert producer.end == wait.end
        if wait.cause is Cause.MESSAGE:
            assert producer.end <= wait.start


@examples(100)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), POSITIVE, POSITIVE)
def test_equal_times_fill_and_drain_by_the_formula(p: int, m: int, s: int, forward: int, backward: int) -> None:
    """Rank r fills for r forwards and drains for r backwards; the rest of (p-1)(f+b) it waits for others."""
    idle = idle_by_cause(simulate(one_f_one_b(p, m, s), UnitCost(forward, backward)))
    for rank, causes in enumerate(idle):
        assert causes.get(Cause.FILL, 0) == rank * forward
        assert causes.get(Cause.DRAIN, 0) == rank * backward
        assert causes.get(Cause.COMPUTE, 0) == (p - 1 - rank) * (forward + backward)
        assert not {Cause.MESSAGE, Cause.OVERHEAD} & set(causes)
