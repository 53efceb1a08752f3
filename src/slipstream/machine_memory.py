"""The memory of this machine, of the container that this process is in, and of the temporary folder."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60  # bytes; version 1 of cgroups writes a larger number for no limit
_IN_MEMORY = ("tmpfs", "ramfs")
_CACHED_FILES = ("active_file", "inactive_file")


class MachineMemory(NamedTuple):
    """The memory that processes share, in bytes."""

    total: float  # the machine's
    free: float  # bytes for new processes, in the container too
    # The container's bytes; None: it may have all.
    limit: float | None = None

    @property
    def usable(self) -> float:
        """The bytes that all processes here may have together."""
        return self.total if self.limit is None else self.limit


def machine_memory(cgroups: Path = CGROUPS) -> MachineMemory:
    """Returns the memory of this machine, or of the container where that is limited to less."""
    import psutil

    memory = psutil.virtual_memory()
    limit = container_limit(cgroups)
    if limit is None or limit >= memory.total:
        return MachineMemory(memory.total, memory.available)
    used = container_use(cgroups) or 0
    # Cached files make room for whoever needs it.
    free = max(0, limit - max(0, used - _cached(cgroups)))
    return MachineMemory(memory.total, min(memory.available, free), limit)


def container_limit(cgroups: Path = CGROUPS) -> int | None:
    """Returns the most bytes that this process's cgroups let it have; None where they set no limit."""
    texts = cgroup_texts(cgroups, "memory.max")
    old = cgroups / "memory" / "memory.limit_in_bytes"
    texts += [old.read_text()] if old.exists() else []
    limits = [int(text) for text in texts if text.strip() != "max"]
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def container_use(cgroups: Path = CGROUPS) -> int | None:
    """Returns the bytes that this process's cgroup has, cached files included; None where it doesn't say it."""
    texts = cgroup_texts(cgroups, "memory.current")
    old = cgroups / "memory" / "memory.usage_in_bytes"
    texts += [old.read_text()] if old.exists() else []
    return int(texts[0]) if texts else None


def _cached(cgroups: Path) -> int:
    """Returns the bytes of cached files among those in use, but for files in memory."""
    texts = cgroup_texts(cgroups, "memory.stat")
    old = cgroups / "memory" / "memory.stat"
    texts += [old.read_text()] if old.exists() else []
    values = dict(line.split()[:2] for line in texts[0].splitlines() if " " in line) if texts else {}
    return sum(int(values.get(name, 0)) for name in _CACHED_FILES)


def cgroup_texts(cgroups: Path, name: str) -> list[str]:
    """Returns the contents of a file of version 2 of cgroups, of this process's group and of those it is in."""
    groups = Path("/proc/self/cgroup")
    lines = groups.read_text().splitlines() if groups.exists() else []
    path = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    folders = [cgroups / path, *(cgroups / path).parents] if path else [cgroups]
    files = [folder / name for folder in folders if folder.is_relative_to(cgroups)]
    return [file.read_text() for file in files if file.exists()]


class TemporaryFolder(NamedTuple):
    """The folder of temporary files, TMPDIR."""

    path: Path
    free: int  # bytes
    # Its file system; "" where that isn't known.
    kind: str

    @property
    def takes_memory(self) -> bool:
        """Whether its files take the machine's memory."""
        return self.kind in _IN_MEMORY


def temporary_folder() -> TemporaryFolder:
    """Returns the temporary folder of this process."""
    import psutil

    folder = Path(tempfile.gettempdir()).resolve()
    mounted = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    kind = next((mounted[place] for place in (folder, *folder.parents) if place in mounted), "")
    return TemporaryFolder(folder, shutil.disk_usage(folder).free, kind)
