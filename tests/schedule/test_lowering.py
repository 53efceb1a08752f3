"""Lowering writes every message once in an order that can't get stuck, and refuses schedules that could."""

import inspect
import re
import textwrap
from dataclasses import replace

import pytest

from slipstream.schedule import (
    SCHEDULES,
    Action,
    Channel,
    Op,
    Schedule,
    ScheduleError,
    add_communication,
    add_reductions,
    channel,
    check_communication,
    forward_only,
    gpipe,
    make_schedule,
    one_f_one_b,
    receives_in_flight,
    split_backwards,
    validate,
)


def with_row(schedule: Schedule, rank: int, row: str) -> Schedule:
    rows = list(schedule.actions)
    rows[rank] = tuple(map(Action.parse, row.split()))
    return replace(schedule, actions=tuple(rows))


def test_gradients_are_reduced_after_a_stages_last_backward() -> None:
    lines = [line for line in inspect.getdoc(add_reductions).splitlines() if line.startswith("    rank ")]
    reduced = add_reductions(one_f_one_b(2, 2, 1))
    backwards = [[a for a in row if a.op in (Op.B, Op.REDUCE_GRAD)] for row in reduced.actions]
    assert [line.split()[2:] for line in lines] == [
        [str(a) if a.op is Op.REDUCE_GRAD else reduced.text(a)[1:] for a in row] for row in backwards
    ]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("is_lowered", [False, True])
def test_every_stage_is_reduced_once_and_the_run_still_ends(name: str, is_lowered: bool) -> None:
    schedule = make_schedule(name, 2, 3, 2, 2 if SCHEDULES[name].make(2, 1, 1).num_stages > 2 else 1)
    lowered = add_reductions(add_communication(schedule)) if is_lowered else add_communication(add_reductions(schedule))
    check_communication(lowered)
    for stage in range(schedule.num_stages):
        row = lowered.actions[schedule.placement[stage]]
        (place,) = [index for index, action in enumerate(row) if action == Action(Op.REDUCE_GRAD, stage)]
        assert row[place - 1].op in (Op.B, Op.W, Op.SEND_B, Op.REDUCE_GRAD)
        assert row[place - 1].stage >= stage
        assert not any(action.op in (Op.B, Op.I, Op.W) and action.stage == stage for action in row[place:])
    for row in lowered.actions:  # in one order, whatever order a replica's microbatches need
        stages = [action.stage for action in row if action.op is Op.REDUCE_GRAD]
        assert stages == sorted(stages, reverse=True)
    with pytest.raises(ScheduleError, match="gradients are reduced when every backward of the stage is done"):
        validate(_reduced_too_early(lowered))


def _reduced_too_early(schedule: Schedule) -> Schedule:
    """With the first reduction of rank 0 one action earlier."""
    row = list(schedule.actions[0])
    place = next(index for index, action in enumerate(row) if action.op is Op.REDUCE_GRAD)
    last = max(index for index in range(place) if row[index].op in (Op.B, Op.W))
    row.insert(last, row.pop(place))
    return replace(schedule, actions=(tuple(row), *schedule.actions[1:]))


def test_the_docstrings_picture_is_the_schedule() -> None:
    lines = [line for line in inspect.getdoc(add_communication).splitlines() if line.startswith("    rank ")]
    lowered = add_communication(forward_only(gpipe(2, 1, 3)))
    assert str(lowered).endswith(textwrap.dedent("\n".join(lines)))


@pytest.mark.parametrize(
    ("ahead", "row"),
    [
        (0, "1RECV_F0.0 1F0.0 1RECV_F0.1 1F0.1 1RECV_F0.2 1F0.2"),
        (1, "1RECV_F0.0 1RECV_F0.1 1F0.0 1RECV_F0.2 1F0.1 1F0.2"),
        (5, "1RECV_F0.0 1RECV_F0.1 1RECV_F0.2 1F0.0 1F0.1 1F0.2"),
    ],
)
def test_receives_are_posted_ahead(ahead: int, row: str) -> None:
    lowered = add_communication(forward_only(gpipe(2, 1, 3)), ahead)
    assert lowered.actions[1] == tuple(map(Action.parse, row.split()))
    check_communication(lowered)
    assert receives_in_flight(lowered) == {Channel("activations", 0, 1): min(ahead + 1, 3)}


@pytest.mark.parametrize("ahead", [0, 1, 2, 100])
@pytest.mark.parametrize("generator", [gpipe, one_f_one_b])
def test_compute_actions_and_every_message_once(generator: type, ahead: int) -> None:
    for num_stages, num_microbatches, num_slices in [(1, 2, 2), (2, 1, 4), (3, 2, 3), (4, 5, 1), (5, 2, 2)]:
        schedule = generator(num_stages, num_microbatches, num_slices)
        lowered = add_communication(schedule, ahead)
        compute = tuple(tuple(a for a in row if a in schedule.positions) for row in lowered.actions)
        assert compute == schedule.actions
        num_messages = 2 * (num_stages - 1) * num_microbatches * num_slices
        assert len(lowered.positions) == len(schedule.positions) + 2 * num_messages
        check_communication(lowered)


def test_receives_in_flight_do_not_grow_with_microbatches() -> None:
    for schedule in (one_f_one_b(4, 16, 2), one_f_one_b(4, 64, 2), gpipe(4, 16)):
        assert max(receives_in_flight(add_communication(schedule)).values()) == 2


def test_channels() -> None:
    schedule = Schedule("v", ((), ()), placement=(0, 1, 1, 0), num_microbatches=1, num_slices=1)
    for text, expected in {
        "0SEND_F0": Channel("activations", 0, 1),
        "1RECV_F0": Channel("activations", 0, 1),
        "2SEND_F0": Channel("activations", 1, 0),
        "3SEND_B0": Channel("gradients", 0, 1),
        "2RECV_B0": Channel("gradients", 0, 1),
    }.items():
        assert channel(Action.parse(text), schedule) == expected


def test_lowering_refuses_what_is_lowered_wrong_or_behind() -> None:
    schedule = one_f_one_b(2, 2)
    with pytest.raises(ScheduleError, match="has sends and receives already"):
        add_communication(add_communication(schedule))
    with pytest.raises(ScheduleError, match="ahead=-1: a number of compute actions, 0 or more"):
        add_communication(schedule, ahead=-1)
    with pytest.raises(ScheduleError, match=r"0B1 .* waits for 0F1"):
        add_communication(with_row(schedule, 0, "0F0 0B0 0B1 0F1"))


def test_receives_in_another_order_than_sends_are_refused() -> None:
    lowered = add_communication(forward_only(gpipe(2, 1, 2)))
    swapped = with_row(lowered, 1, "1RECV_F0.1 1RECV_F0.0 1F0.0 1F0.1")
    validate(swapped)
    message = (
        "0SEND_F0.0 goes out where rank 1 takes 1RECV_F0.1: "
        "the activations from rank 0 to rank 1 are first in, first out."
    )
    with pytest.raises(ScheduleError, match=re.escape(message)) as caught:
        check_communication(swapped)
    assert ">0SEND_F0.0<" in str(caught.value)
    assert ">1RECV_F0.1<" in str(caught.value)


def test_two_ranks_that_send_before_they_receive_are_refused() -> None:
    """Fine with buffers, stuck without: the classic exchange."""
    schedule = Schedule.parse(
        """\
        schedule: exchange
        placement: 0 1
        microbatches: 2
        slices: 1
        rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1""".replace("        ", "")
    )
    validate(schedule)
    with pytest.raises(ScheduleError) as caught:
        check_communication(schedule)
    assert str(caught.value).startswith(
        "With sends that wait for their receives: The ranks wait for each other forever:\n"
        "  0SEND_F1 (rank 0) waits for 1RECV_F1, which comes after 1SEND_B0 on rank 1: "
        "it can't leave before its receive is posted.\n"
        "  1SEND_B0 (rank 1) waits for 0RECV_B0, which comes after 0SEND_F1 on rank 0: "
        "it can't leave before its receive is posted.\n"
    )
    check_communication(add_communication(one_f_one_b(2, 2)))


def test_a_lowered_schedule_that_lost_a_receive_is_refused() -> None:
    lowered = add_communication(gpipe(2, 1))
    with pytest.raises(ScheduleError, match="0SEND_F0 has no other end"):
        check_communication(with_row(lowered, 1, "1F0 1B0 1SEND_B0"))


def test_split_backwards_sends_before_the_weights() -> None:
    lowered = add_communication(split_backwards(gpipe(2, 1, 2)))
    check_communication(lowered)
    assert " ".join(map(str, lowered.actions[1][-6:])) == "1I0.1 1SEND_B0.1 1W0.1 1I0.0 1SEND_B0.0 1W0.0"
    assert all(action.op not in (Op.I, Op.W) for action in lowered.actions[0])  # the first stage sends no gradient
