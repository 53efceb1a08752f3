"""What a soak has shown: its problems, the table of faults, and the time that was lost."""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator

import torch
from safetensors.torch import load_file

from benchmarks.soak.faults import ENDS_THE_LAUNCHER, GOES_ON, KINDS, LOSES_A_HELPER, Fault
from benchmarks.soak.soaked_run import Soak
from slipstream.checkpoint.checkpoint_folder import MOST_ASIDE
from slipstream.checkpoint.save_interval import best_interval

_IS_BOUNDED = re.compile(r"owner-\d+\.json|step-\d+\.aside")  # damaged checkpoints are counted by themselves


def problems_of(soak: Soak, undisturbed: Soak) -> Iterator[str]:
    """Yields what isn't as after an undisturbed run."""
    assert soak.launcher is not None
    if soak.launcher.returncode:
        yield f"the run ended with exit code {soak.launcher.returncode}"
        return
    mine, theirs = (load_file(each.output / "model/model.safetensors") for each in (soak, undisturbed))
    different = [name for name in theirs if not torch.equal(mine[name], theirs[name])]
    if different:
        yield f"{len(different)} of {len(theirs)} weights differ from the undisturbed run's: {different[0]}, ..."
    lines = [json.loads(line) for line in (soak.output / "metrics.jsonl").read_text().splitlines()]
    steps = Counter(line["step"] for line in lines if "loss" in line)
    if steps != Counter(range(1, soak.steps + 1)):
        yield f"not every step is there once: {[step for step, times in steps.items() if times > 1]} come twice"
    deadline = time.monotonic() + 10
    while soak.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    if left := soak.processes():
        yield f"processes are left: {left}"
    files, wanted = (
        {str(path.relative_to(each.output)) for path in each.output.rglob("*") if not _IS_BOUNDED.search(str(path))}
        for each in (soak, undisturbed)
    )
    aside = list((soak.output / "checkpoints").glob("*.aside*"))
    if len(aside) > MOST_ASIDE:
        yield f"{len(aside)} damaged checkpoints are kept"
    if more := sorted(files - wanted):
        yield f"files are left: {', '.join(more)}"


def restarts_of(soak: Soak) -> tuple[int, int]:
    """Returns how often the run has started its ranks again by itself, and for how many faults it has to."""
    ends_ranks = set(KINDS) - ENDS_THE_LAUNCHER - GOES_ON - LOSES_A_HELPER
    return soak.text().count("\nrestart "), sum(fault.kind in ends_ranks for fault in soak.faults)


def table(faults: list[Fault], is_same: bool) -> str:
    """Returns the table of faults in Markdown."""
    rows = ["| fault | tried | detected in (median, worst) | named | steps run again (median, worst) | to the bit |"]
    rows.append("| --- | --- | --- | --- | --- | --- |")
    by_kind = defaultdict(list)
    for fault in faults:
        by_kind[fault.kind].append(fault)
    for kind, found in by_kind.items():
        seconds = [fault.detected for fault in found if fault.detected is not None]
        lost, named = [fault.lost for fault in found], [fault.named for fault in found if fault.named is not None]
        detected = f"{statistics.median(seconds):.1f} s, {max(seconds):.1f} s" if seconds else "goes on"
        rows.append(
            f"| {kind} | {len(found)} | {detected} | {f'{sum(named)} of {len(named)}' if named else ''} | "
            f"{statistics.median(lost):g}, {max(lost)} | {'yes' if is_same else 'no'} |"
        )
    return "\n".join(rows)


def goodput_text(soak: Soak, undisturbed: Soak, seconds: float) -> str:
    """Returns the share of the time that went into steps that count, and the most that checkpoints can reach."""
    lines = [json.loads(line) for line in (undisturbed.output / "metrics.jsonl").read_text().splitlines()]
    step = statistics.median(line["step_seconds"] for line in lines if "loss" in line)
    save = statistics.median(line["save_seconds"] for line in lines if "save_seconds" in line)
    between = seconds / max(1, len(soak.faults))
    again = statistics.mean([fault.again for fault in soak.faults if fault.again is not None] or [0.0])
    interval = best_interval(save, between)
    # of a period: steps; over it the save, and for each failure half an interval and the restart
    best = (1 - min(1.0, again / between)) * interval / (between * (math.exp((interval + save) / between) - 1))
    return (
        f"goodput {soak.steps * step / seconds:.2%}: {soak.steps} steps of {step:.3f} s in {seconds:.0f} s, with a "
        f"fault every {between:.1f} s and {again:.1f} s until the next step; with these, an interval of {interval:.2f} "
        f"s (Young and Daly) reaches {best:.2%}"
    )
