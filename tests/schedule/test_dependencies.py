"""What breaks the rules of order is reported with grid and rule, and so is a wait that lasts too long."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from slipstream.schedule import (
    Action,
    Schedule,
    ScheduleError,
    add_communication,
    gpipe,
    one_f_one_b,
    predecessors,
    report_wait,
    running_order,
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


def test_a_rank_that_only_waits_for_the_cycle_is_not_part_of_it() -> None:
    schedule = schedule_of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F1 2F0 2B0 2B1")
    message = error(schedule)
    assert "0B0 (rank 0)" not in message
    assert "1B0 (rank 1) waits for 2B0, which comes after 2F1 on rank 2" in message
    assert "2F1 (rank 2) waits for 1F1, which comes after 1B0 on rank 1" in message


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


def test_ranks_whose_lookups_wait_for_each_other_are_reported_with_the_rule() -> None:
    """Rank 1 embeds after its own forward, which waits for the first stage's."""
    message = error(schedule_of("0E0 0F0 0V0 0B0 0VW0 0EW0", "1F0 1E0 1V0 1L0 1B0 1VW0 1EW0"))
    assert "The ranks wait for each other forever:" in message
    assert (
        "0F0 (rank 0) waits for 1E0, which comes after 1F0 on rank 1: "
        "the first stage's forward needs every rank's part of the embedding." in message
    )


def test_a_lookup_that_is_missing_is_named() -> None:
    message = error(schedule_of("0E0 0F0 0V0 0B0 0VW0 0EW0", "1F0 1V0 1L0 1B0 1VW0 1EW0"))
    assert "1E0 is missing: with a spread vocabulary V and E and VW and EW are of stages 0 1" in message


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
        (
            ["0F0 0OFFLOAD0 0B0 0RELOAD0"],
            "0B0 (rank 0) waits for 0RELOAD0, which comes after it on the same rank: what",
        ),
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
    ],
)
def test_validate_refuses(rows: list[str], message: str) -> None:
    text = error(schedule_of(*rows))
    assert message in text
    assert "rank 0 " in text.splitlines()[-len(rows)]


def test_a_message_between_stages_of_one_rank_is_refused() -> None:
    schedule = schedule_of("0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0", placement=(0, 0))
    assert "0SEND_F0 has no other end: stage 1 is on the same rank." in error(schedule)


def test_the_grid_of_a_long_schedule_shows_the_steps_around_the_marks() -> None:
    good = one_f_one_b(2, 40)
    row = list(good.actions[1])
    row[30], row[32] = row[32], row[30]
    header, *rows = error(replace(good, actions=(good.actions[0], tuple(row)))).splitlines()[-3:]
    assert re.fullmatch(r"step +\.\. +(\d+ +)+\.\.", header)
    assert len(header.split()) <= 2 * 6 * 2 + 3
    assert rows[1].count(">") == 1 or rows[0].count(">") == 1


def test_running_order_keeps_each_ranks_order() -> None:
    schedule = add_communication(one_f_one_b(4, 3, 2))
    order = running_order(schedule)
    for rank, row in enumerate(schedule.actions):
        assert tuple(a for a in order if schedule.placement[a.stage] == rank) == row


def test_it_names_the_action_the_other_rank_and_what_is_missing_there():
    schedule = add_communication(gpipe(2, 1, num_slices=2))
    # rank 1 got slice 0, so rank 0 is known to have sent it; of slice 1 nothing is known.
    report = report_wait(schedule, 1, Action.parse("1F0.1"))
    assert report.splitlines()[0].startswith("rank 1 waits at 1F0.1 (action ")
    assert report.splitlines()[0].endswith("for 0SEND_F0.1 of rank 0.")
    assert report.splitlines()[1:] == ["  missing on rank 0: 0F0.1, 0SEND_F0.1"]


def test_the_chain_through_all_ranks_is_listed():
    schedule = add_communication(gpipe(4, 1))
    report = report_wait(schedule, 0, Action.parse("0B0"))
    assert "for 1SEND_B0 of rank 1." in report
    for rank, held_up in ((1, "1F0"), (2, "2F0"), (3, "3F0")):
        assert f"missing on rank {rank}: {held_up}" in report


def test_long_lists_are_cut():
    schedule = add_communication(gpipe(2, 8))
    report = report_wait(schedule, 0, Action.parse("0B0"))
    assert report.splitlines()[1] == "  missing on rank 1: 1F0, 1F1, 1F2, 1F3, 1F4, 1F5, and 4 more"


def test_a_send_waits_for_its_receive():
    schedule = add_communication(gpipe(2, 8))
    assert "rank 0 waits at 0SEND_F7 (action " in report_wait(schedule, 0, Action.parse("0SEND_F7"))
    assert "for 1RECV_F7 of rank 1." in report_wait(schedule, 0, Action.parse("0SEND_F7"))
