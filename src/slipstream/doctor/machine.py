"""The versions of what computes here, the processor's cores and the memory; torch may be missing."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from slipstream.doctor.finding import Finding, error_text
from slipstream.units import bytes_text
from slipstream.version import __version__

_CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60  # bytes; version 1 of cgroups writes a number above it


def find_versions() -> Iterator[Finding]:
    """Yields the versions of Python and the packages, and whether these can be imported."""
    yield Finding("Python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("slipstream", __version__)
    yield _torch()
    yield _transformers()


def can_import_torch() -> bool:
    """Returns whether torch, and what of Slipstream needs it, can be imported."""
    try:
        importlib.import_module("slipstream.parallel")
    except Exception:
        return False
    return True


def _torch() -> Finding:
    try:
        import torch
    except Exception as error:  # a library of CUDA that is missing is an OSError
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


def find_processor() -> Iterator[Finding]:
    """Yields the processor, its cores that this process may use, and the threads that it does."""
    yield Finding("CPU", _processor_name())
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota_in_cores()
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
    given = os.environ.get("OMP_NUM_THREADS")
    return f", {torch.get_num_threads()} threads of torch" + (f" (OMP_NUM_THREADS={given})" if given else "")


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def find_memory() -> Iterator[Finding]:
    """Yields the memory of the machine, what is free, and the cgroup's limit."""
    import psutil

    memory, limit = psutil.virtual_memory(), _memory_limit()
    text = f"{bytes_text(memory.total)}, {bytes_text(memory.available)} free"
    is_limited = limit is not None and limit < memory.total
    yield Finding("memory", text + (f", limited to {bytes_text(limit)} (cgroup)" if limit and is_limited else ""))


def _quota_in_cores() -> float | None:
    """Returns how many cores' time a cgroup grants, the least of those that this process is in; None: no limit."""
    quotas = [quota for text in _cgroup_texts("cpu.max") if (quota := _ratio(*text.split()[:2])) is not None]
    old = _CGROUPS / "cpu"
    if (old / "cpu.cfs_quota_us").exists():
        given = [(old / name).read_text().strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        quotas += [quota for quota in [_ratio(*given)] if quota is not None]
    return min(quotas, default=None)


def _ratio(quota: str, period: str) -> float | None:
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _memory_limit() -> int | None:
    texts = _cgroup_texts("memory.max")
    old = _CGROUPS / "memory" / "memory.limit_in_bytes"
    texts += [old.read_text()] if old.exists() else []
    limits = [int(text) for text in texts if text.strip() != "max"]
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def _cgroup_texts(name: str) -> list[str]:
    """Returns the contents of a file of version 2 of cgroups, of this process's group and of those it is in."""
    groups = Path("/proc/self/cgroup")
    lines = groups.read_text().splitlines() if groups.exists() else []
    own = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    folders = [_CGROUPS / own, *(_CGROUPS / own).parents] if own else [_CGROUPS]
    files = [folder / name for folder in folders if folder.is_relative_to(_CGROUPS)]
    return [file.read_text() for file in files if file.exists()]
