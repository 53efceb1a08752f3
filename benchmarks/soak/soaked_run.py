"""A run of four processes, its faults, and how it goes on after each.

It runs in two ways, and goes on in either: under `slipstream train`, which starts its ranks itself, or as a task for
each rank on three hosts, two ranks on the first, with a switch between them that loses, delays and changes what passes.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import yaml

from benchmarks.harness import ENVIRONMENT
from benchmarks.hosts import Hosts
from benchmarks.soak.faults import (
    ENDS_THE_RUN,
    GOES_ON,
    GONE_FOR_GOOD,
    LOSES_A_HELPER,
    OF_THE_LAUNCHER,
    OF_THE_NETWORK,
    Fault,
    damage,
    fill_disk,
    flood,
    is_named,
    slow_down,
)
from benchmarks.soak.tasks import Task, TaskHost
from slipstream.checkpoint import step_named

MARK = "SLIPSTREAM_SOAK"  # in the environment of every process of a soak
NUM_HOSTS = 3
_HOST_OF_RANK = (0, 0, 1, 2)
_FIRST_PORT, _NUM_PORTS = 20000, 10000  # where tasks meet: another one at each start
_POLL_SECONDS = 0.05
_LISTENS = "0A"  # a state in /proc/net/tcp
_IS_RANK = re.compile(r"rank (\d+)")  # what the launcher calls their processes
_SLOW_SECONDS = 1.5
_BAD_NETWORK_SECONDS = 4.0
_DELAY, _STALLS = 0.2, 0.01
_MARGIN = 12  # steps without a fault at the end: some pass before one is met
_MOST_STARTS_AT_THE_END = 10  # of a run that a fault has ended in its last steps
_LONGEST_STEP = 0.1  # seconds: a fault meets any moment of a step
_PATIENCE = 900.0  # seconds for a step, or for a fault's end; far above what either takes


class Soak:
    """A run in `folder`, with faults of some kinds at random steps; without `hosts` it has a launcher alone."""

    def __init__(
        self,
        folder: Path,
        steps: int,
        stall_limit: float,
        dice: random.Random,
        hosts: Hosts | None = None,
        log: Path | None = None,
    ) -> None:
        self.folder, self.steps, self.stall_limit, self.dice, self.hosts = folder, steps, stall_limit, dice, hosts
        self.output, self.log = folder / "output", log or folder / "log"
        self.mark = uuid.uuid4().hex
        self.faults: list[Fault] = []
        self.is_apart = False  # whether it runs as tasks now
        self.may_shrink = False  # whether it goes on with fewer ranks now
        self.started: list[Task | subprocess.Popen[bytes]] = []  # the launcher, or the tasks by their ranks
        self._num_starts = 0
        self._environment = os.environ | {MARK: self.mark}
        places = [(hosts, index) for index in range(NUM_HOSTS)] if hosts is not None else []
        self._task_hosts = [TaskHost(place, self.log, self._environment) for place in (None, *places)]
        for each in self._task_hosts:
            each.wait()

    def start(self, is_apart: bool) -> None:
        """Starts the run, or goes on with it."""
        arguments = ["train", str(write_config(self))]
        arguments += ["--checkpoint.resume=last-good"] if self._num_starts else []
        arguments += ["--training.min_ranks=2"] if self.may_shrink else []
        self.is_apart, self.started = is_apart, []
        self._num_starts += 1
        if is_apart:
            for index, host in enumerate(self._task_hosts[1:]):
                tasks = [self._task(rank, index) for rank, its_host in enumerate(_HOST_OF_RANK) if its_host == index]
                self.started += host.start(arguments, tasks)
            return
        self.started = self._task_hosts[0].start(arguments, [self._environment])

    def _task(self, rank: int, host: int) -> dict[str, str]:
        """Returns the environment of a task, as a scheduler makes it."""
        assert self.hosts is not None
        num_local = _HOST_OF_RANK.count(host)
        place: dict[str, object] = {"RANK": rank, "WORLD_SIZE": len(_HOST_OF_RANK), "LOCAL_RANK": rank % num_local}
        place |= {"LOCAL_WORLD_SIZE": num_local, "MASTER_PORT": _FIRST_PORT + self._num_starts % _NUM_PORTS}
        place["SLIPSTREAM_RENDEZVOUS_SECONDS"] = int(_PATIENCE / 2)
        place["MASTER_ADDR"] = self.hosts.addresses[0]
        return self._environment | ENVIRONMENT | {name: str(value) for name, value in place.items()}

    def last_step(self) -> int:
        """Returns the last step that is in the metrics, 0 before the first."""
        with suppress(OSError), (self.output / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            for line in reversed(file.read().splitlines()):
                with suppress(ValueError):
                    if "loss" in (values := json.loads(line)):
                        return int(values["step"])
        return 0

    def ranks(self) -> dict[int, psutil.Process]:
        """Returns the processes of the ranks that run."""
        if self.is_apart:
            return {rank: psutil.Process(each.pid) for rank, each in enumerate(self.started) if each.poll() is None}
        found: dict[int, psutil.Process] = {}
        for child in self._descendants():
            with suppress(psutil.Error):
                if is_rank := _IS_RANK.fullmatch(child.name()):
                    found.setdefault(int(is_rank[1]), child)
        return found

    def _descendants(self) -> list[psutil.Process]:
        found = []
        for each in self.started:
            with suppress(psutil.Error):
                found += psutil.Process(each.pid).children(recursive=True)
        return found

    def wait_until(self, condition: Callable[[], object], what: str) -> float:
        """Returns the seconds until the condition holds."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > _PATIENCE:
                raise TimeoutError(f"waited in vain for {what}")
            time.sleep(_POLL_SECONDS)
        return time.monotonic() - began

    def has_ended(self) -> bool:
        return all(each.poll() is not None for each in self.started)

    def exit_codes(self) -> list[int | None]:
        return [each.returncode for each in self.started]

    def text(self, start: int = 0) -> str:
        """Returns what the run has written, from a byte of its log on."""
        with self.log.open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")

    def run(self, kinds: list[str], note: Callable[[Fault], None]) -> float:
        """Runs to the end, with a fault of each of these kinds, and notes each that is over; returns the seconds."""
        began = time.monotonic()
        self.may_shrink = kinds[:1] == [GONE_FOR_GOOD]
        self.start(bool(kinds) and self._wants_hosts(kinds[0]))
        # A run that is killed before its first checkpoint begins anew, and has nothing to resume.
        self.wait_until(lambda: self._has_checkpoint() or self.has_ended(), "the first checkpoint")
        for number, kind in enumerate(kinds):
            first = self.faults[-1].step + 1 if self.faults else 2
            due = max(first, round((self.steps - _MARGIN) * (number + self.dice.random()) / len(kinds)))
            fault = Fault(kind, due)
            try:
                self._reach(due)
                if self.last_step() >= self.steps:
                    break
                if self._wants_hosts(kind) != self.is_apart or self.may_shrink != (kind == GONE_FOR_GOOD):
                    self._move(kind)
                time.sleep(self.dice.random() * _LONGEST_STEP)
                self._meet(fault, kinds[number + 1] if number + 1 < len(kinds) else kind)
            except (TimeoutError, OSError, StopIteration, psutil.Error) as error:
                fault.problem = f"{error!r}; {self.text()[-3000:]}"
                self.end()
                self.start(self.is_apart)
            self.faults.append(fault)
            note(fault)
        for _ in range(_MOST_STARTS_AT_THE_END):
            if self._reach(self.steps) and not any(self.exit_codes()):
                break
            self.start(self.is_apart)
        return time.monotonic() - began

    def _has_checkpoint(self) -> bool:
        folder = self.output / "checkpoints"
        return folder.exists() and any(step_named(path.name) is not None for path in folder.iterdir())

    def _reach(self, step: int) -> bool:
        """Waits until a step is complete, or at the last one until the run has ended; returns whether it is."""
        is_last = step == self.steps
        self.wait_until(lambda: self.has_ended() or (not is_last and self.last_step() >= step), f"step {step}")
        return self.last_step() >= step

    def _wants_hosts(self, kind: str) -> bool:
        """Returns whether the run should be on several hosts when it meets a fault: where either will do, by chance."""
        if kind in OF_THE_NETWORK or kind in OF_THE_LAUNCHER or self.hosts is None:
            return kind in OF_THE_NETWORK
        return self.is_apart if self.started else self.dice.random() < 0.5

    def _move(self, kind: str) -> None:
        """Asks the run to end, and goes on with it in the way that the kind of fault needs."""
        before = self.last_step()
        self._ask_to_end()
        self.wait_until(lambda: self.has_ended() and not self.processes(), "the end before a move")
        is_apart, self.may_shrink = self._wants_hosts(kind), kind == GONE_FOR_GOOD
        self.start(is_apart)
        self.wait_until(lambda: self.last_step() > before + 1 or self.has_ended(), "a step after a move")

    def _ask_to_end(self) -> None:
        for each in self.started:
            each.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Kills all that is left of the run."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait_until(self.has_ended, "the end of what was killed")
        if self.hosts is not None and self.hosts.switch is not None:
            self.hosts.switch.cut = set()

    def close(self) -> None:
        """Ends all that is left, also what would start more."""
        for each in self._task_hosts:
            each.close()
        self._task_hosts = []
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _meet(self, fault: Fault, next_kind: str) -> None:
        """Lets one fault happen, and waits until the run is past it."""
        self.wait_until(lambda: self._is_whole() or self.has_ended(), "ranks, their watchers and the hub")
        ranks, said, hosts = self.ranks(), self.log.stat().st_size, self._host_names()
        if not ranks:
            fault.problem = f"the run had ended before, with {self.exit_codes()}: {self.text()[-3000:]}"
            self.start(self.is_apart)
            return
        fault.step, fault.is_apart, fault.rank = self.last_step(), self.is_apart, self.dice.choice(sorted(ranks))
        fault.host = hosts[fault.rank]
        fault.process = ranks[fault.rank].pid
        with suppress(psutil.Error, ProcessLookupError):
            self._act(fault, ranks[fault.rank])
        if fault.kind in GOES_ON:
            fault.again = self._wait_for_a_step(fault)
        elif fault.kind in LOSES_A_HELPER:
            words = f"(process {fault.process}) was "
            fault.detected = self.wait_until(lambda: words in self.text(said) or self.has_ended(), "what it says")
            fault.again = self._wait_for_a_step(fault)
        else:
            self._recover(fault, said, next_kind)
            if fault.kind == GONE_FOR_GOOD:
                self._bring_back(fault)
        if self.has_ended() and self.last_step() < self.steps:
            fault.problem = f"the run ended with {self.exit_codes()}"
            self.start(self.is_apart)
        fault.named = is_named(fault, self.text(said), hosts)
        if not fault.named:
            fault.problem = fault.problem or f"isn't named rightly: {self.text(said)[-3000:]}"

    def _is_whole(self) -> bool:
        num_ranks = len(_HOST_OF_RANK)
        has_all = len(self.ranks()) == len(self.helpers("watcher")) == num_ranks
        return has_all and len(self.helpers("hub")) == 1

    def _host_names(self) -> list[str]:
        if self.is_apart and self.hosts is not None:
            return [self.hosts.names[host] for host in _HOST_OF_RANK]
        return [socket.gethostname()] * len(_HOST_OF_RANK)

    def _wait_for_a_step(self, fault: Fault) -> float:
        return self.wait_until(lambda: self.last_step() > fault.step or self.has_ended(), "the next step")

    def _act(self, fault: Fault, victim: psutil.Process) -> None:
        """Does to a process, to the disk or to the network what the fault is."""
        if fault.kind == "kill":
            victim.kill()
        elif fault.kind == GONE_FOR_GOOD:
            others = [each for rank, each in self.ranks().items() if rank != fault.rank]
            for each in (victim, *self.dice.sample(others, self.dice.randrange(2))):
                each.kill()
        elif fault.kind == "stop":
            victim.suspend()
        elif fault.kind == "slow":
            victim.suspend()
            time.sleep(_SLOW_SECONDS)
            victim.resume()
        elif fault.kind == "full disk":
            fill_disk(list(self.ranks().values()))
        elif fault.kind == "damaged checkpoint":
            damage(self.output / "checkpoints", self.dice)
            victim.kill()
        elif fault.kind == "TERM":
            self._ask_to_end()
        elif fault.kind == "launcher killed":
            self.started[0].send_signal(signal.SIGKILL)
        elif fault.kind == "slow by turns":
            slow_down(victim, _SLOW_SECONDS)
        elif fault.kind == "rank and watcher killed":
            helpers = [each for each in victim.children() if is_helper(each, "watcher")]
            for each in (victim, *helpers):
                each.suspend()
            for each in (*helpers, victim):
                each.kill()
        elif fault.kind in LOSES_A_HELPER:
            name, _, how = fault.kind.partition(" ")
            helpers = self.helpers("hub") if name == "hub" else victim.children()
            lost = next(each for each in helpers if is_helper(each, name))
            fault.process = lost.pid
            lost.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        elif fault.kind == "hub flooded":
            address = self._hub_address()
            if self.is_apart and self.hosts is not None:
                self.hosts.inside(_HOST_OF_RANK[fault.rank], lambda: flood(address, self.dice))
            else:
                flood(address, self.dice)
        else:
            self._act_on_the_network(fault)

    def _act_on_the_network(self, fault: Fault) -> None:
        assert self.hosts is not None
        assert self.hosts.switch is not None
        switch, host = self.hosts.switch, _HOST_OF_RANK[fault.rank]
        if fault.kind == "corrupt line":
            switch.corrupts_at = self._hub_address()[1]
            self.wait_until(lambda: switch.corrupts_at is None or self.has_ended(), "a line to the hub")
            time.sleep(_SLOW_SECONDS)
        elif fault.kind in ("delays", "stalls"):
            switch.delay, switch.stalls = (_DELAY, 0.0) if fault.kind == "delays" else (0.0, _STALLS)
            time.sleep(_BAD_NETWORK_SECONDS)
            switch.delay = switch.stalls = 0.0
        else:
            switch.cut = {host}
            for rank, task in enumerate(self.started):
                if fault.kind == "machine gone" and _HOST_OF_RANK[rank] == host:
                    with suppress(psutil.Error):
                        process = psutil.Process(task.pid)
                        for each in (process, *process.children()):
                            each.suspend()  # so that none can say a word of another's end
                        for each in (*process.children(), process):
                            each.kill()

    def helpers(self, name: str) -> list[psutil.Process]:
        """Returns the hub, or the watchers."""
        return [each for each in self._descendants() if is_helper(each, name)]

    def _hub_address(self) -> tuple[str, int]:
        return listening_address(self.helpers("hub")[0].pid)

    def _recover(self, fault: Fault, said: int, next_kind: str) -> None:
        """Waits until the run says what has happened and goes on; starts it again where that has ended."""
        began = time.monotonic()

        def is_over() -> bool:
            text = self.text(said)
            return self.has_ended() or "\nrestart " in text or "error: " in text

        fault.detected = self.wait_until(is_over, f"what the run says of {fault.kind}")
        if self.is_apart or fault.kind in ENDS_THE_RUN:
            self.wait_until(lambda: self.has_ended() and not self.processes(), "the end of all processes")
        else:
            self.wait_until(lambda: self.has_ended() or "\nrestart " in self.text(said), "a restart")
        fault.ended = time.monotonic() - began
        if fault.kind == "TERM" and set(self.exit_codes()) != {75}:
            fault.problem = f"exit codes {self.exit_codes()}"
        if self.has_ended():
            if self.hosts is not None and self.hosts.switch is not None:
                self.hosts.switch.cut = set()
            self.started = []  # so that chance decides on the way
            self.start(self._wants_hosts(next_kind))
        self.wait_until(lambda: "resumed after step " in self.text(said) or self.has_ended(), "the resumption")
        resumed = self.text(said).rpartition("resumed after step ")[2]
        fault.lost = max(0, fault.step - int(resumed.split(",")[0])) if resumed[:1].isdigit() else fault.step
        fault.again = self._wait_for_a_step(fault)

    def _bring_back(self, fault: Fault) -> None:
        """Says that the lost ranks are back, some steps later, and waits until all run again."""
        after = self.last_step() + self.dice.randrange(5)
        self.wait_until(lambda: self.last_step() >= after or self.has_ended(), "steps with fewer ranks")
        if self.last_step() >= self.steps:
            return
        said = self.log.stat().st_size
        for file in (self.output / "slipstream-run/lost").glob("*"):
            file.unlink()
        self.wait_until(lambda: "as --pp=2 --dp=2" in self.text(said) or self.has_ended(), "a larger mesh")
        self.wait_until(lambda: "resumed after step " in self.text(said) or self.has_ended(), "the resumption")

    def follow(self, other: Soak) -> None:
        """Runs undisturbed on the meshes that another soak has had, stopped and resumed at the steps at which it
        changed."""
        phases = other.meshes()
        for number, (after, replicas) in enumerate(phases):
            end = phases[number + 1][0] if number + 1 < len(phases) else self.steps
            settings = [f"--training.steps={end}", f"--dp={replicas}", f"--pipeline.num_microbatches={2 // replicas}"]
            arguments = ["train", str(write_config(self)), *settings]
            arguments += [f"--checkpoint.resume={after}"] if number else []
            self.started = self._task_hosts[0].start(arguments, [self._environment])
            self.wait_until(self.has_ended, f"the end of step {end}")
            if any(self.exit_codes()):
                raise OSError(f"the undisturbed run ended with {self.exit_codes()}: {self.text()[-3000:]}")

    def meshes(self) -> list[tuple[int, int]]:
        """Returns after which steps the run had how many replicas, by the starts that are in its metrics."""
        found: list[tuple[int, int]] = []
        for line in (self.output / "metrics.jsonl").read_text().splitlines():
            if "started_after" in (start := json.loads(line)):
                after, replicas = start["started_after"], start["mesh"]["dp"]
                found = [each for each in found if each[0] < after]  # steps since then ran again
                if not found or found[-1][1] != replicas:
                    found.append((after, replicas))
        return found

    def processes(self) -> list[int]:
        """Returns all processes of this run, watchers too."""
        kept = {pid for host in self._task_hosts for pid in host.pids}
        return [each.pid for each in psutil.process_iter() if each.pid not in kept and self.mark in _marks_of(each)]


def is_helper(process: psutil.Process, name: str) -> bool:
    """Whether a process is the hub, or a watcher."""
    with suppress(psutil.Error):
        return process.cmdline()[-1:] == [f"slipstream.watchdog.{name}"]
    return False


def listening_address(pid: int) -> tuple[str, int]:
    """Returns where a process listens in its own network, which psutil doesn't look at."""
    inodes = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in inodes:
            address, port = fields[1].split(":")
            return socket.inet_ntoa(int(address, 16).to_bytes(4, sys.byteorder)), int(port, 16)
    raise OSError(f"process {pid} doesn't listen")


def _marks_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        if process.status() != psutil.STATUS_ZOMBIE:
            return process.environ().get(MARK, "")
    return ""


def write_config(soak: Soak) -> Path:
    """Writes the configuration of a tiny run on two replicas of two stages."""
    text = soak.folder / "text.txt"
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
        "optimizer": {"schedule": "constant"},  # so that a part of the run has the whole one's learning rates
        "training": {"output": str(soak.output), "seq_len": 64, "batch_size": 4, "steps": soak.steps}
        | {"stall_limit": soak.stall_limit, "max_restarts": 10_000},
        "checkpoint": {"every": 2, "keep": 3},
    }
    path = soak.folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path
