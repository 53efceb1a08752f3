"""Says in words where a rank is and what it waits for, from its board and the text of its schedule."""

from __future__ import annotations

from slipstream.schedule import Schedule, ScheduleError, report_wait
from slipstream.watchdog.board import Sight

_MOST_FRAMES = 8


def doing_text(sight: Sight, order: str) -> str:
    """Returns where a rank is, as the end of a sentence: "in step 3 at 0B0.1 (action 7 of 12), waiting for ...".

    Args:
        sight: of its board.
        order: the rank's place on the pipeline, a newline, and the text of its schedule; "" where none runs.
    """
    place = "before its first step" if sight.step == 0 else f"in step {sight.step}"
    if row := _row(order, sight):
        place += f" at {row[sight.action]} (action {sight.action + 1} of {len(row)})"
    elif sight.phase:
        place += f", {sight.phase}"
    return f"{place}, waiting in {sight.waits}" if sight.waits else place


def wait_lines(sight: Sight, order: str) -> list[str]:
    """Returns what is missing for a rank's action, by the rules of order; nothing where it isn't at one."""
    if not sight.waits or not (schedule := _parse(order, sight)):
        return []
    rank, parsed = schedule
    first, *missing = report_wait(parsed, rank, parsed.actions[rank][sight.action]).splitlines()
    return [f"in its pipeline, {first}", *missing]


def stack_lines(dump: str) -> list[str]:
    """Returns the innermost frames of the main thread, of what faulthandler has written."""
    threads = [each for each in dump.split("\n\n") if each.strip()]
    current = next((each for each in reversed(threads) if each.startswith("Current thread")), "")
    main = threads[-1] if threads else ""  # the first thread of a process comes last
    frames = [line.strip() for line in (main or current).splitlines() if line.startswith("  File")]
    return [f"stack: {frame}" for frame in frames[:_MOST_FRAMES]]


def _row(order: str, sight: Sight) -> list[str]:
    """Returns the texts of the rank's actions. To parse what all ranks do, at every report, would take from their
    cores what they compute with."""
    rank, _, text = order.partition("\n")
    line = next((line for line in text.splitlines() if line.startswith(f"rank {rank}: ")), "")
    words = line.split()[2:]
    return words if 0 <= sight.action < len(words) else []


def _parse(order: str, sight: Sight) -> tuple[int, Schedule] | None:
    if sight.action < 0 or not order:
        return None
    rank, _, text = order.partition("\n")
    try:
        schedule = Schedule.parse(text)
        return (int(rank), schedule) if sight.action < len(schedule.actions[int(rank)]) else None
    except (ScheduleError, ValueError, IndexError):  # it was being written
        return None
