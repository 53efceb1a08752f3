"""A run that meets one fault after the other, and ends with the weights of an undisturbed run, to the bit.

python -m benchmarks.soak                                  # 2000 steps, 200 faults: about 20 minutes on two cores
python -m benchmarks.soak --steps 120 --faults 8 --seed 1  # a short one

Four processes, two replicas of two stages, are killed, stopped, held up, left without a disk, robbed of their newest
checkpoint and asked to end, at random, and their watchers and hub are killed, stopped and flooded alike; `slipstream
train` starts its ranks again by itself, and is started again with `--checkpoint.resume=last-good` where it has ended.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness import setting, write
from benchmarks.soak.faults import KINDS
from benchmarks.soak.soaked_run import Soak
from benchmarks.soak.verdict import goodput_text, problems_of, restarts_of, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--stall-limit", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    given = parser.parse_args()
    dice = random.Random(given.seed)
    kinds = [given.kinds[number % len(given.kinds)] for number in range(given.faults)]
    dice.shuffle(kinds)
    with tempfile.TemporaryDirectory(prefix="slipstream-soak-") as name:
        folders = [Path(name, each) for each in ("undisturbed", "soak")]
        for folder in folders:
            folder.mkdir()
        undisturbed, soak = (Soak(folder, given.steps, given.stall_limit, dice) for folder in folders)
        try:
            undisturbed.run([])
            seconds = soak.run(kinds)
            problems = list(problems_of(soak, undisturbed))
            print(table(soak.faults, not problems))
            print(goodput_text(soak, undisturbed, seconds))
            found = {"faults": [asdict(each) for each in soak.faults], "seconds": seconds, "problems": problems}
            print(write("soak", {"setting": setting(**vars(given)), **found}))
            restarts, wanted = restarts_of(soak)
            print(f"the run has started its ranks {restarts} times again by itself, for {wanted} faults that need it")
            if problems:
                print(soak.text()[-5000:], file=sys.stderr)
            for problem in problems:
                print(f"problem: {problem}")
        except AssertionError:
            print(soak.text()[-5000:], file=sys.stderr)
            raise
        finally:
            for pid in undisturbed.processes() + soak.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    print(f"{len(soak.faults)} faults, {len(problems)} problems")
    sys.exit(1 if problems or len(soak.faults) < given.faults else 0)


if __name__ == "__main__":
    main()
