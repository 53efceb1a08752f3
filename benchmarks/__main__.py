"""Runs benchmarks one after the other. Leave the machine alone meanwhile.

python -m benchmarks                  # all that a CPU can measure; writes their records
python -m benchmarks --list           # says what each one measures
python -m benchmarks --trial          # few cases of small size, written to a temporary folder: does everything run?
python -m benchmarks attention zero3  # these only
"""

from __future__ import annotations

import argparse
import ast
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.records import TRIAL

FOLDER = Path(__file__).parent
PROFILE = FOLDER.parent / "examples" / "profiles" / "xeon-two-processes.json"
# The arguments of a trial run, by program.
TRIALS = {
    "command_line": "",
    "attention": "--length 256 --slices 2 --repeats 1",
    "executor_overhead": "--length 128 --repeats 1",
    "memory": "",
    "profile_fit": "--length 256 --granularity 64 --budget 20 --repeats 1",
    "slicing": "--repeats 1",
    "schedule_search": "",
    "papers": "",
    "papers.figure3": str(PROFILE),
    "papers.measured_steps": "",
    "papers.practice": "",
    "predicted": "",
    "ragged": "--layers 2 --longest 256 --tokens 512 --repeats 1",
    "all_peers": "--repeats 1",
    "spread": "--repeats 1",
    "long_sequence": "--repeats 1",
    "token_slices": "--lengths 256 --sequences --ours auto --repeats 1 --warmups 0 --steps 2",
    "auto_grid": "--minutes 2",
    "auto_planned": "--starts 1",
    "mesh_grid": "--rounds 1",
    "model_paths": "",
    "plan_search": "",
    "plan_requests": "",
    "planned": "--budget 20 --repeats 1",
    "checkpoint": "--length 64 --steps 1 --repeats 1",
    "zero3": "--length 64 --repeats 1",
    "fused": "--toy --device cpu",
    "host_time": "--device cpu --repeats 1",
    "lora": "--length 128 --hidden-size 64 --layers 4 --slices 4 --repeats 1",
    "gpipe.memory": "formula",
    "gpipe.throughput": "--repeats 1",
    "gpipe.breakdown": "--repeats 1",
    "gpipe.peers": "--rows 16 --image-size 64 --repeats 2 --schedules gpipe",
    "loss_curves": "",
    "exactness": "--most 1",
    "random_exactness": "--cases 4",
    "same_numbers": "",
    "golden_plans": "--some 4",
    "zoo": "llama --defaults",
    "streaming": "--megabytes 4 --steps 10",
    "slow_link": "--length 128 --megabits 1000 --repeats 1",
    "gpu_layers": "--toy --device cpu",
    "gpu_attention": "--toy --device cpu",
    "gpu_context": "--toy --device cpu",
    "gpu_steps": "--toy --device cpu --budget 5 --steps 1",
    "fault_overhead": "--length 64 --hidden-size 32 --layers 2",
    "end_of_a_rank": "--kills 1",
    "recompute_check": "--length 64 --repeats 2",
    "checkpointing": "--length 64 --repeats 1",
    "soak": "--steps 12 --faults 1 --kinds kill",
    "gpu_profile": "--toy --device cpu --budget 20",
    "gpu_session": "--dry --only doctor",
}
ON_REQUEST = {
    "all_peers",
    "long_sequence",
    "papers.figure3",
    "loss_curves",
    "exactness",
    "random_exactness",
    "same_numbers",
    "golden_plans",
    "zoo",
    "slow_link",
    "auto_grid",
    "mesh_grid",
    "gpu_layers",
    "gpu_attention",
    "gpu_context",
    "gpu_steps",
    "gpu_profile",
    "gpu_session",
    "soak",
    "end_of_a_rank",
}  # a GPU, root, several runs or an hour


def first_line(name: str) -> str:
    """Returns what a program says that it measures."""
    path = FOLDER.joinpath(*name.split("."))
    source = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    return (ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or "").splitlines()[0]


def run(name: str, arguments: str, environment: dict[str, str]) -> bool:
    """Runs a program; returns whether it succeeded."""
    print(f"\n== {name} {arguments}", flush=True)
    began = time.perf_counter()
    command = [sys.executable, "-m", f"benchmarks.{name}", *shlex.split(arguments)]
    ended = subprocess.run(command, env=os.environ | environment)
    print(f"== {name}: {time.perf_counter() - began:.0f} s", flush=True)
    return ended.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks; all where none is given")
    parser.add_argument("--list", action="store_true", help="say what each one measures, and end")
    parser.add_argument("--trial", action="store_true", help="few cases of small size, in a temporary folder")
    options = parser.parse_args()
    if unknown := set(options.names) - set(TRIALS):
        parser.error(f"there is no benchmark {min(unknown)!r}; choose from {', '.join(TRIALS)}")
    if options.list:
        print("\n".join(f"{name:18} {first_line(name)}" for name in TRIALS))
        return
    names = options.names or [name for name in TRIALS if options.trial or name not in ON_REQUEST]
    with tempfile.TemporaryDirectory() as folder:
        environment = {TRIAL: folder} if options.trial else {}
        failed = [name for name in names if not run(name, TRIALS[name] if options.trial else "", environment)]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
