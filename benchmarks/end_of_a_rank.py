"""How soon `slipstream train` ends after one of its ranks is killed, on a machine whose cores are busy.

    python -m benchmarks.end_of_a_rank              # prints a table, writes results/end_of_a_rank.json

Two replicas of two stages train beside a loop on every core that only computes. A random rank gets SIGKILL at a random
moment, and from then on the ends of all processes are noted, by their descriptors, and when the run has named the rank.
The command has ended once its process has.
"""

from __future__ import annotations

import argparse
import os
import random
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import is_trial, setting, write
from benchmarks.soak.soaked_run import Soak, write_config

STEPS = 1_000_000  # far more than pass before the rank is killed
PATIENCE = 300.0  # seconds for a start, and for an end
LOOK_SECONDS = 0.02  # between looks at what the run says
PROMISED = 5.0  # by docs/reliability.md
EVENTS = {
    "victim": "the killed rank has ended",
    "named": "the run has named it",
    "ranks": "the last rank has ended",
    "command": "the command has ended",
    "helpers": "the last watcher or hub has ended",
}


@contextmanager
def busy_cores(number: int) -> Iterator[None]:
    """Has this many processes compute while the body runs."""
    loops = [subprocess.Popen([sys.executable, "-I", "-S", "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def end_once(folder: Path, dice: random.Random) -> dict[str, float]:
    """Trains in a folder and kills a rank; returns the seconds from then on to each event."""
    soak = Soak(folder, STEPS, stall_limit=120, dice=dice)
    options = ["--training.max_restarts=0", "--training.overwrite=true"]
    with soak.log.open("ab") as log:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "slipstream", "train", str(write_config(soak)), *options],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    soak.started = [launcher]
    soak.wait_until(lambda: soak.has_ended() or soak.last_step() > 2, "the third step")
    ranks = soak.ranks()
    assert len(ranks) == 4, soak.text()
    ends = {rank.pid: "ranks" for rank in ranks.values()} | {launcher.pid: "command"}
    ends |= {each.pid: "helpers" for each in (*soak.helpers("watcher"), *soak.helpers("hub"))}
    rank = dice.choice(sorted(ranks))
    ends[ranks[rank].pid] = "victim"
    time.sleep(dice.random())
    with selectors.DefaultSelector() as selector:
        for process, event in ends.items():
            selector.register(os.pidfd_open(process), selectors.EVENT_READ, event)
        said, seconds = len(soak.text()), dict[str, float]()
        began = time.monotonic()
        ranks[rank].kill()
        while selector.get_map():
            assert time.monotonic() - began < PATIENCE, f"processes of {ends} are left; see {soak.log}"
            ready = selector.select(LOOK_SECONDS)
            for key, _ in ready:
                seconds[key.data] = time.monotonic() - began  # of several, the last
                selector.unregister(key.fileobj)
                os.close(key.fd)
            if "named" not in seconds and f"rank {rank} (" in soak.text()[said:]:
                seconds["named"] = time.monotonic() - began
    launcher.wait()
    soak.close()
    assert "named" in seconds, soak.text()[said:]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=2 if is_trial() else 20)
    parser.add_argument("--busy", type=int, default=os.cpu_count(), help="processes that only compute meanwhile")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dice, rows = random.Random(options.seed), list[dict[str, float]]()
    with tempfile.TemporaryDirectory(prefix="slipstream-end-") as name, busy_cores(options.busy):
        for number in range(options.kills):
            folder = Path(name, str(number))
            folder.mkdir()
            rows.append(end_once(folder, dice))
            print(", ".join(f"{event} {rows[-1][event]:.2f}" for event in EVENTS), file=sys.stderr, flush=True)
        load = setting(**vars(options))
    for event, words in EVENTS.items():
        seconds = [row[event] for row in rows]
        print(f"{words:36} median {statistics.median(seconds):5.2f} s, worst {max(seconds):5.2f} s")
    late = sum(row["command"] > PROMISED for row in rows)
    print(f"later than {PROMISED:.0f} s: {late} of {len(rows)}")
    print(write("end_of_a_rank", {"setting": load, "promised": PROMISED, "seconds": rows}))


if __name__ == "__main__":
    main()
