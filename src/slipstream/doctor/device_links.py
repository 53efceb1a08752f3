"""How fast GPUs exchange with each other and with the host's memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from slipstream.doctor.devices import devices
from slipstream.doctor.finding import Finding
from slipstream.doctor.timing import seconds_per_call
from slipstream.units import bytes_text

_SIZE = 64 * 2**20  # bytes
_FASTEST_PCIE = 64e9  # bytes/s of PCIe 5.0 with 16 lanes


def find_device_links() -> Iterator[Finding]:
    """Yields the links between neighbouring GPUs, and those to the host."""
    gpus = [device for device in devices() if device.type == "cuda"]
    for device in gpus:
        yield _to_the_host(device)
    for first, second in pairwise(gpus):
        yield _between(first, second)


def _to_the_host(device: torch.device) -> Finding:
    host = torch.empty(_SIZE, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_SIZE, dtype=torch.uint8, device=device)
    down = seconds_per_call(lambda: there.copy_(host, non_blocking=True), device)
    up = seconds_per_call(lambda: host.copy_(there, non_blocking=True), device)
    rates = f"{bytes_text(_SIZE / down)}/s to it, {bytes_text(_SIZE / up)}/s back"
    return Finding(f"host to GPU {device.index}", f"{rates} (pinned memory)")


def _between(first: torch.device, second: torch.device) -> Finding:
    is_peer = torch.cuda.can_device_access_peer(first, second)
    source = torch.empty(_SIZE, dtype=torch.uint8, device=first)
    target = torch.empty(_SIZE, dtype=torch.uint8, device=second)
    rate = _SIZE / seconds_per_call(lambda: target.copy_(source, non_blocking=True), first, second)
    if not is_peer:
        kind = "no peer access: through the host's memory"
    else:
        kind = f"peer access, {'NVLink' if rate > _FASTEST_PCIE else 'PCIe or a slow NVLink'}"
    return Finding(f"GPU {first.index} to GPU {second.index}", f"{bytes_text(rate)}/s ({kind})")
