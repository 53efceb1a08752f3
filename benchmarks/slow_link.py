"""A slow link between two hosts: what one long sequence pays for it in one slice, and in eight.

    python -m benchmarks.slow_link                  # as root; prints a table, writes results/slow_link.json

Two hosts of this machine (benchmarks/hosts.py) with one rank each. Their link is limited with `tc tbf`, in both
directions, or left as it is; its delay stays the machine's own. In one slice, an activation is sent when all of it is
computed, and the other host waits for all of it. In eight, the next slices are computed while one is on the way.

Each slicing has separate processes. They take steps alternately, link by link, so that other load on the machine
affects all of them alike. A step is forward and backward; its time is the slower rank's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.harness import interleaved, medians, restart_in_environment, setting, write
from benchmarks.hosts import Hosts
from benchmarks.peers import VOCABULARY, model_config
from slipstream import Pipeline, Runtime

SLICES = (1, 8)
FAST = "as fast as the machine"
_FIRST_PORT = 29600
_WARM_UPS = 2


class Pair:
    """Two ranks on two hosts, which take a step whenever `run` is called."""

    def __init__(self, hosts: Hosts, slices: int, length: int) -> None:
        self.losses: set[float] = set()
        place = {"MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": str(_FIRST_PORT + slices), "WORLD_SIZE": "2"}
        command = [sys.executable, "-m", "benchmarks.slow_link", f"--serve={slices}", f"--length={length}"]
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

    def run(self) -> float:
        """Takes a step; returns the slower rank's seconds."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("step\n")
            process.stdin.flush()
        answers = self._answers()
        self.losses |= {answer["loss"] for answer in answers}
        return max(answer["seconds"] for answer in answers)

    def _answers(self) -> list[dict[str, float]]:
        lines = [process.stdout.readline() for process in self._processes]  # type: ignore[union-attr]
        if not all(lines):
            raise RuntimeError(f"a rank ended with {[process.poll() for process in self._processes]}")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


def serve(slices: int, length: int) -> None:
    """Serves as one rank of a pair: takes a step for every line on standard input."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pipe = Pipeline.from_config(
        model_config(length), seed=0, runtime=Runtime(self_check=False), seq_len=length, slices=slices
    )
    inputs = torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))
    print(json.dumps({}), flush=True)
    for _ in sys.stdin:
        for parameter in pipe.parameters():
            parameter.grad = None
        dist.barrier()
        began = time.perf_counter()
        loss = float(pipe.step(inputs, inputs))
        print(json.dumps({"seconds": time.perf_counter() - began, "loss": loss}), flush=True)


def over_link(hosts: Hosts, pair: Pair, megabits: float | None) -> float:
    hosts.limit(megabits)
    return pair.run()


def name_link(megabits: float | None) -> str:
    return FAST if megabits is None else f"{megabits:g} Mbit/s"


def measure(hosts: Hosts, length: int, links: list[float | None], repeats: int) -> dict[str, object]:
    pairs = {slices: Pair(hosts, slices, length) for slices in SLICES}
    try:
        for pair in pairs.values():
            pair.wait()
        contenders = {
            f"{slices} slices, {name_link(link)}": partial(over_link, hosts, pair, link)
            for link in links
            for slices, pair in pairs.items()
        }
        seconds = interleaved(contenders, repeats, warmups=_WARM_UPS)
    finally:
        for pair in pairs.values():
            pair.close()
    losses = [loss for pair in pairs.values() for loss in pair.losses]
    assert max(losses) - min(losses) < 1e-3, losses  # both computed the same thing
    middle = medians(seconds)
    rows = [{"link": name_link(link), **compare(middle, name_link(link))} for link in links]
    sent = 4 * length * model_config(length).hidden_size  # float32 activations, and as many gradients back
    return {"tokens": length, "bytes_each_way": sent, "seconds": seconds, "medians": middle, "links": rows}


def compare(middle: dict[str, float], link: str) -> dict[str, float]:
    """Returns what eight slices gain on this link, and how much longer each slicing takes than on the fast one."""
    one, several = (middle[f"{slices} slices, {link}"] for slices in SLICES)
    fast_one, fast_several = (middle[f"{slices} slices, {FAST}"] for slices in SLICES)
    return {
        "1 slice": one,
        "8 slices": several,
        "1 slice over 8": one / several,
        "1 slice over the fast link": one / fast_one,
        "8 slices over the fast link": several / fast_several,
    }


def show(report: dict[str, object]) -> None:
    print(f"\none sequence of {report['tokens']} tokens, {report['bytes_each_way']:,} bytes each way")
    print("seconds a step (over the same on the fast link)")
    for row in report["links"]:  # type: ignore[attr-defined]
        print(
            f"  {row['link']:>22}: 1 slice {row['1 slice']:.3f} ({row['1 slice over the fast link']:.2f}x), "
            f"8 slices {row['8 slices']:.3f} ({row['8 slices over the fast link']:.2f}x); "
            f"1 slice takes {row['1 slice over 8']:.2f}x as long as 8"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=2048, help="tokens of the sequence")
    parser.add_argument("--megabits", type=float, nargs="*", default=[100, 25], help="of the slow links, a second")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--name", default="slow_link", help="of the file in results/")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
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
