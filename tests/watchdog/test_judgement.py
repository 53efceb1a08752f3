"""From what the watchers report follows which ranks are to blame, and when nobody is."""

from __future__ import annotations

import pytest

from slipstream.watchdog.judgement import Report, describe_fault, find_fault, stall_limit


def report(**values: object) -> Report:
    given = Report("node0", process=100, came=1000.0, is_counted=True, step=5, doing="in step 5")
    given.update(values, now=1000.0)
    return given


WAITS = {"silent": 9.0, "waits": True}
SAVES = {"silent": 90.0, "is_counted": False, "may_be_long": True}


@pytest.mark.parametrize(
    ("reports", "blamed", "words"),
    [
        ({0: report(**WAITS), 1: report(silent=9.0)}, {1}, "hangs"),
        ({0: report(**WAITS), 1: report(silent=9.0, computes=True)}, {1}, "is slow"),
        ({0: report(**WAITS), 1: report(silent=9.0, stopped=9.0)}, {1}, "stopped"),
        ({0: report(**WAITS), 1: report(silent=9.0, stopped=1.0, waits=True)}, {1}, "stopped"),
        ({0: report(**WAITS), 1: report(**WAITS)}, {0, 1}, "has waited"),
        ({0: report(**WAITS), 1: report(silent=0.1)}, {0}, "has waited"),
        (
            {0: report(**WAITS), 1: report(**WAITS), 2: report(ending="finished")},
            {2},
            "has ended well",
        ),
        ({0: report(**WAITS), 1: report(silent=0.1), 2: report(ending="finished")}, {0}, "has waited"),
        ({0: report(**WAITS), 1: report(silent=9.0), 2: report(ending="finished")}, {1}, "hangs"),
        ({0: report(**WAITS), 1: report(ending="dead")}, {1}, "without a word"),
        ({0: report(**WAITS, is_counted=False), 1: report(ending="dead")}, {1}, "without a word"),
        ({0: report(), 1: report(ending="ValueError: x")}, {1}, "ValueError: x"),
        # a process that is stopped does nothing, whatever it was at
        ({0: report(is_counted=False, stopped=9.0), 1: report()}, {0}, "stopped"),
        # nobody has read, written or computed for ten times the limit
        ({0: report(**WAITS, idle=60.0), 1: report(**SAVES, idle=51.0)}, {1}, "10 times while ranks load or save"),
    ],
)
def test_who_is_blamed(reports: dict[int, Report], blamed: set[int], words: str) -> None:
    fault = find_fault(reports, limit=5.0, now=1000.0, since_pause=100.0)
    assert fault is not None
    assert set(fault.reasons) == blamed
    assert words in describe_fault(fault, reports, 5.0).splitlines()[0]


@pytest.mark.parametrize(
    "reports",
    [
        {0: report(silent=4.0, waits=True), 1: report(silent=4.0)},
        {0: report(**WAITS), 1: report(is_counted=False)},  # it exports, and the other waits for that
        {0: report(**WAITS, ending="finished"), 1: report()},
        {0: report(**WAITS, idle=60.0), 1: report(**SAVES, idle=49.0)},  # it reads or writes now and then
        {0: report(**WAITS, idle=60.0), 1: report(**SAVES, idle=60.0), 2: report(is_counted=False, idle=60.0)},
    ],
)
def test_nobody_is_blamed(reports: dict[int, Report]) -> None:
    assert find_fault(reports, limit=5.0, now=1000.0, since_pause=100.0) is None


def test_a_wait_for_a_phase_that_does_not_count_is_forgiven_when_it_ends() -> None:
    reports = {0: report(**WAITS), 1: report()}
    assert find_fault(reports, limit=5.0, now=1000.0, since_pause=1.0) is None
    assert find_fault(reports, limit=5.0, now=1000.0, since_pause=6.0) is not None


def test_a_machine_that_does_not_answer_is_named_after_the_limit_and_ten_seconds_at_least() -> None:
    reports = {0: report(), 1: report()}
    assert find_fault(reports, limit=5.0, now=1009.0, since_pause=100.0) is None
    reports[0].came = 1011.0
    fault = find_fault(reports, limit=5.0, now=1011.0, since_pause=100.0)
    assert fault is not None
    assert set(fault.reasons) == {1}


def test_who_waits_for_a_rank_that_is_not_heard_is_not_blamed() -> None:
    """As where a link is cut: the others fall silent with it, and it is lost some seconds later."""
    reports = {0: report(**WAITS), 1: report(silent=0.1), 2: report(**WAITS)}
    assert find_fault(reports, limit=5.0, now=1001.0, since_pause=100.0) is not None
    reports[0].came = reports[2].came = 1006.0
    assert find_fault(reports, limit=5.0, now=1006.0, since_pause=100.0) is None
    reports[0].came = reports[2].came = 1011.0
    fault = find_fault(reports, limit=5.0, now=1011.0, since_pause=100.0)
    assert fault is not None
    assert set(fault.reasons) == {1}
    assert "hasn't answered for 11 s" in describe_fault(fault, reports, 5.0)


def test_the_default_limit_grows_with_the_longest_wait_and_is_long_while_first_steps_compute() -> None:
    assert stall_limit(7.0, {0: report()}) == 7.0
    assert stall_limit(None, {0: report(step=1, idle=90.0), 1: report(step=1, idle=50.0)}) == 600
    assert stall_limit(None, {0: report(step=1, idle=90.0), 1: report(step=1, idle=61.0)}) == 60
    assert stall_limit(None, {0: report(longest=3.0)}) == 60
    assert stall_limit(None, {0: report(longest=3.0), 1: report(longest=30.0)}) == 150
