"""Gives every benchmark its environment, its processes, interleaved medians, and the record that it leaves.

`python -m benchmarks --trial` sets BENCHMARK_TRIAL to a folder: then programs take few cases and write there.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from benchmarks.records import RESULTS, TRIAL, is_current, provenance
from slipstream.launch.local_ranks import MALLOC

ENVIRONMENT = MALLOC | {"OMP_NUM_THREADS": "1"}  # what `slipstream train` gives its ranks on a CPU
T = TypeVar("T")


def is_trial() -> bool:
    return TRIAL in os.environ


def few(cases: Sequence[T], most: int = 1) -> Sequence[T]:
    """Returns all cases, or in a trial run the first ones."""
    return cases[:most] if is_trial() else cases


def destination(path: Path) -> Path:
    """Returns where to write a file: at `path`, or in a trial run a file of its name in the trial's folder."""
    return Path(os.environ[TRIAL]) / path.name if is_trial() else path


def in_environment() -> bool:
    return all(os.environ.get(name) == value for name, value in ENVIRONMENT.items())


def restart_in_environment(num_processes: int = 1) -> None:
    """Runs this program again with ENVIRONMENT, under torchrun where it needs several processes; then exits."""
    if in_environment():
        return
    spec = sys.modules["__main__"].__spec__
    assert spec is not None, "start benchmarks as modules: python -m benchmarks.NAME"
    program = ["-m", spec.name, *sys.argv[1:]]
    if num_processes > 1:
        program = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}", *program]
    sys.exit(subprocess.run([sys.executable, *program], env=os.environ | ENVIRONMENT).returncode)


@contextmanager
def two_ranks() -> Iterator[bool]:
    """Runs this program again in two processes over gloo, with a thread each, and there the body; yields whether this
    is rank 0."""
    import torch
    import torch.distributed as dist

    restart_in_environment(num_processes=2)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    yield dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()


def interleaved(
    contenders: Mapping[str, Callable[[], float]],
    repeats: int,
    warmups: int = 2,
    steps: int = 1,
    rests: Mapping[str, Callable[[], None]] = MappingProxyType({}),
) -> dict[str, list[float]]:
    """Returns the seconds of every contender, run one after the other in rounds, so that load from elsewhere meets all.

    The first rounds pay for page faults and do not count. Where a contender runs several steps in a row, the first
    doesn't either: it finds the caches full of what others computed. Steps of over a second are printed as they end.
    After such a turn of several steps, a contender that has one of `rests` calls it.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(warmups + repeats):
        for name, run in contenders.items():
            measured = [run() for _ in range(steps)]
            if max(measured) > 1:
                listed = ", ".join(f"{each:.2f}" for each in measured)
                print(f"round {index + 1} of {warmups + repeats}: {listed} s {name}", file=sys.stderr, flush=True)
            if index >= warmups:
                seconds[name] += measured[steps > 1 :]
            if steps > 1 and name in rests:
                rests[name]()
    return seconds


def wait_for(device: Any) -> None:
    """Waits until a torch.device has done all that it was given."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def name_of(device: Any) -> str:
    """Returns what a torch.device calls itself."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def kernels_of(device: Any) -> dict[str, Any]:
    """Returns PyTorch's fused attention kernels for a torch.device, by name."""
    from torch.nn.attention import SDPBackend

    found = {"FlashAttention-2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    return found if device.type == "cuda" else {"FlashAttention-2": SDPBackend.FLASH_ATTENTION}


def as_graphs(computations: Callable[[], Iterable[Callable[[], None]]], device: Any) -> Callable[[], None]:
    """Returns a function that repeats computations, which draw nothing, each as a CUDA graph of a torch.device.

    A CPU has no graphs: there the computations run once, and nothing is repeated. So programs can be tried there.
    """
    import torch

    from slipstream.pipeline.execution.action_graphs import CUDAGraphs

    of_device = torch.get_device_module(device)
    stream = of_device.Stream()
    stream.wait_stream(of_device.current_stream())
    with of_device.stream(stream):
        for compute in computations():  # so that kernels are chosen and compiled
            compute()
        of_device.synchronize()
        recorder = CUDAGraphs(device) if device.type == "cuda" else _NoGraphs()
        replays = [recorder.record(compute, num_seeds=0) for compute in computations()]
    of_device.synchronize()

    def repeat() -> None:
        for replay in replays:
            replay(0)  # no seed, as nothing is drawn

    return repeat


class _NoGraphs:
    """Computes in place of recording."""

    def record(self, compute: Callable[[], None], num_seeds: int) -> Callable[[int], None]:
        compute()
        return lambda _: None


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in seconds.items()}


def setting(**more: object) -> dict[str, object]:
    """Returns what the figures depend on: the machine, its load, the versions, and `more`."""
    import torch
    import transformers

    with open("/proc/cpuinfo") as lines:
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads_per_process": torch.get_num_threads(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        **more,
    }


def write(name: str, report: dict[str, object]) -> Path:
    """Writes a record to results/, with the commit and the hash of the sources that it is of; returns its path."""
    path = destination(RESULTS / f"{name}.json")
    path.write_text(json.dumps({"of": provenance(name), **report}, indent=2) + "\n")
    return path


@contextmanager
def costs_kept_in(folder: Path | None) -> Iterator[None]:
    """Lets "auto" keep what it measures in a folder, so that later runs have the same plan; by default in a temporary
    one, as at a user's first start."""
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["XDG_CACHE_HOME"] = str(folder.resolve() if folder else temporary)
        yield


def recorded(name: str) -> dict[str, Any] | None:
    """Returns the record in results/, of whatever sources; None without one."""
    path = destination(RESULTS / f"{name}.json")
    return json.loads(path.read_text()) if path.exists() else None


def record(name: str) -> dict[str, Any] | None:
    """Returns the record in results/ if it is of the sources as they are; None, and says so, where it is older."""
    found = recorded(name)
    if found is None or is_current(found):
        return found
    print(f"{destination(RESULTS / f'{name}.json')} is of other sources: it begins anew", flush=True)
    return None
