"""Finds the plans of all requests and compares them with those that are kept.

    python -m benchmarks.golden_plans                  # exit code 1 where one differs from `plans.json`
    python -m benchmarks.golden_plans --against TREE   # with those of another checkout, on this machine
    python -m benchmarks.golden_plans --some 20        # every tenth request or so
    python -m benchmarks.golden_plans --record         # writes plans.json: only where plans are meant to change

What a plan decides is to be equal. Seconds and bytes may differ by 1e-9 of their size from the kept ones, which another
processor may have computed, and by 1e-12 from those of the other checkout.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.golden_plans.answers import Answer, answer
from benchmarks.golden_plans.compare import differences
from benchmarks.golden_plans.requests import Request, all_requests

KEPT = Path(__file__).with_name("plans.json")
KEPT_TOLERANCE = 1e-9
_TOLERANCE = 1e-12


def chosen(some: int | None) -> list[tuple[int, Request]]:
    """Returns the numbered requests: all, or about `some` of them, evenly spread."""
    requests = [*enumerate(all_requests())]
    return requests if some is None else requests[:: max(1, len(requests) // some)]


def answers(requests: list[tuple[int, Request]], num_processes: int) -> dict[str, Answer]:
    """Returns the answers by their request's number."""
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        found = {}
        for (number, request), each in zip(
            requests, pool.imap(answer, [request for _, request in requests]), strict=True
        ):
            found[str(number)] = each
            if sys.stderr.isatty():
                print(f"\r{len(found)} of {len(requests)} ({request['kind']})   ", end="", file=sys.stderr)
    return found


def answers_of(tree: Path, arguments: list[str]) -> dict[str, Answer]:
    """Returns the answers of another checkout, found by its own code."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answers.json"
        command = [sys.executable, "-m", "benchmarks.golden_plans", "--write", str(file), *arguments]
        paths = os.environ | {"PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}
        subprocess.run(command, check=True, cwd=tree, env=paths)
        loaded: dict[str, Answer] = json.loads(file.read_text())
    return loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--some", type=int, help="how many requests, about")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--record", action="store_true", help="write plans.json")
    parser.add_argument("--write", type=Path, help="write the answers to a file, and compare nothing")
    asked = parser.parse_args()

    requests = chosen(asked.some)
    found = json.loads(json.dumps(answers(requests, asked.processes)))
    if asked.record or asked.write:
        path = KEPT if asked.record else asked.write
        lines = (f"{json.dumps(number)}: {json.dumps(each, sort_keys=True)}" for number, each in found.items())
        path.write_text("{" + ",\n".join(lines) + "}\n")
        print(f"wrote {path}")
        return
    if asked.against:
        passed_on = ["--processes", str(asked.processes)] + (["--some", str(asked.some)] if asked.some else [])
        wanted, tolerance = answers_of(asked.against.resolve(), passed_on), _TOLERANCE
    else:
        wanted, tolerance = json.loads(KEPT.read_text()), KEPT_TOLERANCE
    num_different = 0
    for number, request in requests:
        different = [*differences(wanted[str(number)], found[str(number)], tolerance)]
        if different:
            num_different += 1
            print(f"request {number}: {request}")
            for line in different[:12]:
                print(f"    {line}")
    print(f"{len(requests) - num_different} of {len(requests)} plans are as they were")
    sys.exit(num_different > 0)


if __name__ == "__main__":
    main()
