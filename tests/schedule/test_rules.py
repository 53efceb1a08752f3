"""What breaks the rules of order is reported with grid and rule; lowering writes each message once, none gets stuck.

Waits that last too long are reported by the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable
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
    predecessors,
    receives_in_flight,
    report_wait,
    split_backwards,
    validate,
)


def schedule_of(*rows: str, placement: tuple[int, ...] | None = None, **fields: object) -> Schedule:
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    counts = [1 + max(getattr(a, what) for row in actions for a in row) for what in ("microbatch", "slice")]
    schedule = Schedule("test", actions, placement or tuple(range(len(rows))), *counts)
    return replace(schedule, **fields)


FOLDED = schedule_of("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0", placement=(0, 1, 1, 0))


@pytest.mark.parametrize(
    ("schedule", "predecessors_of"),
    [
        (gpipe(3, 2, 4), {"0F1.0": "", "1F1.2": "0F1.2 1F1.1", "1B1.2": "1F1.2 1B1.3 2B1.2", "2B1.3": "2F1.3"}),
        (  # a document boundary before slice 1; a window of two slices
            replace(gpipe(1, 2, 4), reach=((0, 1, 1, 1), (0, 0, 1, 2))),
            {"0F0.1": "", "0F0.3": "0F0.1 0F0.2", "0B0.0": "0F0.0", "0B0.1": "0F0.1 0B0.2 0B0.3"}
            | {"0F1.3": "0F1.2", "0B1.1": "0F1.1 0B1.2"},
        ),
        (
            schedule_of(
                "0F0.0 0F0.1 0B0.1 0B0.0 0REDUCE_GRAD", "1F0.0 1F0.1 1I0.1 1R0.0 1I0.0 1W0.0 1W0.1 1REDUCE_GRAD"
            ),
            {"0B0.1": "0F0.1 1I0.1", "1I0.0": "1F0.0 1I0.1 1R0.0", "1R0.0": "1F0.0", "1W0.1": "1I0.1"}
            | {"1REDUCE_GRAD": "1W0.0 1W0.1", "0REDUCE_GRAD": "0B0.0 0B0.1"},
        ),
        (FOLDED, {"1F0": "0F0.0"}),
        (  # over messages between ranks only
            add_communication(FOLDED),
            {"1F0": "1RECV_F0.0", "1RECV_F0": "0SEND_F0.0", "0SEND_F0": "0F0.0", "2F0": "1F0.0"}
            | {"2B0": "2F0.0 2RECV_B0.0", "3SEND_B0": "3B0.0"},
        ),
        (
            schedule_of("0F0.0 0OFFLOAD0.0 0F0.1 0R0.1 0B0.1 0RELOAD0.0 0R0.0 0I0.0 0W0.0"),
            {"0OFFLOAD0.0": "0F0.0", "0RELOAD0.0": "0OFFLOAD0.0", "0R0.0": "0F0.0 0RELOAD0.0", "0R0.1": "0F0.1"}
            | {"0I0.0": "0F0.0 0B0.1 0R0.0 0RELOAD0.0"},
        ),
        (
            schedule_of("0E0 0F0 0V0 0B0 0VW0 0EW0", "1E0 1F0 1V0 1L0 1B0 1VW0 1EW0"),
            {"0F0": "0E0.0 1E0.0", "0E0": "", "1E0": "", "0V0": "1F0.0", "1L0": "0V0.0 1V0.0", "1B0": "1F0.0 1L0.0"}
            | {"0VW0": "1L0.0", "1EW0": "0B0.0"},
        ),
    ],
    ids=["causal slices", "reach", "split backward", "two stages a rank", "messages", "offload", "vocabulary"],
)
def test_predecessors(schedule: Schedule, predecessors_of: dict[str, str]) -> None:
    validate(schedule)
    for action, expected in predecessors_of.items():
        found = predecessors(Action.parse(action), schedule)
        assert sorted(map(str, found)) == sorted(expected.split()), action


def error(schedule: Schedule) -> str:
    with pytest.raises(ScheduleError) as caught:
        validate(schedule)
    return str(caught.value)


def test_wrong_order_on_one_rank_is_marked_with_its_rule() -> None:
    schedule = schedule_of("0F0.0 0F0.1 0B0.0 0B0.1", "1F0.0 1F0.1 1B0.1 1B0.0")
    assert error(schedule) == (
        "This order can't run:\n"
        "  0B0.0 (rank 0) waits for 0B0.1, which comes after it on the same rank: slice 1 attends to slice 0 "
        "and leaves gradients there, so backwards of a microbatch run last in, first out.\n"
        "step    0      1      2       3\n"
        "rank 0  0F0.0  0F0.1 >0B0.0<  0B0.1\n"
        "rank 1  1F0.0  1F0.1  1B0.1   1B0.0"
    )


def test_a_deadlock_names_its_cycle() -> None:
    schedule = schedule_of("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1")
    assert error(schedule) == (
        "The ranks wait for each other forever:\n"
        "  0B0 (rank 0) waits for 1B0, which comes after 1F1 on rank 1: "
        "a backward needs the gradient from the stage after it.\n"
        "  1F1 (rank 1) waits for 0F1, which comes after 0B0 on rank 0: "
        "a forward needs the output of the stage before it.\n"
        "step    0     1     2    3\n"
        "rank 0  0F0  >0B0<  0F1  0B1\n"
        "rank 1 >1F1<  1F0   1B0  1B1"
    )


TIED = "0E0 0F0 0V0 0L0 0B0 0VW0 0EW0"  # with a spread head that is tied to the embedding


@pytest.mark.parametrize(
    ("early", "late", "rule"),
    [
        ("F", "E", "the first stage's forward needs every rank's part of the embedding"),
        ("V", "F", "logits need the output of the last stage"),
        ("L", "V", "the loss needs every rank's logits"),
        ("B", "L", "the last stage's backward needs the loss"),
        ("VW", "L", "the weight gradient of a part of the head needs the loss over all parts"),
        ("EW", "B", "the gradient of a part of the embedding needs that of the first stage's input"),
    ],
)
def test_parts_of_a_vocabulary_in_a_wrong_order_are_marked_with_their_rule(early: str, late: str, rule: str) -> None:
    validate(schedule_of(TIED))
    row = [each for each in TIED.split() if each != f"0{early}0"]
    row.insert(row.index(f"0{late}0"), f"0{early}0")
    message = error(schedule_of(" ".join(row)))
    assert f"0{early}0 (rank 0) waits for 0{late}0, which comes after it on the same rank: {rule}." in message
    assert f">0{early}0<" in message


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["0F0 0F1 0B0"], "Stage 0, microbatch 1, slice 0 has F; it needs F and B, or F, I and W."),
        (["0F0 0B0 0I0 0W0"], "slice 0 has F, B, I, W; it needs"),
        (["0F0 0W0"], "slice 0 has F, W; it needs"),
        (["0F0 0I0"], "slice 0 has F, I; it needs"),
        (["0F0 0F0 0B0"], "0F0 comes a second time."),
        (["0F0 1F0 0B0", "1B0"], "1F0 stands on rank 0, but stage 1 is placed on rank 1."),
        (["0F0 2F0 0B0", "1F0 1B0"], "2F0 has stage 2, but the schedule's are 0 to 1."),
        (["0F0 0SEND_F0 0B0", "1F0 1B0"], "0SEND_F0 has no other end: the schedule lacks 1RECV_F0."),
        (["0F0 0B0 0SEND_B0"], "0SEND_B0 has no other end: there is no stage -1."),
        (["0F0 0W0 0I0"], "0W0 (rank 0) waits for 0I0, which comes after it on the same rank: a weight"),
        (["0F0 0B0 0R0"], "0B0 (rank 0) waits for 0R0, which comes after it on the same rank"),
        (["0F0 0RELOAD0 0OFFLOAD0 0B0"], "0RELOAD0 (rank 0) waits for 0OFFLOAD0, which comes after it"),
        (["0F0 0RELOAD0 0B0"], "0RELOAD0 (rank 0) waits for 0OFFLOAD0, which the schedule lacks: what comes back"),
        (["0OFFLOAD0 0F0 0RELOAD0 0B0"], "0OFFLOAD0 (rank 0) waits for 0F0, which comes after it"),
        (["0F0 0OFFLOAD0 0B0 0RELOAD0"], "0B0 (rank 0) waits for 0RELOAD0, which comes after it on the same"),
        (["0F0 0R0 0OFFLOAD0 0RELOAD0 0B0"], "0R0 (rank 0) waits for 0RELOAD0, which comes after it"),
        (["0F0 0OFFLOAD0 0B0"], "0OFFLOAD0 is never undone: add 0RELOAD0 after it and before"),
        (["0F0 0R0"], "0R0: the schedule has no backward that needs it"),
        (["0F0 0REDUCE_GRAD 0B0"], "gradients are reduced when every backward of the stage is done"),
        (
            ["0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0"],
            "0B0 (rank 0) waits for 0RECV_B0, which the schedule lacks: a backward needs the gradient",
        ),
        (
            ["0F0 0RECV_B0 0B0 0SEND_F0", "1RECV_F0 1F0 1B0 1SEND_B0"],
            "1F0 (rank 1) waits for 0SEND_F0, which comes after 0B0 on rank 0: a forward needs",
        ),
        (
            ["0E0 0F0 0V0 0B0 0VW0 0EW0", "1F0 1V0 1L0 1B0 1VW0 1EW0"],
            "1E0 is missing: with a spread vocabulary V and E and VW and EW are of stages 0 1",
        ),
        (  # rank 1 embeds after its own forward, which waits for the first stage's
            ["0E0 0F0 0V0 0B0 0VW0 0EW0", "1F0 1E0 1V0 1L0 1B0 1VW0 1EW0"],
            "The ranks wait for each other forever:\n"
            "  0F0 (rank 0) waits for 1E0, which comes after 1F0 on rank 1: "
            "the first stage's forward needs every rank's part of the embedding.",
        ),
        (  # the cycle is of ranks 1 and 2 alone, for which rank 0 waits
            ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F1 2F0 2B0 2B1"],
            "The ranks wait for each other forever:\n"
            "  1B0 (rank 1) waits for 2B0, which comes after 2F1 on rank 2: "
            "a backward needs the gradient from the stage after it.\n"
            "  2F1 (rank 2) waits for 1F1, which comes after 1B0 on rank 1: "
            "a forward needs the output of the stage before it.\nstep ",
        ),
    ],
)
def test_validate_refuses(rows: list[str], message: str) -> None:
    text = error(schedule_of(*rows))
    assert message in text
    assert "rank 0 " in text.splitlines()[-len(rows)]


def test_the_grid_of_a_long_schedule_shows_the_steps_around_the_marks() -> None:
    good = one_f_one_b(2, 40)
    row = list(good.actions[1])
    row[30], row[32] = row[32], row[30]
    header, *rows = error(replace(good, actions=(good.actions[0], tuple(row)))).splitlines()[-3:]
    assert re.fullmatch(r"step +\.\. +(\d+ +)+\.\.", header)
    assert len(header.split()) <= 2 * 6 * 2 + 3
    assert rows[1].count(">") == 1 or rows[0].count(">") == 1


@pytest.mark.parametrize(
    ("schedule", "rank", "action", "report"),
    [
        (  # rank 1 got slice 0, so rank 0 is known to have sent it; of slice 1 nothing is known
            gpipe(2, 1, num_slices=2),
            1,
            "1F0.1",
            r"rank 1 waits at 1F0\.1 \(action .*for 0SEND_F0\.1 of rank 0\.\n"
            r"  missing on rank 0: 0F0\.1, 0SEND_F0\.1\Z",
        ),
        (  # the chain through all ranks
            gpipe(4, 1),
            0,
            "0B0",
            r".* for 1SEND_B0 of rank 1\.\n"
            r"  missing on rank 1: 1F0.*\n  missing on rank 2: 2F0.*\n  missing on rank 3: 3F0",
        ),
        (gpipe(2, 8), 0, "0B0", r".*\n  missing on rank 1: 1F0, 1F1, 1F2, 1F3, 1F4, 1F5, and 4 more"),
        (gpipe(2, 8), 0, "0SEND_F7", r"rank 0 waits at 0SEND_F7 \(action .*for 1RECV_F7 of rank 1\."),
    ],
)
def test_a_long_wait_names_the_action_the_other_rank_and_what_is_missing_there(
    schedule: Schedule, rank: int, action: str, report: str
) -> None:
    found = report_wait(add_communication(schedule), rank, Action.parse(action))
    assert re.match(report, found), found


# --- lowering --------------------------------------------------------------------------------------------------------


def with_row(schedule: Schedule, rank: int, row: str) -> Schedule:
    rows = list(schedule.actions)
    rows[rank] = tuple(map(Action.parse, row.split()))
    return replace(schedule, actions=tuple(rows))


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
    early = list(lowered.actions[0])
    place = next(index for index, action in enumerate(early) if action.op is Op.REDUCE_GRAD)
    early.insert(max(n for n in range(place) if early[n].op in (Op.B, Op.W)), early.pop(place))
    with pytest.raises(ScheduleError, match="gradients are reduced when every backward of the stage is done"):
        validate(replace(lowered, actions=(tuple(early), *lowered.actions[1:])))


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


def test_split_backwards_sends_before_the_weights() -> None:
    lowered = add_communication(split_backwards(gpipe(2, 1, 2)))
    check_communication(lowered)
    assert " ".join(map(str, lowered.actions[1][-6:])) == "1I0.1 1SEND_B0.1 1W0.1 1I0.0 1SEND_B0.0 1W0.0"
    assert all(action.op not in (Op.I, Op.W) for action in lowered.actions[0])  # the first stage sends no gradient


RAGGED = make_schedule("gpipe", 1, 2, [2, 1])


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: add_communication(add_communication(gpipe(2, 2))), "has sends and receives already"),
        (lambda: add_communication(gpipe(2, 2), ahead=-1), "ahead=-1: a number of compute actions, 0 or more"),
        (lambda: add_communication(with_row(one_f_one_b(2, 2), 0, "0F0 0B0 0B1 0F1")), r"0B1 .* waits for 0F1"),
        (
            lambda: check_communication(with_row(add_communication(gpipe(2, 1)), 1, "1F0 1B0 1SEND_B0")),
            "0SEND_F0 has no other end",
        ),
        (
            lambda: validate(schedule_of("0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0", placement=(0, 0))),
            r"0SEND_F0 has no other end: stage 1 is on the same rank\.",
        ),
        (lambda: replace(RAGGED, slice_counts=(2, 2, 2)), "has slices 2 2 2; give 2 microbatches 1 to 2 slices each"),
        (
            lambda: replace(RAGGED, reach=((0, 0), (0, 0))),
            r"reach has rows of \[2, 2\] slices; it needs one row of \[2, 1\]",
        ),
        (
            lambda: validate(replace(RAGGED, actions=((*RAGGED.actions[0], Action(Op.F, 0, 1, 1)),))),
            r"0F1\.1 has slice 1, but microbatch 1's are 0 to 0",
        ),
        (lambda: validate(with_row(RAGGED, 0, "0F0.0 0F1.0")), "Stage 0, microbatch 0, slice 1 has nothing"),
    ],
)
def test_what_does_not_fit_is_refused(refused: Callable[[], object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        refused()
