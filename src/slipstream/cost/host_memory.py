"""The memory of a host beside its devices, where what a step doesn't need at the moment may wait."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

import numpy as np

from slipstream.pinned_segments import pinned_bytes


class HostMemorySpec(NamedTuple):
    """The host's memory as one device sees it while all devices of its node copy; its copies take turns."""

    bandwidth: float  # bytes per second between the device and its host
    latency: float  # seconds of a copy, however short
    capacity: float  # bytes for each device
    memory_bandwidth: float  # bytes per second that its processors read and write for each device

    def copy_seconds(self, num_bytes: Any) -> Any:
        """Returns the seconds of a copy to the host, or of one back."""
        return self.latency + num_bytes / self.bandwidth

    def halved(self) -> HostMemorySpec:
        """Returns the host as each of two kinds of copies sees it that share the link."""
        return self._replace(bandwidth=self.bandwidth / 2)

    @property
    def is_apart(self) -> bool:
        """Whether what is on the host is copied to the device to be used."""
        return self.bandwidth < inf

    def held_bytes(self, sizes: Any) -> Any:
        """Returns the bytes that tensors of these sizes take: what is copied to a device is pinned, in segments."""
        return pinned_bytes(sizes) if self.is_apart else sizes

    def shares(self, sizes: Sequence[float]) -> list[float]:
        """Returns how many bytes each of these tensors takes for each of its own; none where these are equal."""
        if not self.is_apart:
            return []
        own = np.array(sizes, float)
        shares: list[float] = np.where(own > 0, self.held_bytes(own) / np.maximum(own, 1.0), 1.0).tolist()
        return shares


ANY_HOST = HostMemorySpec(bandwidth=inf, latency=0.0, capacity=inf, memory_bandwidth=inf)
"""The host of a device whose processor works on the host's memory, or whose copies aren't known."""
SOME_GPUS_HOST = HostMemorySpec(bandwidth=16e9, latency=1e-5, capacity=inf, memory_bandwidth=inf)
"""The host of a GPU whose links weren't described, where only bytes matter."""
