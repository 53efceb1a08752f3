"""Decides from the reports of all watchers whether the run can go on, and says which ranks keep it from that."""

from __future__ import annotations

import math
import mmap
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

LEAST_LIMIT = 60.0
_TIMES_THE_LONGEST = 5
# Before the second step nothing is known of how long an action takes.
_BEFORE_THE_SECOND_STEP = 600.0
UNREACHABLE_AFTER = 5.0
"""Seconds after the limit from which on a machine, or the hub, counts as gone or out of reach."""
# A watcher reports every second. One that is silent for longer may know of an event that others wait for.
_SECONDS_UNHEARD = 2.5
_TIMES_THE_LIMIT = 10  # factor of the limit for a run that stands still while ranks load or save
_MOST_LINES = 24  # ranks described in a verdict; a few are enough of a thousand that wait alike


@dataclass
class Report:
    """The latest report of one rank's watcher, and its time.

    Attributes:
        host: of the rank.
        process: its id there.
        came: when the last message came, by the hub's clock.
        has_own_line: whether the rank itself is connected, as it is for as long as its process lives.
        has_watcher: whether its watcher is.
        was_watched: whether its watcher has ever been.
        has_lost_watcher: whether its watcher has ended, and no other has come.
        silent: seconds in which the rank didn't get on; while it computes those of a processor.
        idle: seconds in which it neither got on nor computed, read or wrote.
        is_counted: whether its silence counts: not while it compiles, loads, saves, validates or exports.
        may_be_long: whether it is in one of those phases that use a disk, which idleness of all ranks ends.
        stopped: seconds in which the process has been stopped.
        computes: whether it uses a processor, or is ready to.
        longest: the longest silence that has counted and has ended.
        step: that runs, 0 before the first.
        ending: "" while it lives; "finished"; "dead", without a word; "gone", together with its watcher; or the error
            by which it failed.
        doing: where it is, as the end of a sentence.
        waits: whether it waits for others.
        detail: lines about its wait, or where its interpreter is.
    """

    host: str
    process: int = 0
    came: float = 0.0
    has_own_line: bool = False
    has_watcher: bool = False
    was_watched: bool = False
    has_lost_watcher: bool = False
    silent: float = 0.0
    idle: float = 0.0
    is_counted: bool = False
    may_be_long: bool = False
    stopped: float = 0.0
    computes: bool = False
    longest: float = 0.0
    step: int = 0
    ending: str = ""
    doing: str = ""
    waits: bool = False
    detail: Sequence[str] = ()

    def update(self, message: Mapping[str, Any], now: float) -> None:
        """Takes over the fields of a message."""
        self.came = now
        for name, value in message.items():
            if name in _TOLD and isinstance(value, type(getattr(self, name))):
                setattr(self, name, value)
        if isinstance(message.get("detail"), list):
            self.detail = [str(line) for line in message["detail"]]

    def lasting(self) -> dict[str, Any]:
        """Returns the facts that its watcher can't repeat: who the rank is, and how it has ended."""
        who = {"host": self.host, "process": self.process, "ending": self.ending}
        return who | ({"doing": self.doing} if self.ending else {})


_TOLD = {"process", "silent", "idle", "is_counted", "may_be_long", "stopped", "computes", "longest", "step", "ending"}
_TOLD |= {"doing", "waits"}


@dataclass(frozen=True)
class Fault:
    """The reason why a run can't go on: `reasons` has the ranks at fault, each with its problem."""

    reasons: Mapping[int, str]
    is_death: bool = False
    is_failure: bool = False  # an error of the rank's own, which explains itself
    is_long: bool = False  # a stall while ranks load or save


def stall_limit(given: float | None, reports: Mapping[int, Report]) -> float:
    """Returns the seconds that a rank may wait: those that were given, or by default five times the longest wait so
    far, at least 60; ten minutes before the second step, as long as a rank computes, reads or writes."""
    if given is not None:
        return given
    is_busy = any(not report.ending and report.idle <= LEAST_LIMIT for report in reports.values())
    if is_busy and all(report.step < 2 for report in reports.values()):
        return _BEFORE_THE_SECOND_STEP
    return max(LEAST_LIMIT, _TIMES_THE_LONGEST * max((report.longest for report in reports.values()), default=0.0))


def find_fault(
    reports: Mapping[int, Report], limit: float, now: float, since_pause: float, since_computing: float = math.inf
) -> Fault | None:
    """Returns why the run can't go on, None where it can.

    Args:
        reports: of all ranks.
        limit: seconds that a rank may wait, be stopped, or be out of reach.
        now: by the hub's clock.
        since_pause: seconds since any rank was in a phase whose silence doesn't count, for which others may have
            waited.
        since_computing: seconds since any rank computed within the limit; who waits may have waited for that one.
    """
    if dead := {rank: _DEATHS[report.ending] for rank, report in reports.items() if report.ending in _DEATHS}:
        return Fault(dead, is_death=True)
    failed = {rank: f"has failed ({report.ending})" for rank, report in reports.items() if report.ending not in _FINE}
    if failed:
        return Fault(failed, is_failure=True)
    alive = {rank: report for rank, report in reports.items() if not report.ending}
    stopped = {rank: report for rank, report in alive.items() if report.stopped > limit}
    if stopped:
        return Fault({rank: _stopped(report) for rank, report in stopped.items()})
    lost = {rank: report for rank, report in alive.items() if now - report.came > limit + UNREACHABLE_AFTER}
    if lost:
        return Fault({rank: _lost(report, now - report.came) for rank, report in lost.items()})
    if all(report.is_counted or report.may_be_long for report in alive.values()):
        idle = min((report.idle for report in alive.values()), default=0.0)
        if idle > _TIMES_THE_LIMIT * limit:
            blamed = {rank: item for rank, item in alive.items() if item.may_be_long and not item.waits} or alive
            return Fault({rank: _stalled(report) for rank, report in blamed.items()}, is_long=True)
    if any(now - report.came > _SECONDS_UNHEARD for report in alive.values()):
        # The silent watcher is soon heard again, or lost.
        return None
    silences = {
        rank: min(report.silent, since_pause, since_computing if report.waits else math.inf)
        for rank, report in alive.items()
    }
    if not all(report.is_counted for report in alive.values()) or max(silences.values(), default=0.0) <= limit:
        return None
    # The one that others wait for may have fallen silent after them.
    stalled = {rank: alive[rank] for rank, silence in silences.items() if silence > limit / 2}
    blamed = {rank: report for rank, report in stalled.items() if not report.waits or report.stopped}
    ended = {rank: "has ended well, and others wait for it" for rank, report in reports.items() if report.ending}
    if ended and not blamed and len(stalled) == len(alive):
        return Fault(ended)
    return Fault({rank: _stalled(report) for rank, report in (blamed or stalled).items()})


_FINE = ("", "finished")
_DEATHS = {
    "dead": "has ended without a word: it was killed, or crashed",
    "gone": "has ended without a word, and its watcher with it: they were killed together, or their machine is gone",
}


def _lost(report: Report, seconds: float) -> str:
    if report.has_own_line and report.has_lost_watcher:
        return (
            f"hasn't been watched for {seconds:.0f} s: its watcher has ended, and it starts no new one, as if stopped"
        )
    stopped = "" if report.was_watched else ", or it was stopped before it was watched"
    return f"hasn't answered for {seconds:.0f} s: its machine is gone, or the network between{stopped}"


def _stopped(report: Report) -> str:
    return f"has been stopped (as by SIGSTOP) for {report.stopped:.0f} s"


def _stalled(report: Report) -> str:
    if report.stopped:
        return _stopped(report)
    if report.waits:
        return f"has waited for {report.silent:.0f} s"
    if report.computes:
        return f"is slow: it has computed for {report.silent:.0f} s without progress"
    return f"hangs: it has made no progress for {report.silent:.0f} s, and doesn't compute"


def describe_fault(fault: Fault, reports: Mapping[int, Report], limit: float, setting: str = "") -> str:
    """Returns the verdict: which ranks are at fault, where each rank was, and which actions are missing. The limit of a
    wait is that of a `setting`."""
    lines = [f"{_name(rank, reports[rank])} {reason}; {reports[rank].doing}" for rank, reason in fault.reasons.items()]
    if not fault.is_death and not fault.is_failure:
        while_loading = f", {_TIMES_THE_LIMIT} times while ranks load or save" if fault.is_long else ""
        lines[-1] += f" (the limit of a wait is {limit:.0f} s{while_loading}: {setting})"
    for rank in fault.reasons:
        lines += _indented(reports[rank].detail)
    others = [rank for rank, report in reports.items() if rank not in fault.reasons and report.ending != "finished"]
    for rank in others[:_MOST_LINES]:
        state = "stopped" if reports[rank].stopped else "waiting" if reports[rank].waits else "not waiting"
        lines.append(f"  {_name(rank, reports[rank])}, {state}: {reports[rank].doing}")
        lines += _indented(line for line in reports[rank].detail if not line.startswith("stack"))
    if len(others) > _MOST_LINES:
        lines.append(f"  and {len(others) - _MOST_LINES} other ranks")
    return "\n".join(lines)


def _name(rank: int, report: Report) -> str:
    return f"rank {rank} ({report.host}, process {report.process})"


def _indented(lines: Any) -> list[str]:
    return [f"    {line}" for line in lines]


_TICKS = os.sysconf("SC_CLK_TCK")


class ProcessState(NamedTuple):
    """`letter` as in ps: R runs, S sleeps, D waits for a disk, T is stopped, t is traced, Z has ended."""

    letter: str
    cpu_seconds: float
    num_bytes: int = 0  # bytes read and written so far, also by page faults

    @property
    def is_stopped(self) -> bool:
        """Whether it runs no code until somebody lets it go on."""
        return self.letter in ("T", "t")


SURELY_COMPUTES = 0.3
"""Of a processor, which no rank uses that only sleeps."""


def is_ready(process: int, state: ProcessState) -> bool:
    """Returns whether a thread of a process computes, or would if it found a processor."""
    if state.letter == "R":  # the main thread
        return True
    for stat in Path(f"/proc/{process}/task").glob("*/stat"):
        with suppress(OSError, IndexError):
            if stat.read_text().rpartition(") ")[2][0] == "R":
                return True
    return False


def state_of(process: int) -> ProcessState | None:
    """Returns the state of a process; None where it has gone or nothing is known."""
    stat, transfers = Path(f"/proc/{process}/stat"), Path(f"/proc/{process}/io")
    with suppress(OSError, ValueError, IndexError):
        words = stat.read_text().rpartition(") ")[2].split()
        num_bytes = int(words[9]) * mmap.PAGESIZE
        # The file may belong to root.
        with suppress(OSError):
            num_bytes += sum(int(line.split()[1]) for line in transfers.read_text().splitlines()[:2])
        return ProcessState(words[0], (int(words[11]) + int(words[12])) / _TICKS, num_bytes)
    if Path("/proc/self/stat").exists():
        return None
    with suppress(OSError):  # a system without /proc
        command = ["ps", "-o", "state=", "-p", str(process)]
        if text := subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip():
            return ProcessState(text[0], 0.0)
    return None


def exit_text(code: int) -> str:
    """Returns how a process has ended, by its exit code or the negative number of the signal that ended it."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def end_of(process: int) -> int | None:
    """Returns a descriptor that can be read once a process has ended; None where there is no such process, or the
    system has none of these."""
    if hasattr(os, "pidfd_open"):
        with suppress(OSError):
            return int(os.pidfd_open(process))
    return None


def num_ended_for_memory() -> int | None:
    """Returns how many processes Linux has ended so far as memory ran out, in whichever container; None where the
    system doesn't say."""
    with suppress(OSError, ValueError):
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counts["oom_kill"]) if "oom_kill" in counts else None
    return None
