"""What a soak has shown: its problems, and the time that was lost."""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator

import torch
from safetensors.torch import load_file

from benchmarks.soak.faults import ENDS_THE_RUN, GOES_ON, GONE_FOR_GOOD, LOSES_A_HELPER
from benchmarks.soak.soaked_run import Soak
from slipstream.checkpoint.folder import MOST_ASIDE
from slipstream.train.run_checkpoints import best_interval

# Damaged checkpoints are counted by themselves; by run_id tasks see that they share a disk.
_IS_BOUNDED = re.compile(r"owner-\d+\.json|step-\d+\.aside|inputs/run_id")


def problems_of(soak: Soak, undisturbed: Soak) -> Iterator[str]:
    """Yields what isn't as after an undisturbed run."""
    for number, fault in enumerate(soak.faults, 1):
        if fault.problem:
            yield f"fault {number}, {fault.kind} at rank {fault.rank} in step {fault.step}: {fault.problem}"
    if any(soak.exit_codes()):
        yield f"the run ended with exit codes {soak.exit_codes()}"
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
    """Returns how often the launcher has started its ranks again by itself, and for how many faults it has to."""
    goes_on = {*ENDS_THE_RUN, *GOES_ON, *LOSES_A_HELPER}
    wanted = sum(fault.kind not in goes_on and not fault.is_apart for fault in soak.faults)
    wanted += sum(fault.kind == GONE_FOR_GOOD for fault in soak.faults)  # once more when they are back
    return soak.text().count("\nrestart "), wanted


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
