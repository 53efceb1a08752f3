"""All benchmarks, one after the other: `python -m benchmarks`. Leave the machine alone meanwhile."""

from __future__ import annotations

import subprocess
import sys

ALL = [
    "command_line",
    "attention",
    "executor_overhead",
    "memory",
    "profile_fit",
    "slicing",
    "schedule_search",
    "papers",
    "predicted",
    "token_slices",
    "plan_search",
    "planned",
    "checkpoint",
    "zero3",
    "fused",
    "gpipe.memory",
    "gpipe.throughput",
    "gpipe.breakdown",
    "gpipe.peers",
]


def main() -> None:
    for name in ALL:
        print(f"\n== {name}", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)


if __name__ == "__main__":
    main()
