"""The folder that runs go to, shared memory, and the limit of memory that a program may pin."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from slipstream.doctor.finding import Finding
from slipstream.units import bytes_text

_WRITTEN = 32 * 10**6  # bytes
_LITTLE = 10**9  # bytes: a run of a small model writes more
_SHARED_MEMORY = Path("/dev/shm")
_LITTLE_SHARED = 2**28  # bytes; Docker gives 64 MB where nothing else is said
_LITTLE_PINNED = 2**26  # bytes


def find_folder(folder: Path) -> Iterator[Finding]:
    """Yields the room and the rate of the disk that a folder is on, or will be; the folder itself isn't made."""
    exists = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
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


def _write(folder: Path) -> float:
    """Returns the seconds in which a file arrives on the disk; it is removed again."""
    block = os.urandom(2**20)  # which no file system makes smaller
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
        advice = "little for NCCL and data loaders with workers: docker run --shm-size=8g, or --ipc=host"
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
