"""A run of four processes, its faults, and how it goes on after each."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.soak.faults import (
    ENDS_THE_LAUNCHER,
    GOES_ON,
    LOSES_A_HELPER,
    Fault,
    damage,
    fill_disk,
    flood,
    slow_down,
)

MARK = "SLIPSTREAM_SOAK"  # in the environment of every process of a soak
POLL_SECONDS = 0.05
_IS_RANK = re.compile(r"rank (\d+)")  # what the launcher calls their processes
SLOW_SECONDS = 1.5
MARGIN = 12  # steps without a fault at the end: some pass before one is met
LONGEST_STEP = 0.1  # seconds: a fault meets any moment of a step
PATIENCE = 300.0  # for a step, or for a fault's end; far above what either takes


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
        self.lost = 0  # the process of the hub or the watcher that was lost last

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
            for child in psutil.Process(self.launcher.pid).children(recursive=True):
                with suppress(psutil.Error):
                    if is_rank := _IS_RANK.fullmatch(child.name()):
                        found.setdefault(int(is_rank[1]), child)
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
            due = max(first, round((self.steps - MARGIN) * (number + self.dice.random()) / len(kinds)))
            self.wait_until(lambda due=due: self.last_step() >= due or self.has_ended(), f"step {due}")
            if self.last_step() >= self.steps:
                break
            time.sleep(self.dice.random() * LONGEST_STEP)
            self.meet(kind)
        self.wait_until(lambda: self.has_ended(), "the end")
        while self.launcher is not None and self.launcher.returncode:
            self.start("--checkpoint.resume=last-good")
            self.wait_until(lambda: self.has_ended(), "the end")
        return time.monotonic() - began

    def meet(self, kind: str) -> None:
        """Lets one fault happen, and waits until the run is past it."""
        self.wait_until(lambda: self.ranks() or self.has_ended(), "ranks")
        ranks, fault = self.ranks(), Fault(kind, self.last_step())
        if self.has_ended() or not ranks:
            return
        fault.rank = self.dice.choice(sorted(ranks))
        victim, said = ranks[fault.rank], len(self.text())
        self.faults.append(fault)
        with suppress(psutil.Error, ProcessLookupError):
            self.act(fault, victim)
        if kind in GOES_ON:
            fault.again = self.wait_until(lambda: self.last_step() > fault.step or self.has_ended(), "the next step")
        elif kind in LOSES_A_HELPER:
            self.wait_for_a_helper(fault, said)
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
        elif fault.kind == "slow by turns":
            slow_down(victim, SLOW_SECONDS)
        elif fault.kind == "rank and watcher killed":
            helpers = [each for each in victim.children() if is_helper(each, "watcher")]
            for each in (victim, *helpers):
                each.suspend()
            for each in (*helpers, victim):
                each.kill()
        elif fault.kind == "hub flooded":
            (hub,) = self.helpers("hub")
            flood(
                next(each.laddr.port for each in hub.net_connections() if each.status == psutil.CONN_LISTEN), self.dice
            )
        elif fault.kind in LOSES_A_HELPER:
            name, _, how = fault.kind.partition(" ")
            parent = victim if name == "watcher" else psutil.Process(self.launcher.pid)
            for each in parent.children():
                if is_helper(each, name):
                    each.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
                    self.lost = each.pid
        elif fault.kind == "launcher killed":
            self.launcher.kill()

    def helpers(self, name: str) -> list[psutil.Process]:
        """Returns the hub of the run, or the watchers."""
        assert self.launcher is not None
        children = psutil.Process(self.launcher.pid).children(recursive=True)
        return [each for each in children if is_helper(each, name)]

    def wait_for_a_helper(self, fault: Fault, said: int) -> None:
        """Waits until the run says that it has lost a helper, starts it again, and goes on."""
        words = f"(process {self.lost}) was "

        def is_said() -> bool:
            return words in self.text()[said:] or self.has_ended()

        fault.detected = self.wait_until(is_said, f"what the run says of {fault.kind}")
        who = "the watchers' hub" if "hub" in fault.kind else f"the watcher of rank {fault.rank}"
        text = self.text()[said:]
        fault.named = f"{who} {words}" in text and "error: " not in text and "\nrestart " not in text
        fault.again = self.wait_until(lambda: self.last_step() > fault.step or self.has_ended(), "the next step")

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


def is_helper(process: psutil.Process, name: str) -> bool:
    """Whether a process is the hub, or a watcher."""
    with suppress(psutil.Error):
        return process.cmdline()[-1:] == [f"slipstream.watchdog.{name}"]
    return False


def marks_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        if process.status() != psutil.STATUS_ZOMBIE:
            return process.environ().get(MARK, "")
    return ""


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
