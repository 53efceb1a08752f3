"""What the executor adds: the measured step over the step simulated from that run's own action and link times.

python -m benchmarks.executor_overhead             # prints a table, writes results/executor_overhead.json
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist

from benchmarks.harness import few, setting, two_ranks, write
from benchmarks.peers import VOCABULARY, model_config
from slipstream import Action, Op, Pipeline, Runtime, simulate
from slipstream.comm import DistributedTransport
from slipstream.model import TensorSpec
from slipstream.parallel import Ranks
from slipstream.schedule import Channel
from slipstream.simulator import MeasuredCost
from slipstream.timeline import Timeline

CASES = [(1, 1, 8), (1, 1, 16), (4, 4, 4), (8, 8, 1)]  # sequences, microbatches, slices


class MeasuredWithLinks(MeasuredCost):
    """Takes actions from the run's times, and links from a message of that size between two ready ends.

    The run's own messages also waited for busy ranks to look at them, which is what is to be measured.
    """

    def __init__(self, timeline: Timeline, link_seconds: float) -> None:
        super().__init__(timeline)
        self._seconds_per_message = link_seconds

    def link_seconds(self, send: Action, source: int, destination: int) -> float:
        return self._seconds_per_message


def ping(num_bytes: int, repeats: int = 40) -> float:
    """Returns the seconds of a message of that size between two waiting ends: half the median round trip."""
    there, back = Channel("activations", 0, 1), Channel("activations", 1, 0)
    transport = DistributedTransport({there: 8, back: 8}, torch.device("cpu"), Ranks.of())
    payload = torch.zeros(num_bytes // 4)
    out, home = Action(Op.SEND_F, 0), Action(Op.SEND_F, 1)
    mine, theirs = ((there, out), (back, home)) if dist.get_rank() == 0 else ((back, home), (there, out))
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        transport.post_receive(*theirs, [TensorSpec(payload.shape, payload.dtype)])
        began = time.perf_counter()
        if dist.get_rank() == 0:
            transport.send(*mine, (payload,))
            transport.receive(theirs[1])
        else:
            transport.receive(theirs[1])
            transport.send(*mine, (payload,))
        seconds.append((time.perf_counter() - began) / 2)
        transport.release(theirs[1])
        transport.finish()
    return statistics.median(seconds)


def measure(sequences: int, microbatches: int, slices: int, length: int, repeats: int) -> dict[str, object]:
    pipe = Pipeline.from_config(
        model_config(length),
        runtime=Runtime(self_check=False),
        slices=slices,
        num_microbatches=microbatches,
        partition=[4, 4],
    )
    inputs = torch.randint(0, VOCABULARY, (sequences, length), generator=torch.Generator().manual_seed(0))
    link = ping(sequences // microbatches * length // slices * 512 * 4)
    ratios, steps = [], []
    for index in range(repeats + 2):
        for parameter in pipe.parameters():
            parameter.grad = None
        dist.barrier()
        pipe.step(inputs, inputs)
        timeline = pipe.timeline()
        if index >= 2:
            simulated = simulate(pipe.layout.training, MeasuredWithLinks(timeline, link)).makespan
            steps.append(timeline.makespan)
            ratios.append(timeline.makespan / simulated)
    return {
        "sequences": sequences,
        "microbatches": microbatches,
        "slices": slices,
        "tokens": length,
        "link_ms": round(link * 1e3, 3),
        "step_seconds": round(statistics.median(steps), 4),
        "measured_over_simulated": round(statistics.median(ratios), 4),
        "all": [round(ratio, 4) for ratio in ratios],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with two_ranks() as is_first:
        rows = []
        for sequences, microbatches, slices in few(CASES):
            length = options.length // sequences
            rows.append(measure(sequences, microbatches, slices, length, options.repeats))
            if is_first:
                print(rows[-1], flush=True)
        if is_first:
            print(f"wrote {write('executor_overhead', {'setting': setting(repeats=options.repeats), 'rows': rows})}")


if __name__ == "__main__":
    main()
