"""A slow link between two hosts: what one long sequence pays for it in one slice, in more, and in interleaved ones.

    python -m benchmarks.slow_link                  # as root; prints a table, writes results/slow_link.json

Two hosts of this machine (benchmarks/hosts.py) with one rank each. Their link is limited with `tc tbf`, in both
directions, or left as it is; its delay stays the machine's own. In one slice, an activation is sent when all of it is
computed, and the other host waits for all of it. In eight, the next slices are computed while one is on the way.
Interleaved, with two stages on each host, they wait less for each other and send three times as much.

Each of these has separate processes. They take steps alternately, link by link, so that other load on the machine
affects all of them alike. A step is forward and backward; its time is the slower rank's. Beside it stands what the
simulator predicts from the times of actions on the fast link and the bandwidth of the slow one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.action_times import ActionTimes
from benchmarks.harness import interleaved, medians, restart_in_environment, setting, write
from benchmarks.hosts import Hosts
from benchmarks.peers import VOCABULARY, model_config
from slipstream import Pipeline, Runtime, Schedule, make_schedule, simulate

# Each with one microbatch: the schedule, its slices, and the stages of each rank.
CONTENDERS = {
    "1 slice": ("1f1b", 1, 1),
    "2 slices": ("1f1b", 2, 1),
    "2 slices, interleaved": ("interleaved-1f1b", 2, 2),
    "8 slices": ("1f1b", 8, 1),
    "8 slices, interleaved": ("interleaved-1f1b", 8, 2),
}
FAST = "as fast as the machine"
_FIRST_PORT = 29600
_WARM_UPS = 2


class Pair:
    """Two ranks on two hosts, which take a step whenever `run` is called."""

    def __init__(self, hosts: Hosts, contender: str, length: int) -> None:
        number = [*CONTENDERS].index(contender)
        self.losses: set[float] = set()
        place = {"MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": str(_FIRST_PORT + number), "WORLD_SIZE": "2"}
        command = [sys.executable, "-m", "benchmarks.slow_link", f"--serve={contender}", f"--length={length}"]
        self._processes = [
            subprocess.Popen(
                hosts.command(rank, command),
                env=os.environ | place | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "eth0"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]

    def wait(self) -> None:
        """Waits until both are built. The pairs start side by side, and none runs before all are built."""
        self._answers()

    def run(self, megabits: float | None) -> float:
        """Takes a step; returns the slower rank's seconds."""
        answers = self._ask(f"step {json.dumps(megabits)}")
        self.losses |= {answer["loss"] for answer in answers}
        return max(answer["seconds"] for answer in answers)

    def predict(self, megabits: float | None) -> float:
        """Returns the seconds of a step on this link by the simulator, from the steps on the fast link so far."""
        return self._ask(f"predict {json.dumps(megabits)}")[0]["seconds"]

    def _ask(self, request: str) -> list[dict[str, float]]:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{request}\n")
            process.stdin.flush()
        return self._answers()

    def _answers(self) -> list[dict[str, float]]:
        lines = [process.stdout.readline() for process in self._processes]  # type: ignore[union-attr]
        if not all(lines):
            raise RuntimeError(f"a rank ended with {[process.poll() for process in self._processes]}")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


def serve(contender: str, length: int) -> None:
    """Serves as one rank of a pair: answers every line on standard input, "step" or "predict" and a link."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    name, num_slices, stages_per_rank = CONTENDERS[contender]
    schedule = make_schedule(name, 2, 1, num_slices, stages_per_rank)
    pipe = Pipeline.from_config(model_config(length), seed=0, schedule=schedule, runtime=Runtime(self_check=False))
    inputs = torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))
    times, num_fast_steps = ActionTimes(), 0
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        request, link = line.split()
        megabits = json.loads(link)
        if request == "predict":
            print(json.dumps({"seconds": predicted(schedule, times, length, megabits)}), flush=True)
            continue
        for parameter in pipe.parameters():
            parameter.grad = None
        dist.barrier()
        began = time.perf_counter()
        loss = float(pipe.step(inputs, inputs))
        seconds = time.perf_counter() - began
        timeline = pipe.timeline()
        if megabits is None:
            num_fast_steps += 1
            if num_fast_steps > _WARM_UPS:
                times.add(timeline)
        print(json.dumps({"seconds": seconds, "loss": loss}), flush=True)


def predicted(schedule: Schedule, times: ActionTimes, length: int, megabits: float | None) -> float:
    """Returns the seconds of a step by the simulator, where messages share a link of this many megabits a second."""
    cost = times.cost()
    if megabits is not None:
        slice_bytes = message_bytes(length) / schedule.num_slices
        sizes = [slice_bytes] * schedule.num_slices
        cost = replace(cost, message_bytes=sizes, bandwidth=megabits * 1e6 / 8)
    return simulate(schedule, cost).makespan


def message_bytes(length: int) -> int:
    """Returns the bytes of a sequence's float32 activations between two stages, or of their gradients."""
    return 4 * length * int(model_config(length).hidden_size)


def over_link(hosts: Hosts, pair: Pair, megabits: float | None) -> float:
    hosts.limit(megabits)
    return pair.run(megabits)


def name_link(megabits: float | None) -> str:
    return FAST if megabits is None else f"{megabits:g} Mbit/s"


def measure(hosts: Hosts, length: int, links: list[float | None], repeats: int) -> dict[str, object]:
    pairs = {contender: Pair(hosts, contender, length) for contender in CONTENDERS}
    try:
        for pair in pairs.values():
            pair.wait()
        contenders = {
            f"{contender}, {name_link(link)}": partial(over_link, hosts, pair, link)
            for link in links
            for contender, pair in pairs.items()
        }
        seconds = interleaved(contenders, repeats, warmups=_WARM_UPS)
        predictions = {link: {name: pair.predict(link) for name, pair in pairs.items()} for link in links}
    finally:
        for pair in pairs.values():
            pair.close()
    losses = [loss for pair in pairs.values() for loss in pair.losses]
    assert max(losses) - min(losses) < 1e-3, losses  # both computed the same thing
    middle = medians(seconds)
    rows = [
        {"link": name_link(link), **compare(middle, name_link(link)), "predicted": predictions[link]} for link in links
    ]
    return {
        "tokens": length,
        "bytes_each_way": message_bytes(length),
        "seconds": seconds,
        "medians": middle,
        "links": rows,
    }


def compare(middle: dict[str, float], link: str) -> dict[str, float]:
    """Returns the steps on this link, and how much longer each takes than on the fast one."""
    steps = {contender: middle[f"{contender}, {link}"] for contender in CONTENDERS}
    over = {f"{name} over the fast link": took / middle[f"{name}, {FAST}"] for name, took in steps.items()}
    return {**steps, "1 slice over 8": steps["1 slice"] / steps["8 slices"], **over}


def show(report: dict[str, object]) -> None:
    print(f"\none sequence of {report['tokens']} tokens, {report['bytes_each_way']:,} bytes each way")
    print("seconds a step (over the same on the fast link; by the simulator)")
    for row in report["links"]:  # type: ignore[attr-defined]
        print(
            f"  {row['link']:>22}: "
            + ", ".join(
                f"{each} {row[each]:.3f} ({row[f'{each} over the fast link']:.2f}x; {row['predicted'][each]:.3f})"
                for each in CONTENDERS
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=2048, help="tokens of the sequence")
    parser.add_argument("--megabits", type=float, nargs="*", default=[100, 25], help="of the slow links, a second")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--name", default="slow_link", help="of the file in results/")
    parser.add_argument("--serve", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve, options.length)
    restart_in_environment()
    hosts = Hosts(2)
    try:
        report = measure(hosts, options.length, [None, *options.megabits], options.repeats)
    finally:
        hosts.close()
    show(report)
    print(f"wrote {write(options.name, {'setting': setting(repeats=options.repeats), **report})}")
    return None


if __name__ == "__main__":
    main()
