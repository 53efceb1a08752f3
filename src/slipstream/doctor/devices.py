"""The GPUs of this machine: what they are, what is free of them, and those that PyTorch can't use."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.doctor.finding import Finding, error_text
from slipstream.launch import has_launcher
from slipstream.parallel import describe_sharing
from slipstream.units import bytes_text

if TYPE_CHECKING:
    import torch

_DRIVER = Path("/proc/driver/nvidia/version")
_SMI_SECONDS = 5
_OURS = 2e9  # bytes: more than CUDA's own context takes


def find_gpus() -> Iterator[Finding]:
    """Yields each GPU that this process will use, or why there is none."""
    import torch

    from slipstream.parallel import allocator_setting, fragmentation_advice

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        yield _unused([str(each.message) for each in caught])
    if available and (sharing := describe_sharing(_num_local_ranks())):
        advice = "a rank for each GPU trains faster: torchrun --nproc-per-node=gpu"
        yield Finding("GPU", f"{sharing}, and exchange through the host's memory", advice=advice)
    for device in devices():
        if device.type == "cuda":
            yield _describe(device)
    if setting := allocator_setting():
        yield Finding("GPU allocator", setting)
    elif available:
        yield Finding("GPU allocator", f"as PyTorch has it; where memory is short, {fragmentation_advice()}")


def devices() -> list[torch.device]:
    """Returns the devices that this process looks at: in a launched group its own GPU, else all; the CPU where there is
    none, or another rank that shares it looks at it."""
    import torch

    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    own = range(number)
    if has_launcher():
        local = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", 0)))
        own = own[local : local + 1]
    return [torch.device("cuda", index) for index in own] or [torch.device("cpu")]


def exchange_device() -> torch.device:
    """Returns where the messages of this process's rank are while it exchanges: on its GPU where NCCL connects these,
    else in the host's memory."""
    import torch

    is_shared = bool(describe_sharing(_num_local_ranks()))
    return torch.device("cpu") if is_shared else devices()[0]


def _num_local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1))) if has_launcher() else 1


def _describe(device: torch.device) -> Finding:
    import torch

    topic = f"GPU {device.index}"
    try:
        known, (free, total) = torch.cuda.get_device_properties(device), torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        return Finding(
            topic, "can't be used", f"{error_text(error)}; see nvidia-smi, or leave it out: {_without(device)}"
        )
    capability = f"compute capability {known.major}.{known.minor}"
    memory = f"{bytes_text(total)} memory, {bytes_text(free)} free"
    taken = total - free - torch.cuda.memory_reserved(device)
    advice = f"other programs hold about {bytes_text(taken)} of it; nvidia-smi shows them" if taken > _OURS else None
    return Finding(topic, f"{known.name}, {memory}, {capability}, driver {_driver()}", advice=advice)


def _without(device: torch.device) -> str:
    import torch

    others = [str(index) for index in range(torch.cuda.device_count()) if index != device.index]
    return f"CUDA_VISIBLE_DEVICES={','.join(others)}"


def _driver() -> str:
    """Returns the version of NVIDIA's driver."""
    text = _DRIVER.read_text() if _DRIVER.exists() else ""
    found = re.search(r"(\d+\.\d+(\.\d+)?)", text)
    return (
        found.group(1) if found else next(iter(_ask("--query-gpu=driver_version", "--format=csv,noheader")), "unknown")
    )


def _unused(warned: list[str]) -> Finding:
    """Returns what is to be done about GPUs that the driver sees and PyTorch can't use, if there are any."""
    import torch

    seen = _ask("--query-gpu=name", "--format=csv,noheader")
    if not seen:
        return Finding("GPU", "none here; training runs on the CPU")
    text = f"nvidia-smi sees {', '.join(seen)}, but PyTorch can't use {'it' if len(seen) == 1 else 'them'}"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None:
        how = (
            "this PyTorch is built for CPUs: pip install --force-reinstall torch with the --index-url that "
            "pytorch.org/get-started names for this driver"
        )
    elif hidden is not None:
        how = f"CUDA_VISIBLE_DEVICES={hidden} may hide them: unset CUDA_VISIBLE_DEVICES"
    else:
        how = f"install a driver for CUDA {torch.version.cuda}, or a PyTorch for an older CUDA (driver {_driver()})"
    return Finding("GPU", text, advice="; ".join([*warned[:1], f"{how}. Until then training runs on the CPU"]))


def _ask(*question: str) -> list[str]:
    """Returns the lines that nvidia-smi answers with; none where there is no nvidia-smi, or it fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        ended = subprocess.run(["nvidia-smi", *question], capture_output=True, text=True, timeout=_SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in ended.stdout.splitlines() if line.strip()] if ended.returncode == 0 else []
