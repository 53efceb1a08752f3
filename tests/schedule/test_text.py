"""Actions and schedules survive their text form, and the parser refuses everything else."""

import contextlib
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import SlipstreamError
from slipstream.schedule import (
    COMMUNICATION,
    Action,
    Op,
    Schedule,
    ScheduleError,
    forward_only,
    freeze_stages,
    gpipe,
    make_schedule,
    validate,
)

numbers = st.integers(0, 10**6)
FAR = {Op.SEND_E, Op.RECV_E}  # always with a peer
slice_actions = st.builds(
    Action,
    st.sampled_from([op for op in Op if op not in FAR | {Op.REDUCE_GRAD}]),
    numbers,
    numbers,
    numbers,
    st.just(-1),
)
far_actions = st.builds(Action, st.sampled_from(sorted(COMMUNICATION)), numbers, numbers, numbers, numbers)
actions = slice_actions | far_actions | numbers.map(lambda stage: Action(Op.REDUCE_GRAD, stage))


@pytest.mark.parametrize(
    ("action", "text", "text_of_one_slice"),
    [
        (Action(Op.F, 2, 0, 3), "2F0.3", "2F0.3"),
        (Action(Op.F, 2, 0, 0), "2F0.0", "2F0"),
        (Action(Op.SEND_F, 2, 10, 0), "2SEND_F10.0", "2SEND_F10"),
        (Action(Op.REDUCE_GRAD, 2), "2REDUCE_GRAD", "2REDUCE_GRAD"),
    ],
)
def test_text(action: Action, text: str, text_of_one_slice: str) -> None:
    assert str(action) == action.text(num_slices=4) == text
    assert action.text(num_slices=1) == text_of_one_slice
    assert Action.parse(text) == Action.parse(text_of_one_slice) == action


@given(actions, st.text(alphabet="012.FBW_ \n", min_size=1))
def test_text_round_trips_and_nothing_around_it_is_ignored(action: Action, extra: str) -> None:
    """With more it either makes another action, with another text, or is refused."""
    assert Action.parse(str(action)) == action
    for text in (f"{action}{extra}", f"{extra}{action}"):
        with contextlib.suppress(ScheduleError):
            assert str(Action.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "2F", "F0", "2X0", "2f0", "2F0.", "2F0.3x", "2F0.3 ", " 2F0", "2F0\n", "2F-1", "02F0", "2F00"),
        *("2F0.3.1", "2REDUCE_GRAD0", "2SEND0", "2RECV_F", "٢F0"),
    ],
)
def test_parser_refuses(text: str) -> None:
    with pytest.raises(SlipstreamError, match=re.escape(f"{text!r} is not an action")):
        Action.parse(text)


@pytest.mark.parametrize(("send", "receive"), [("2SEND_F1.3", "3RECV_F1.3"), ("3SEND_B1.3", "2RECV_B1.3")])
def test_both_ends_of_a_message(send: str, receive: str) -> None:
    assert Action.parse(send).other_end == Action.parse(receive)
    assert Action.parse(receive).other_end == Action.parse(send)


def test_schedule_text() -> None:
    schedule = replace(gpipe(2, 1, 2), reach=((0, 1),))
    text = """\
schedule: gpipe
placement: 0 1
microbatches: 1
slices: 2
reach 0: 0 1
rank 0: 0F0.0 0F0.1 0B0.1 0B0.0
rank 1: 1F0.0 1F0.1 1B0.1 1B0.0"""
    assert str(schedule) == text
    assert Schedule.parse(text) == Schedule.parse(text + "\n") == schedule
    empty_rank = Schedule("one stage, two ranks", ((Action(Op.F, 0),), ()), (0,), 1, 1)
    assert Schedule.parse(str(empty_rank)) == empty_rank


def test_the_text_of_a_ragged_schedule_has_each_count() -> None:
    schedule = make_schedule("1f1b", 2, 3, [3, 1, 2])
    assert "microbatches: 3\nslices: 3 1 2\nrank 0: 0F0.0 0F0.1 0F0.2 0F1.0 0B0.2 " in str(schedule)
    assert schedule.num_slices == 3
    assert schedule.is_ragged
    assert "slices: 2\n" in str(make_schedule("1f1b", 2, 3, [2, 2, 2]))


def test_frozen_stages_follow_from_the_backwards_whether_the_text_says_how_many_or_not() -> None:
    """Older texts do."""
    frozen = freeze_stages(gpipe(3, 1, 2), 2)
    assert frozen.num_frozen_stages == 2
    assert [frozen.trains(stage) for stage in range(3)] == [False, False, True]
    text = str(frozen)
    assert "frozen" not in text
    older = text.replace("slices: 2", "slices: 2\nfrozen stages: 2")
    assert Schedule.parse(text) == Schedule.parse(older) == frozen
    validate(Schedule.parse(older))
    with pytest.raises(ScheduleError, match=r"'frozen stages: 1' doesn't fit .* the first stage with a backward is 2"):
        Schedule.parse(older.replace("stages: 2", "stages: 1"))
    evaluation = forward_only(frozen)
    assert Schedule.parse(str(evaluation).replace("slices: 2", "slices: 2\nfrozen stages: 2")) == evaluation
    assert evaluation.num_frozen_stages == 0
    gap = without_last_backwards(frozen)
    with pytest.raises(ScheduleError, match="Stage 1, microbatch 0, slice 0 has F; it needs F and B"):
        validate(gap)


def without_last_backwards(schedule: Schedule) -> Schedule:
    """A stage in the middle has no backwards, one before it has."""
    backwards = (Action(Op.B, 0, 0, 1), Action(Op.B, 0, 0, 0))
    first, *rest = schedule.actions
    return replace(schedule, actions=((*first, *backwards), *rest))


def test_rows_of_numbers_are_what_a_user_would_write() -> None:
    schedule = make_schedule("zb-v", 3, 2, 2, 2)
    written = replace(schedule, actions=tuple(schedule.actions))
    assert isinstance(written.actions, tuple)
    assert schedule == written == Schedule.parse(str(schedule))
    assert written == schedule
    assert (hash(schedule), schedule.checksum, schedule.kinds) == (hash(written), written.checksum, written.kinds)
    assert schedule != replace(written, actions=written.actions[::-1])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("slices: 2", "slices: 2\nslices: 2", "'slices: 2' comes twice"),
        ("slices: 2", "slices 2", "'slices 2' has no colon"),
        ("slices: 2", "", "they must be, in this order"),
        ("slices: 2", "slices: two", "as in 'slices: 4' for all microbatches, or 'slices: 3 1 2'"),
        ("slices: 2", "slices: 2 3", "give 1 microbatches 1 to 3 slices each"),
        ("placement: 0 1", "placement: 0 x", "needs whole numbers, as in 'placement: 0 1'"),
        ("slices: 2", "slices: 0", "at least one stage, rank, microbatch and slice"),
        ("placement: 0 1", "placement: 0 2", "Stage 1 is placed on rank 2; the ranks are 0 to 1"),
        ("rank 1:", "rank 2:", "they must be, in this order"),
        ("rank 1:", "extra: 1\nrank 1:", "they must be, in this order"),
        ("1F0.0", "1F0.0x", "rank 1: '1F0.0x' is not an action"),
        ("rank 0:", "reach 0: 0 2\nrank 0:", "reach[0][1] is 2; slice 1 attends to itself and earlier"),
        ("rank 0:", "reach 0: 0\nrank 0:", "one row of 2 for each of 1 microbatches"),
        ("schedule: gpipe", "schedule:", "one line of text"),
    ],
)
def test_schedule_parser_refuses(old: str, new: str, message: str) -> None:
    text = str(gpipe(2, 1, 2))
    assert old in text
    with pytest.raises(ScheduleError, match=re.escape(message)):
        Schedule.parse(text.replace(old, new))
