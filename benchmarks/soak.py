"""A run that meets one fault after the other, and ends with the weights of an undisturbed run, to the bit.

python -m benchmarks.soak                                  # 300 steps, 200 faults: an hour or two on two cores
python -m benchmarks.soak --steps 40 --faults 8 --seed 1   # a short one

Four processes, two replicas of two stages, are killed, stopped, held up, left without a disk, robbed of their newest
checkpoint and asked to end, at random; `slipstream train` starts its ranks again by itself, and is started again with
`--checkpoint.resume=last-good` where it has ended.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from safetensors.torch import load_file

from slipstream.checkpoint import step_named
from slipstream.checkpoint.checkpoint_folder import MOST_ASIDE
from slipstream.checkpoint.save_interval import best_interval

KINDS = ("slow", "kill", "stop", "full disk", "damaged checkpoint", "TERM", "launcher killed")
ENDS_THE_LAUNCHER = {"TERM", "launcher killed"}
MARK = "SLIPSTREAM_SOAK"  # in the environment of every process of a soak
POLL_SECONDS = 0.05
SLOW_SECONDS = 1.5
_IS_BOUNDED = re.compile(r"owner-\d+\.json|step-\d+\.aside")  # damaged checkpoints are counted by themselves
PATIENCE = 300.0  # for a step, or for a fault's end; far above what either takes


@dataclass
class Fault:
    """One fault, and what became of it. Seconds are None where the run just goes on."""

    kind: str
    step: int  # the last one that was complete
    rank: int | None = None
    detected: float | None = None  # seconds until the run said that it had ended
    named: bool | None = None  # whether it said the rank
    again: float | None = None  # seconds until the next step was complete
    lost: int = 0  # steps that ran again


@dataclass
class Soak:
    """A run in `folder`, with faults of some kinds at random steps."""

    folder: Path
    steps: int
    stall_limit: float
    dice: random.Random
    faults: list[Fault] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.log = self.folder / "log"
        self.launcher: subprocess.Popen[bytes] | None = None

    @property
    def output(self) -> Path:
        return self.folder / "output"

    def start(self, *options: str) -> None:
        """Starts the run, or goes on with it."""
        command = [sys.executable, "-m", "slipstream", "train", str(write_config(self.folder, self)), *options]
        with self.log.open("ab") as log:
            environment = os.environ | {MARK: self.mark}
            self.launcher = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def last_step(self) -> int:
        """Returns the last step that is in the metrics, 0 before the first."""
        with suppress(OSError, ValueError):
            lines = (self.output / "metrics.jsonl").read_bytes().splitlines()
            return max((int(json.loads(line).get("step", 0)) for line in lines if b"loss" in line), default=0)
        return 0

    def ranks(self) -> dict[int, psutil.Process]:
        """Returns the processes of the ranks that run."""
        found = {}
        assert self.launcher is not None
        with suppress(psutil.Error):
            for child in psutil.Process(self.launcher.pid).children():
                with suppress(psutil.Error, KeyError):
                    found[int(child.environ()["RANK"])] = child
        return found

    def wait_until(self, condition: Any, what: str) -> float:
        """Returns the seconds until the condition holds; starts the launcher again wherever it has given up."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < PATIENCE, f"waited in vain for {what}; see {self.log}"
            time.sleep(POLL_SECONDS)
        return time.monotonic() - began

    def has_ended(self) -> bool:
        assert self.launcher is not None
        return self.launcher.poll() is not None

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def run(self, kinds: list[str]) -> float:
        """Runs to the end, with a fault of each of these kinds; returns the seconds that it took."""
        began = time.monotonic()
        self.start()
        for number, kind in enumerate(kinds):
            first = self.faults[-1].step + 1 if self.faults else 2
            due = max(first, round((self.steps - 2) * (number + self.dice.random()) / len(kinds)))
            self.wait_until(lambda due=due: self.last_step() >= due or self.has_ended(), f"step {due}")
            if self.last_step() >= self.steps:
                break
            time.sleep(self.dice.random() * 0.3)
            self.meet(kind)
        self.wait_until(lambda: self.has_ended(), "the end")
        while self.launcher is not None and self.launcher.returncode:
            self.start("--checkpoint.resume=last-good")
            self.wait_until(lambda: self.has_ended(), "the end")
        return time.monotonic() - began

    def meet(self, kind: str) -> None:
        """Lets one fault happen, and waits until the run is past it."""
        ranks, fault = self.ranks(), Fault(kind, self.last_step())
        if not ranks or self.has_ended():
            return
        fault.rank = self.dice.choice(sorted(ranks))
        victim, said = ranks[fault.rank], len(self.text())
        self.faults.append(fault)
        with suppress(psutil.Error, ProcessLookupError):
            self.act(fault, victim)
        if kind in ("slow", "full disk"):
            fault.again = self.wait_until(lambda: self.last_step() > fault.step or self.has_ended(), "the next step")
        else:
            self.recover(fault, victim, said)

    def act(self, fault: Fault, victim: psutil.Process) -> None:
        """Does to a process, or to the disk, what the fault is."""
        assert self.launcher is not None
        if fault.kind == "kill":
            victim.kill()
        elif fault.kind == "stop":
            victim.suspend()
        elif fault.kind == "slow":
            victim.suspend()
            time.sleep(SLOW_SECONDS)
            victim.resume()
        elif fault.kind == "full disk":
            fill_disk(list(self.ranks().values()))
        elif fault.kind == "damaged checkpoint":
            damage(self.output / "checkpoints", self.dice)
            victim.kill()
        elif fault.kind == "TERM":
            self.launcher.send_signal(signal.SIGTERM)
        elif fault.kind == "launcher killed":
            self.launcher.kill()

    def recover(self, fault: Fault, victim: psutil.Process, said: int) -> None:
        """Waits until the run says what has happened and goes on; starts the launcher again where that has ended."""

        def is_over() -> bool:
            return self.has_ended() or "\nrestart " in self.text()[said:] or "error: " in self.text()[said:]

        fault.detected = self.wait_until(is_over, f"what the run says of {fault.kind}")
        if fault.kind not in ENDS_THE_LAUNCHER:
            fault.named = f"rank {fault.rank} (" in self.text()[said:]
        if self.has_ended() or fault.kind in ENDS_THE_LAUNCHER:
            self.wait_until(self.has_ended, "the launcher's end")
            self.wait_until(lambda: not self.processes(), "the end of all ranks")
            self.start("--checkpoint.resume=last-good")
        self.wait_until(lambda: "resumed after step " in self.text()[said:] or self.has_ended(), "the resumption")
        resumed = self.text()[said:].rpartition("resumed after step ")[2]
        fault.lost = max(0, fault.step - int(resumed.split(",")[0])) if resumed[:1].isdigit() else fault.step
        fault.again = self.wait_until(lambda: self.last_step() > fault.step or self.has_ended(), "the next step")

    def processes(self) -> list[int]:
        """Returns all processes of this run, watchers too."""
        return [each.pid for each in psutil.process_iter() if self.mark in marks_of(each)]


def marks_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        if process.status() != psutil.STATUS_ZOMBIE:
            return process.environ().get(MARK, "")
    return ""


def fill_disk(ranks: list[psutil.Process]) -> None:
    """Lets no file grow for a second, as on a disk without room."""
    for rank in ranks:
        resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))
    time.sleep(1)
    for rank in ranks:
        with suppress(ProcessLookupError):
            resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def damage(checkpoints: Path, dice: random.Random) -> None:
    """Changes a byte of the newest checkpoint, unless it is the only one."""
    steps = sorted(path for path in checkpoints.iterdir() if step_named(path.name) is not None)
    if len(steps) < 2:
        return
    file = dice.choice(sorted(steps[-1].glob("*.safetensors")))
    data = bytearray(file.read_bytes())
    data[dice.randrange(len(data) // 2, len(data))] ^= 0x10
    file.write_bytes(data)


def write_config(folder: Path, soak: Soak) -> Path:
    """Writes the configuration of a tiny run on two replicas of two stages."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("".join(f"{number}: the quick brown fox jumps over the lazy dog.\n" for number in range(900)))
    model = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model |= {"num_attention_heads": 2, "vocab_size": 300, "max_position_embeddings": 64}
    values = {
        "model": {"config": model},
        "data": {"files": [str(text)], "validation_fraction": 0},
        "pipeline": {"num_ranks": 2, "slices": [20, 30, 14]},
        "parallel": {"data": 2},
        "runtime": {"self_check": False},
        "training": {"output": str(soak.output), "seq_len": 64, "batch_size": 4, "steps": soak.steps}
        | {"stall_limit": soak.stall_limit, "max_restarts": 10_000},
        "checkpoint": {"every": 2, "keep": 3},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
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
            if problems:
                print(soak.text()[-5000:], file=sys.stderr)
            for problem in problems:
                print(f"problem: {problem}")
        finally:
            for pid in undisturbed.processes() + soak.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    print(f"{len(soak.faults)} faults, {len(problems)} problems")
    sys.exit(1 if problems or len(soak.faults) < given.faults else 0)


if __name__ == "__main__":
    main()
