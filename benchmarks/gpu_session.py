"""Everything that a short lease of a GPU is for, in three parts of less than ten minutes, the most valuable first.

    python -m benchmarks.gpu_session --list                 # the tasks, their seconds, and the records that they renew
    python -m benchmarks.gpu_session --carry                # at home: downloads what the machine lacks, into .wheels
    python -m benchmarks.gpu_session --part 1 --output DIR  # on the machine with the GPU; then --part 2, --part 3
    python -m benchmarks.gpu_session --take DIR             # at home: puts the records where they belong
    python -m benchmarks.gpu_session --dry                  # on a CPU, at toy size: could each task start?

Each task is a process of its own with a limit. When it ends, or is ended, one file has what it printed and the records
that it has written, so that a lease cut short has given something; all parts together write at most eight files.

The machine needs a Python with PyTorch, transformers, and what else is too large to carry (numba, pyarrow, pandas,
matplotlib), a copy of the working tree, and no network: Slipstream is imported from src, and what that Python lacks
from the wheels in .wheels, which git ignores, so it must be copied too. A task whose packages are nowhere isn't run:
its file says which.

A dry run is of the same programs with the same arguments, and those of the toy size after them, on a stand-in for that
machine (`bare_machine`). What sources use of CUDA's modules is compared with the oldest torch (`tools.oldest_torch`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from tools.oldest_torch import lacking, sources

# nothing of Slipstream or its packages, which this Python may lack
from benchmarks.bare_machine import BareMachine, make_machine
from benchmarks.records import RESULTS, ROOT, TRIAL

WHEELS = ROOT / ".wheels"
# Small packages that a Python with PyTorch and transformers may lack, of the lock's versions. Those that it has stay.
CARRIED = (
    *("accelerate", "annotated-types", "datasets", "dill", "hypothesis", "iniconfig", "multiprocess", "peft"),
    *("pluggy", "psutil", "pydantic", "pydantic_core", "pytest", "pytest-timeout", "rich", "sortedcontainers"),
    *("shellingham", "typer", "typing-inspection", "xxhash"),
)
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
TAIL = 20_000  # characters of what a task printed
MOST_FILES = 8
NEEDS = ("pytest", "pytest_timeout", "hypothesis", "peft", "accelerate", "pydantic", "datasets", "numba")  # of tests
ON_A_GPU = (
    "tests/pipeline/execution/test_step_graphs.py",
    "tests/pipeline/execution/test_offload.py",
    "tests/attention/test_cuda.py",
    "tests/pipeline/test_cuda.py",
    "tests/pipeline/memory/test_memory.py",
    "tests/pipeline/test_shared_gpu.py",
    "tests/pipeline/test_overlap.py",
    "tests/checkpoint/test_checkpoint.py",
    "tests/cli/test_doctor.py",
)


@dataclass(frozen=True)
class Task:
    """A program, by the arguments of Python, and what makes it one of toy size that a CPU runs."""

    name: str
    part: int
    seconds: int
    command: tuple[str, ...]
    toy: tuple[str, ...] = ()  # arguments behind the others, which they outdo
    records: tuple[str, ...] = ()  # in benchmarks/results
    needs: tuple[str, ...] = ()  # packages


NCCL = ("tests/parallel/test_nccl.py", "tests/pipeline/test_overlap.py")


def tests(seconds: int, *arguments: str) -> tuple[str, ...]:
    """Returns a run of pytest that ends by itself, so that it says why tests have failed, before its task's limit."""
    names = ("-v", "-p", "no:cacheprovider", "--durations=10", "--tb=short", f"--session-timeout={seconds - 15}")
    return ("-m", "pytest", *names, *arguments)


TASKS = (
    Task("doctor", 1, 20, ("-m", "slipstream", "doctor", "--json")),
    Task(
        "nccl",
        1,
        150,
        tests(150, "-m", "nccl", *NCCL),
        ("-m", "not nccl", "-k", "one_f_one_b or made_up", "--session-timeout=600"),
        needs=NEEDS,
    ),
    Task(
        "gpu_tests",
        1,
        140,
        tests(140, "-m", "gpu", *ON_A_GPU),
        ("--collect-only", "-qq"),
        needs=NEEDS,
    ),
    Task(
        "host_time",
        2,
        60,
        ("-m", "benchmarks.host_time", "--device=cuda"),
        ("--device=cpu", "--repeats=1"),
        ("host_time_cuda",),
    ),
    Task(
        "attention",
        2,
        110,
        ("-m", "benchmarks.gpu_attention", "--longest", "8192", "32768", "--repeats=5"),
        ("--device=cpu", "--toy", "--repeats=1"),
        ("gpu_attention",),
    ),
    Task(
        "layers",
        2,
        60,
        ("-m", "benchmarks.gpu_layers", "--fused", "--repeats=5"),
        ("--device=cpu", "--toy", "--repeats=1"),
        ("gpu_layers_fused",),
    ),
    Task(
        "profile",
        2,
        60,
        ("-m", "benchmarks.gpu_profile", "--model=Llama-3-8B", "--budget=40"),
        ("--device=cpu", "--toy", "--budget=20"),
        ("gpu_profile",),
    ),
    Task(
        "context",
        3,
        240,
        ("-m", "benchmarks.gpu_context"),
        ("--device=cpu", "--toy"),
        ("gpu_context",),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", type=int, choices=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=[task.name for task in TASKS], metavar="TASK")
    parser.add_argument("--output", type=Path, help="a folder for one file of each task")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--dry", action="store_true", help="toy sizes on a CPU")
    parser.add_argument(
        "--carry", nargs="?", const="3.12", metavar="PYTHON", help="download wheels for the machine's Python (3.12)"
    )
    parser.add_argument("--take", type=Path, metavar="FOLDER", help="copy the records in its files to results/")
    options = parser.parse_args()
    if options.take is not None:
        take(options.take)
        return
    if options.carry is not None:
        carry(options.carry)
        return
    chosen = [
        task
        for task in TASKS
        if options.part in (None, task.part) and (options.only is None or task.name in options.only)
    ]
    if options.list:
        show(chosen)
        return
    if not options.dry and options.output is None:
        parser.error("--output=FOLDER: where to write what each task found (--dry needs none)")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.output or Path(temporary) / "found"
        folder.mkdir(parents=True, exist_ok=True)
        if options.dry:
            stand_in = make_machine(ROOT, Path(temporary), CARRIED)
        else:
            unpack(WHEELS, Path(temporary) / "packages")
        found = [run(task, folder, stand_in if options.dry else None) for task in chosen]
    for each in found:
        print(f"{each['task']:10} {each['outcome']:8} {each['seconds']:6.1f} s  {each['last line']}")
    newer = lacking(sources()) if options.dry else []
    for each in newer:
        print(f"{each} isn't in the oldest torch")
    if newer or any(each["outcome"] not in ("passed", "lacks") for each in found):
        raise SystemExit(1)


def show(tasks: Sequence[Task]) -> None:
    for task in tasks:
        renews = f"; renews {', '.join(task.records)}" if task.records else ""
        print(f"part {task.part}  {task.name:10} {task.seconds:4} s  python {' '.join(task.command)}{renews}")
    for part in sorted({task.part for task in tasks}):
        print(f"part {part}: {sum(task.seconds for task in tasks if task.part == part)} s at most")
    print(carried())


def carry(python: str) -> None:
    """Downloads the wheels of CARRIED for Linux on x86-64."""
    locked = dict(line.split("==") for line in (ROOT / "requirements.lock").read_text().split() if "==" in line)
    wanted = [f"{name}=={locked[name]}" for name in CARRIED]
    target = [f"--python-version={python}", "--implementation=cp", *(f"--platform={each}" for each in PLATFORMS)]
    options = ["--quiet", "--no-deps", "--only-binary=:all:", f"--dest={WHEELS}", *target]
    for wheel in WHEELS.glob("*.whl"):
        wheel.unlink()  # of another version
    subprocess.run([sys.executable, "-m", "pip", "download", *options, *wanted], check=True)
    print(carried())


def carried() -> str:
    """Returns which wheels there are to take along."""
    wheels = sorted(WHEELS.glob("*.whl"))
    if not wheels:
        return f"{WHEELS.name}: nothing is there yet to take along; --carry downloads it"
    megabytes = sum(wheel.stat().st_size for wheel in wheels) / 1e6
    return f"{WHEELS.name}, to take along: {len(wheels)} wheels, {megabytes:.1f} MB"


def unpack(wheels: Path, folder: Path) -> None:
    """Lets tasks import Slipstream, and of the packages in `wheels` those that this Python lacks."""
    for wheel in sorted(wheels.glob("*.whl")):
        name, number, *_ = wheel.name.split("-")
        try:
            version(name)
        except PackageNotFoundError:
            ZipFile(wheel).extractall(folder)
            print(f"{name} {number} of {wheel.parent.name}")
    sys.path[:0] = paths = [str(folder), str(ROOT / "src"), str(ROOT)]
    importlib.invalidate_caches()
    before = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *before])


def run(task: Task, folder: Path, stand_in: BareMachine | None = None) -> dict[str, Any]:
    """Runs a task within its limit, and writes what it found at once; returns that. On a stand-in for the machine it is
    of toy size and takes as long as it takes."""
    missing = [name for name in task.needs if importlib.util.find_spec(name) is None]
    if missing:
        return write(task, folder, "lacks", 0.0, f"not run: this machine lacks {', '.join(missing)}", {})
    began, first = time.monotonic(), time.time()
    with tempfile.TemporaryDirectory() as trial, tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, *task.command, *(task.toy if stand_in else ())],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**stand_in.environment, TRIAL: trial} if stand_in else None,
            cwd=stand_in.tree if stand_in else ROOT,
            start_new_session=True,
        )
        try:
            outcome = "passed" if process.wait(None if stand_in else task.seconds) == 0 else "failed"
        except subprocess.TimeoutExpired:
            outcome = "too long"
        finally:
            _end(process)
        log.seek(0)
        printed = log.read()
        if outcome == "failed":
            printed += f"\nexit code {process.returncode}"
        results = Path(trial) if stand_in else RESULTS
        names = {name.replace("_cuda", "_cpu") if stand_in else name for name in task.records}
        records = {
            name: json.loads(path.read_text())
            for name in names
            if (path := results / f"{name}.json").exists() and path.stat().st_mtime >= first - 1
        }
    if outcome == "passed" and (unwritten := names - records.keys()):
        outcome, printed = "failed", f"{printed}\nno record {', '.join(unwritten)}"
    return write(task, folder, outcome, time.monotonic() - began, printed, records)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a task, its ranks included."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def write(
    task: Task, folder: Path, outcome: str, seconds: float, printed: str, records: dict[str, Any]
) -> dict[str, Any]:
    lines = printed.strip().splitlines()
    found = {
        "task": task.name,
        "outcome": outcome,
        "seconds": round(seconds, 1),
        "last line": lines[-1][:200] if lines else "",
        "command": f"python {' '.join(task.command)}",
        "records": records,
        "printed": printed[-TAIL:],
    }
    (folder / f"{task.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"{task.name}: {outcome} after {seconds:.1f} s", flush=True)
    return found


def take(folder: Path) -> None:
    """Copies the records in the files of a session to where records are kept."""
    for path in sorted(folder.rglob("*.json")):
        for name, record in json.loads(path.read_text()).get("records", {}).items():
            (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
            print(f"{RESULTS / name}.json from {path}")


assert len(TASKS) <= MOST_FILES

if __name__ == "__main__":
    main()
