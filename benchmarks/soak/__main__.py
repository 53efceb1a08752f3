"""A run that meets one fault after the other, and ends with the weights of an undisturbed run, to the bit.

python -m benchmarks.soak                                     # 3000 steps, 300 faults
python -m benchmarks.soak --steps 200 --faults 20 --seed 1    # a short one, with one of each kind
python -m benchmarks.soak --record soak.json                  # where its record goes, after each fault

Four processes, two replicas of two stages, are killed, for a while or for good, stopped, held up, left without a disk,
robbed of their newest checkpoint and asked to end, at random; their watchers and hub are killed, stopped and flooded
alike; and links between their machines are cut, delayed, held up and corrupted, where one may make network namespaces
(as root). `slipstream train` starts its ranks again by itself, and is started again with
`--checkpoint.resume=last-good` where it has ended. Where some are gone for good, the run that isn't disturbed is
stopped and resumed on the same meshes at the same steps.
Ended by Ctrl-C or TERM it leaves nobody, and the record of the faults until then.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness import destination, setting
from benchmarks.hosts import Hosts, NoHostsError
from benchmarks.records import RESULTS, provenance
from benchmarks.soak.faults import KINDS, OF_THE_NETWORK, Fault
from benchmarks.soak.page import table
from benchmarks.soak.soaked_run import NUM_HOSTS, Soak
from benchmarks.soak.verdict import goodput_text, problems_of, restarts_of


def main() -> None:
    given = arguments()
    dice = random.Random(given.seed)
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, lambda number, _: sys.exit(128 + number))
    hosts = None
    if set(given.kinds) & set(OF_THE_NETWORK):
        try:
            hosts = Hosts(NUM_HOSTS, dice)
        except NoHostsError as error:
            print(f"without faults of the network, as there can be no hosts here: {error}", flush=True)
            given.kinds = [kind for kind in given.kinds if kind not in OF_THE_NETWORK]
    try:
        with tempfile.TemporaryDirectory(prefix="slipstream-soak-") as folder:
            problems, num_faults = run(given, Path(folder), dice, hosts)
    finally:
        if hosts is not None:
            hosts.close()
    print(f"{num_faults} faults, {len(problems)} problems")
    sys.exit(1 if problems or num_faults < given.faults else 0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--stall-limit", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--name", default="soak", help="of the record")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--log", type=Path, help="where the run's own lines go")
    given = parser.parse_args()
    given.record = given.record or destination(RESULTS / f"{given.name}.json")
    return given


def run(given: argparse.Namespace, folder: Path, dice: random.Random, hosts: Hosts | None) -> tuple[list[str], int]:
    """Runs the soak in a folder; returns its problems, and how many faults there were."""
    kinds = [given.kinds[number % len(given.kinds)] for number in range(given.faults)]
    dice.shuffle(kinds)
    for name in ("undisturbed", "soak"):
        (folder / name).mkdir()
    undisturbed: Soak | None = None
    soak = Soak(folder / "soak", given.steps, given.stall_limit, dice, hosts, given.log)
    asked = {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()}
    record: dict[str, Any] = {"of": provenance(given.name), "setting": setting(**asked), "is_complete": False}
    began, loads = time.monotonic(), [os.getloadavg()[0]]

    def keep(**more: object) -> None:
        record.update(faults=[asdict(each) for each in soak.faults], seconds=time.monotonic() - began)
        record.update(more)
        record["loads"] = [round(each, 1) for each in (loads[0], loads[len(loads) // 2], loads[-1])]
        part = given.record.with_suffix(".part")
        part.write_text(json.dumps(record, indent=2) + "\n")
        part.replace(given.record)

    def note(fault: Fault) -> None:
        loads.append(os.getloadavg()[0])
        keep()
        print(
            f"{len(soak.faults)} of {len(kinds)}, after {time.monotonic() - began:.0f} s: {describe(fault)}", flush=True
        )

    problems: list[str] = []
    try:
        seconds = soak.run(kinds, note)
        print("now an undisturbed run", flush=True)
        undisturbed = Soak(folder / "undisturbed", given.steps, given.stall_limit, dice)
        if len(soak.meshes()) > 1:
            undisturbed.follow(soak)
        else:
            undisturbed.run([], note)
        problems = list(problems_of(soak, undisturbed))
        goodput = goodput_text(soak, undisturbed, seconds)
        keep(seconds=seconds, is_complete=True, problems=problems, goodput=goodput, restarts=restarts_of(soak))
        print(table(record), goodput, given.record, sep="\n")
        restarts, wanted = restarts_of(soak)
        print(f"the launcher has started its ranks {restarts} times again by itself, for {wanted} faults that need it")
        for problem in problems:
            print(f"problem: {problem}")
    finally:
        for each in (undisturbed, soak):
            if each is not None:
                each.close()
        if not record["is_complete"]:
            keep(
                is_complete=False,
                problems=[f"{each.kind}: {each.problem}" for each in soak.faults if each.problem],
                goodput="",
            )
            print(f"stopped: {len(soak.faults)} of {len(kinds)} faults are in {given.record}", flush=True)
            print(soak.text()[-3000:] if soak.log.exists() else "", file=sys.stderr)
    return problems, len(soak.faults)


def describe(fault: Fault) -> str:
    """Returns what became of a fault, in a line."""
    where = "on hosts" if fault.is_apart else "under a launcher"
    seconds = {"noticed": fault.detected, "ended": fault.ended, "next step": fault.again}
    times = ", ".join(f"{name} after {each:.1f} s" for name, each in seconds.items() if each is not None)
    what = f"{fault.kind} at rank {fault.rank} in step {fault.step}, {where}: {times}, {fault.lost} steps again"
    return f"{what}; problem: {fault.problem}" if fault.problem else what


if __name__ == "__main__":
    main()
