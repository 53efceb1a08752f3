"""The part of docs/reliability.md that a soak has shown, made from its record.

python -m benchmarks.soak.page                      # from benchmarks/results/soak.json
python -m benchmarks.soak.page --record soak.json   # from another one, which is copied there first
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.records import RESULTS
from slipstream.units import plural

PAGE = Path(__file__).parents[2] / "docs/reliability.md"
BEGIN, END = "<!-- from benchmarks/results/soak.json, by python -m benchmarks.soak.page -->\n", "<!-- end -->\n"


def table(record: dict[str, Any]) -> str:
    """Returns the table of a record's faults in Markdown."""
    head = ["fault", "tried", "noticed after (median, worst)", "named rightly", "steps run again (median, worst)"]
    rows = [f"| {' | '.join(head)} |", "| --- | --- | --- | --- | --- |"]
    by_kind = defaultdict(list)
    for fault in record["faults"]:
        by_kind[fault["kind"]].append(fault)
    for kind, found in sorted(by_kind.items()):
        seconds = [fault["detected"] for fault in found if fault["detected"] is not None]
        lost, named = [fault["lost"] for fault in found], [fault["named"] for fault in found]
        noticed = f"{statistics.median(seconds):.1f} s, {max(seconds):.1f} s" if seconds else "goes on"
        rightly = "" if None in named else f"{sum(named)} of {len(named)}"  # None in records of before
        rows.append(f"| {kind} | {len(found)} | {noticed} | {rightly} | {statistics.median(lost):g}, {max(lost)} |")
    return "\n".join(rows)


_BY_HAND = "a run that was stopped and resumed by hand on the same meshes at the same steps"


def text_of(record: dict[str, Any], of_losses: dict[str, Any]) -> str:
    """Returns what the page says of a record, and of one in which processes were gone for good."""
    given = of_losses["setting"]
    said = (
        f"And with `training.min_ranks=2`, {len(of_losses['faults'])} times in {given['steps']:,} steps, one or two of "
        "the four are gone for good, and back some steps later; the next step came at most "
        f"{max(fault['again'] for fault in of_losses['faults']):.1f} s after each loss. It took "
        f"{plural(round(of_losses['seconds'] / 60), 'minute')} at a load average of "
        f"{', '.join(f'{each:g}' for each in of_losses['loads'])}. {_ending(of_losses, _BY_HAND)}"
    )
    return "\n\n".join((_text_of(record), said.strip(), table(of_losses)))


def _text_of(record: dict[str, Any]) -> str:
    given, faults = record["setting"], record["faults"]
    load = ", ".join(f"{each:g}" for each in record.get("loads", given["load_average"][:1]))
    apart = sum(fault.get("is_apart", False) for fault in faults)
    said = (
        f"Two replicas of two stages met {len(faults)} of {given['faults']} random faults in {given['steps']:,} steps: "
        f"{apart} as tasks on three hosts (network namespaces), with two ranks on the first, the others under one "
        f"launcher. {_ending(record)}With `training.stall_limit={given['stall_limit']:g}`, on {given['cores']} cores, "
        f"in {record['seconds'] / 60:.0f} minutes, at a load average of {load} (at the beginning, in the middle, at "
        "the end; `soak` in [the records](benchmarks.md#all-records)):"
    )
    goodput = record.get("goodput", "").replace("goodput", "Goodput", 1)
    return "\n\n".join(part for part in (said, table(record), goodput) if part)


def _ending(record: dict[str, Any], other: str = "an undisturbed run") -> str:
    """Returns a sentence on how the soak ended; "" for one that was stopped."""
    problems = record.get("problems", [])
    if not record.get("is_complete", True):
        return ""
    if problems:
        weights = "other weights than" if any("weights differ" in each for each in problems) else "the weights of"
        return f"It ended with {weights} {other}, and with problems: {len(problems)}. "
    return (
        f"It ended with the weights of {other}, bit for bit, with every step in the metrics once, no process left, and "
        "no file more. "
    )


def records() -> list[dict[str, Any]]:
    """Returns the records that are kept."""
    return [json.loads((RESULTS / f"{name}.json").read_text()) for name in ("soak", "soak_lost")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    kept = RESULTS / "soak.json"
    if given.record is not None and given.record.resolve() != kept.resolve():
        kept.write_text(given.record.read_text())
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{text_of(*records())}\n\n{END}{after}")


if __name__ == "__main__":
    main()
