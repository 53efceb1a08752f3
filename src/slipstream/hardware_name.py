"""Names this machine's processor. Imports nothing that may be broken here, as the doctor asks for that name."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    """Returns the name of this machine's processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
