"""What happened in a run besides its steps: starts, bad steps, stragglers, failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slipstream.run_page.line_charts import Mark, finite
from slipstream.run_page.run_record import Record, RunRecord

MOST_LISTED = 40  # lines of a kind
NAMES = {"restart": "restart", "bad": "bad step", "straggler": "slow rank", "failure": "failure"}


def happenings(run: RunRecord) -> list[Mark]:
    """Returns what happened, in the order of steps."""
    return sorted(_happenings(run), key=lambda mark: mark.step)


def _happenings(run: RunRecord) -> Iterator[Mark]:
    for start in run.restarts:
        after = start.get("started_after", 0)
        yield Mark(after, "restart", f"started again after step {after:,}{_when(start)}")
    for step in run.steps:
        number = step["step"]
        if bad := step.get("bad"):
            yield Mark(number, "bad", f"step {number:,} was bad: {bad.get('why')}; {bad.get('done')}")
        elif finite(step.get("loss")) is None:
            yield Mark(number, "bad", f"the loss of step {number:,} isn't finite")
        for line in step.get("stragglers") or ():
            yield Mark(number, "straggler", str(line))
    for failure in run.failures:
        number = failure["step"]
        yield Mark(number, "failure", f"the run failed in step {number:,}: its numbers weren't finite")


def listed(marks: Sequence[Mark]) -> list[str]:
    """Returns the lines of a list; of many of one kind the first and how many more there are."""
    lines = []
    for kind, name in NAMES.items():
        texts = [mark.text for mark in marks if mark.kind == kind]
        lines += texts[:MOST_LISTED]
        if len(texts) > MOST_LISTED:
            lines.append(f"... and {len(texts) - MOST_LISTED:,} more of the kind {name!r}")
    return lines


def _when(start: Record) -> str:
    return f", at {start['time']}" if start.get("time") else ""
