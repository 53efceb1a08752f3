"""The report of a wait that lasted too long names the action, the other rank and what is missing there."""

from __future__ import annotations

from slipstream.schedule import Action, add_communication, gpipe, report_wait


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
