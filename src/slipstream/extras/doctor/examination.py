"""Runs all checks, one after another, each by itself."""

from __future__ import annotations

import importlib
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.extras.doctor.finding import Check, Finding, error_text, isolated
from slipstream.hardware_name import processor_name
from slipstream.machine_memory import CGROUPS, cgroup_texts, container_use, machine_memory, temporary_folder
from slipstream.network_interfaces import GLOO, NCCL, interface_problems
from slipstream.units import bytes_text
from slipstream.version import __version__

if TYPE_CHECKING:
    from slipstream.extras.doctor.rank_exchange import RankExchange


@dataclass(frozen=True)
class Examination:
    """The findings about this machine, and in a launched group about the links between its ranks."""

    findings: list[Finding]
    rank: int = 0
    """The rank that found it: 0 speaks for all."""
    exchange: RankExchange | None = None
    """With which a rank of a launched group leaves it."""

    @property
    def can_train(self) -> bool:
        """Whether nothing was found that would make training fail."""
        return all(finding.problem is None for finding in self.findings)


def examine(folder: Path, seconds: float = 30.0, tell: Callable[[str], None] = lambda _text: None) -> Examination:
    """Returns the findings about this machine. Collective in a group that a launcher started.

    Args:
        folder: that runs go to; it needn't exist.
        seconds: that ranks wait for each other.
        tell: is called with the next topic.
    """
    tell("versions")
    has_torch = can_import_torch()
    if has_torch:
        _read_slurm()
    rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    findings: list[Finding] = []
    for topic, check in _checks(folder, has_torch):
        tell(topic)
        findings += isolated(topic, check)
    if num_ranks == 1 or not has_torch:
        return Examination(findings, rank)
    from slipstream.extras.doctor.rank_exchange import RankExchange

    tell("exchange between ranks")
    exchange = RankExchange(seconds)
    findings += isolated("exchange", lambda: exchange.run(findings), is_vital=True)
    return Examination(findings, rank, exchange)


def _read_slurm() -> None:
    """Names this process's rank as torchrun does, where srun has started it."""
    from slipstream.launch.local_ranks import is_task, torchrun_variables

    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys() and is_task(os.environ):
        os.environ.update(torchrun_variables(os.environ))


def _checks(folder: Path, has_torch: bool) -> Iterator[tuple[str, Check]]:
    yield "versions", find_versions
    yield "processor", find_processor
    yield "memory", find_memory
    yield "folder", lambda: find_folder(folder)
    yield "temporary folder", find_temporary_folder
    yield "shared memory", find_shared_memory
    if has_torch:
        yield from _checks_of_torch()


def _checks_of_torch() -> Iterator[tuple[str, Check]]:
    from slipstream.extras.doctor import devices

    yield "pinned memory", find_pinned_limit
    yield "GPUs", devices.find_gpus
    yield "links", devices.find_device_links
    yield "communication", find_backends
    yield "interfaces", find_interfaces
    yield "loopback", find_loopback
    yield "matrix product", devices.find_products
    yield "attention", devices.find_attention
    yield "compiler", devices.find_compiler


def find_versions() -> Iterator[Finding]:
    """Yields the versions of Python and the packages, and whether these can be imported."""
    yield Finding("Python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("slipstream", __version__)
    yield _torch()
    yield _transformers()


def can_import_torch() -> bool:
    """Returns whether torch, and the parts of Slipstream that need it, can be imported."""
    try:
        importlib.import_module("slipstream.parallel")
    except Exception:
        return False
    return True


def _torch() -> Finding:
    try:
        import torch
    # A missing library of CUDA raises an OSError.
    except Exception as error:
        how = "pip install torch, or the build that pytorch.org/get-started names for this machine"
        if find_spec("torch") is not None:
            how = "it is broken: install the build that pytorch.org/get-started names for this machine"
        return Finding("torch", "can't be imported", f"{error_text(error)}; {how}")
    cuda, hip = torch.version.cuda, torch.version.hip
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU"
    return Finding("torch", f"{torch.__version__} ({build} build)")


def _transformers() -> Finding:
    try:
        transformers = importlib.import_module("transformers")
    except Exception as error:
        return Finding("transformers", "can't be imported", f"{error_text(error)}; pip install --upgrade transformers")
    return Finding("transformers", str(transformers.__version__))


def find_processor(cgroups: Path = CGROUPS) -> Iterator[Finding]:
    """Yields the processor, its cores that this process may use, and the threads that it does."""
    yield Finding("CPU", processor_name())
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota_in_cores(cgroups)
    reasons = ([f"affinity {allowed}"] if allowed != os.cpu_count() else []) + (
        [f"cgroup {quota:.3g}"] if quota is not None else []
    )
    usable = allowed if quota is None else min(allowed, quota)
    limits = f" ({', '.join(reasons)})" if reasons else ""
    advice = None
    if quota is not None and quota < allowed:
        advice = f"the cgroup gives {quota:.3g} cores: more ranks, or threads of all ranks, slow each other down"
    yield Finding("cores", f"{usable:.3g} usable of {os.cpu_count()}{limits}{_threads()}", advice=advice)


def _threads() -> str:
    torch = sys.modules.get("torch")
    if torch is None:
        return ""
    setting = os.environ.get("OMP_NUM_THREADS")
    return f", {torch.get_num_threads()} threads of torch" + (f" (OMP_NUM_THREADS={setting})" if setting else "")


def find_memory(cgroups: Path = CGROUPS) -> Iterator[Finding]:
    """Yields the memory of the machine, the free part, and the cgroup's limit, with what is in use of it."""
    import psutil

    memory = machine_memory(cgroups)
    text = f"{bytes_text(memory.total)}, {bytes_text(psutil.virtual_memory().available)} free"
    if memory.limit is not None:
        used = container_use(cgroups)
        text += f", limited to {bytes_text(memory.limit)} (cgroup)"
        text += "" if used is None else f", of which {bytes_text(used)} are in use"
    yield Finding("memory", text)


def _quota_in_cores(cgroups: Path) -> float | None:
    """Returns how many cores' time a cgroup grants, the least of those that this process is in; None: no limit."""
    quotas = [quota for text in cgroup_texts(cgroups, "cpu.max") if (quota := _ratio(*text.split()[:2])) is not None]
    old = cgroups / "cpu"
    if (old / "cpu.cfs_quota_us").exists():
        numbers = [(old / name).read_text().strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        quotas += [quota for quota in [_ratio(*numbers)] if quota is not None]
    return min(quotas, default=None)


def _ratio(quota: str, period: str) -> float | None:
    return None if quota in ("max", "-1") else int(quota) / int(period)


_WRITTEN = 32 * 10**6  # bytes
_LITTLE = 10**9  # bytes; the run of a small model writes more
_SHARED_MEMORY = Path("/dev/shm")
_LITTLE_SHARED = 2**28  # bytes; Docker's default is 64 MB
_LITTLE_PINNED = 2**26  # bytes


def find_folder(folder: Path) -> Iterator[Finding]:
    """Yields the room and the rate of the disk that a folder is on, or will be; the folder itself isn't made."""
    exists = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not exists.is_dir():
        yield Finding("folder", f"{folder}: {exists} is a file", "name another folder: --folder=FOLDER")
        return
    free = shutil.disk_usage(exists).free
    text = f"{folder}: {bytes_text(free)} free"
    try:
        seconds = _write(exists)
    except OSError as error:
        yield Finding(
            "folder",
            f"{text}, not writable",
            f"a file of {bytes_text(_WRITTEN)} couldn't be written to {exists} ({error.strerror or error}); make room "
            "or get permission to write there, or let runs go elsewhere (training.output) and look at that: "
            "--folder=FOLDER",
        )
        return
    little = f"checkpoints need more than {bytes_text(free)}: make room, or choose another training.output"
    rate = f"written at {bytes_text(_WRITTEN / seconds)}/s"
    yield Finding("folder", f"{text}, {rate}", advice=little if free < _LITTLE else None)


def find_temporary_folder() -> Iterator[Finding]:
    """Yields the room of the temporary folder, where a CPU's offloaded activations, keys and values are, and the kind
    of its file system: files in some take memory."""
    folder = temporary_folder()
    text = f"{folder.path}: {bytes_text(folder.free)} free{f', on {folder.kind}' if folder.kind else ''}"
    advice = None
    if folder.takes_memory:
        advice = (
            "its files take memory, so without a GPU memory.offload and memory.context=host save none: set TMPDIR to "
            "a folder on a disk"
        )
    yield Finding("temporary folder", text, advice=advice)


def _write(folder: Path) -> float:
    """Returns the seconds in which a file arrives on the disk; it is removed again."""
    # No file system can compress random bytes.
    block = os.urandom(2**20)
    with tempfile.TemporaryFile(dir=folder, prefix="slipstream-doctor-") as file:
        began = time.perf_counter()
        for start in range(0, _WRITTEN, len(block)):
            file.write(block[: _WRITTEN - start])
        file.flush()
        os.fsync(file.fileno())
        return time.perf_counter() - began


def find_shared_memory() -> Iterator[Finding]:
    """Yields the size of the shared memory in which NCCL and data loaders exchange on one machine."""
    if not _SHARED_MEMORY.is_dir():
        yield Finding(str(_SHARED_MEMORY), "not here")
        return
    usage = shutil.disk_usage(_SHARED_MEMORY)
    advice = None
    if usage.free < _LITTLE_SHARED:
        advice = "too little for NCCL and data loaders with workers: docker run --shm-size=8g, or --ipc=host"
    yield Finding(str(_SHARED_MEMORY), f"{bytes_text(usage.total)}, {bytes_text(usage.free)} free", advice=advice)


def find_pinned_limit() -> Iterator[Finding]:
    """Yields how much memory a program may lock, where there is a GPU: InfiniBand pins buffers."""
    import torch

    if not torch.cuda.is_available():
        return
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        yield Finding("pinned memory", "unlimited (ulimit -l)")
        return
    advice = "over InfiniBand NCCL pins more: ulimit -l unlimited" if limit < _LITTLE_PINNED else None
    yield Finding("pinned memory", f"up to {bytes_text(limit)} (ulimit -l); CUDA's own isn't limited", advice=advice)


_SECONDS = 5


def find_backends() -> Iterator[Finding]:
    """Yields whether this PyTorch has gloo, over which processors exchange, and NCCL, over which GPUs do."""
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_gloo_available()):
        how = "several ranks can't run: install a PyTorch with gloo, such as those of pytorch.org/get-started"
        yield Finding("gloo", "not in this PyTorch", how)
    else:
        yield Finding("gloo", "available")
    if not (dist.is_available() and dist.is_nccl_available()):
        several = torch.cuda.is_available() and torch.cuda.device_count() > 1
        yield Finding("NCCL", "not in this PyTorch", advice="GPUs then can't exchange" if several else None)
        return
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    yield Finding("NCCL", ".".join(map(str, version)) if isinstance(version, tuple) else str(version))


def find_interfaces() -> Iterator[Finding]:
    """Yields the interfaces that variables name for gloo and NCCL, and whether they are there."""
    import torch

    uses_nccl = torch.cuda.is_available() and torch.cuda.device_count() > 1
    problems = interface_problems(os.environ, uses_nccl=True)
    for name in (GLOO, NCCL):
        if os.environ.get(name):
            problem = problems.get(name)
            is_vital = name == GLOO or uses_nccl
            known = (problem, None) if is_vital else (None, problem)
            yield Finding("interface", f"{name}={os.environ[name]}", *known)


def find_loopback() -> Iterator[Finding]:
    """Yields whether a store at the loopback address, through which local ranks find each other, answers."""
    from slipstream.launch.local_ranks import loopback_store
    from slipstream.watchdog import loopback_address

    address = loopback_address()
    try:
        store, *_ = loopback_store(timeout=timedelta(seconds=_SECONDS))
        store.set("here", "yes")
        answer = store.get("here")
    except (OSError, RuntimeError) as error:
        yield _unreachable(address, error_text(error))
        return
    if answer == b"yes":
        yield Finding("loopback", f"a store at {address} answers")
    else:
        yield _unreachable(address, repr(answer))


def _unreachable(address: str, what: str) -> Finding:
    how = "local ranks meet there: bring the interface up (ip link set lo up), and let firewalls pass it"
    return Finding("loopback", f"no store answers at {address}", f"{what}; {how}")
