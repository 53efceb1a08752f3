"""The memory of a host beside its devices, where what a step doesn't need at the moment may wait."""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple


class HostMemorySpec(NamedTuple):
    """The host's memory as one device sees it while all devices of its node copy; its copies take turns."""

    bandwidth: float  # bytes per second between the device and its host
    latency: float  # seconds of a copy, however short
    capacity: float  # bytes for each device
    memory_bandwidth: float  # bytes per second that its processors read and write for each device

    def copy_seconds(self, num_bytes: Any) -> Any:
        """Returns the seconds of a copy to the host, or of one back."""
        return self.latency + num_bytes / self.bandwidth

    @property
    def is_apart(self) -> bool:
        """Whether what is on the host is copied to the device to be used."""
        return self.bandwidth < inf


ANY_HOST = HostMemorySpec(bandwidth=inf, latency=0.0, capacity=inf, memory_bandwidth=inf)
"""The host of a device whose processor works on the host's memory, or whose copies aren't known."""
