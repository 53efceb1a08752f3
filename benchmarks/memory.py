"""The simulator's peak memory against the measured one, per rank, over schedules, slices, recomputation, offloading.

    python -m benchmarks.memory                  # prints a table, writes results/memory.json

Every rank is a process. A step is measured after two with AdamW, so gradients start from none, and the optimizer's
state and the transport's buffers are there. Measured is the most bytes of all storages of tensors alive at once,
simulated what the rank's actions add up to, each as it was measured alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig

from benchmarks.harness import few, restart_in_environment, setting, write
from slipstream import Memory, Pipeline, Runtime, SlipstreamError
from slipstream.profile.stage_bench import memory_meter, tensors_alive
from slipstream.simulator import rank_memory

RANKS = (2, 4)
BATCHES = ((1, 1024), (4, 512))  # microbatches of one row, tokens
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved-1f1b": 2, "zb-h1": 1, "zb-v": 2}  # and stages a rank
SLICES = (1, 4, 8)
CONFIG = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}


def cases() -> Iterator[dict[str, Any]]:
    """Yields the settings of the pipelines."""
    for microbatches, length in BATCHES:
        batch = {"microbatches": microbatches, "tokens": length}
        for schedule in SCHEDULES:
            for slices in SLICES:
                yield batch | {"schedule": schedule, "slices": slices, "recompute": "none", "offload": 0.0}
        for schedule in ("1f1b", "interleaved-1f1b", "zb-v"):
            for recompute in ("selective", "stage"):
                yield batch | {"schedule": schedule, "slices": 4, "recompute": recompute, "offload": 0.0}
    for schedule in ("gpipe", "zb-h1", "zb-v"):  # of the last batch: one sequence leaves little to move
        for recompute, offload in (("none", 1.0), ("none", 0.5), ("selective", 1.0)):
            yield batch | {"schedule": schedule, "slices": 4, "recompute": recompute, "offload": offload}


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Returns simulated and measured bytes of this process, and the kinds of bytes at the simulated peak."""
    pipe = Pipeline.from_config(
        LlamaConfig(**CONFIG),
        schedule=case["schedule"],
        stages_per_rank=SCHEDULES[case["schedule"]],
        num_microbatches=case["microbatches"],
        slices=case["slices"],
        memory=Memory(recompute=case["recompute"], offload=case["offload"]),
        runtime=Runtime(self_check=False),
    )
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, CONFIG["vocab_size"], (case["microbatches"], case["tokens"]), generator=generator)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4)
    for _ in range(2):
        pipe.step(inputs, inputs)
        optimizer.step()
        optimizer.zero_grad()
    with memory_meter(pipe.device, tensors_alive()) as memory:
        pipe.step(inputs, inputs)
        measured = memory.peak
    optimizer.zero_grad()
    found = rank_memory(pipe.layout.training, pipe.rank, pipe.memory_table(inputs, inputs))
    return {
        "simulated": round(found.peak),
        "measured": measured,
        "at": str(found.worst.action),
        "kinds": {str(kind): round(size) for kind, size in found.worst.during.items()},
    }


def run_rank(path: Path) -> None:
    """Runs in every process; the first one writes what all found."""
    dist.init_process_group("gloo")
    rows = []
    for case in few(list(cases())):
        try:
            mine: dict[str, Any] = measure(case)
        except SlipstreamError as error:  # on every rank
            mine = {"refused": str(error)}
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        rows.append(case | {"ranks": ranks})
        if dist.get_rank() == 0:
            print(line(rows[-1]), flush=True)
            path.write_text(json.dumps(rows))
    dist.destroy_process_group()


def errors(row: dict[str, Any]) -> list[float]:
    """Returns the relative error of every rank."""
    return [rank["simulated"] / rank["measured"] - 1 for rank in row["ranks"]]


def line(row: dict[str, Any]) -> str:
    """Returns a line of the table."""
    settings = "{microbatches} x {tokens:<5} {schedule:17} {slices:>2} {recompute:10} {offload:3.1f}".format(**row)
    if "refused" in row["ranks"][0]:
        return f"{len(row['ranks'])}  {settings}  refused: {row['ranks'][0]['refused'][:60]}"
    peaks = " ".join(f"{rank['simulated'] / 2**20:6.1f}/{rank['measured'] / 2**20:6.1f}" for rank in row["ranks"])
    return f"{len(row['ranks'])}  {settings}  {peaks}  {max(errors(row), key=abs):+7.2%}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)  # where the processes leave what they found
    options = parser.parse_args(arguments)
    if options.rank_of:
        run_rank(options.rank_of)
        return
    restart_in_environment()
    print("ranks, batch, schedule, slices, recompute, offload; simulated/measured MiB of every rank; largest error")
    rows: list[dict[str, Any]] = []
    for num_ranks in few(RANKS):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.json"
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
            program = ["-m", "benchmarks.memory", "--rank-of", str(path)]
            subprocess.run([sys.executable, *launcher, *program], check=True)
            rows += json.loads(path.read_text())
    found = [abs(error) for row in rows if "refused" not in row["ranks"][0] for error in errors(row)]
    summary = {"peaks": len(found), "mean_error": statistics.mean(found), "largest_error": max(found)}
    print("{peaks} peaks: mean error {mean_error:.2%}, largest {largest_error:.2%}".format(**summary))
    print(write("memory", {"setting": setting(config=CONFIG), "summary": summary, "rows": rows}))


if __name__ == "__main__":
    main()
