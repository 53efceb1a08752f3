"""The cluster on which operations are counted where nobody describes one: by the kind of the device alone, so that a
plan is the same on every machine that has such devices, however busy it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from slipstream.cost.cluster import SHIPPED, Cluster, Device, LinkKind, load_cluster
from slipstream.number_format import FORMATS

ASSUMED_EFFICIENCY = 0.9
"""The share of a measured peak that matrix products reach, where a description has none."""
CPU_RATES: dict[str, Any] = {"memory_bandwidth": 10e9, "kernel_seconds": 5e-6, "action_seconds": 5e-4}
GPU_RATES: dict[str, Any] = {"memory_bandwidth": 500e9, "kernel_seconds": 5e-6, "action_seconds": 5e-4}
CPU_LINK = LinkKind(bandwidth=2e9, latency=1e-4)
GPU_LINK = LinkKind(bandwidth=25e9, latency=1e-5)
# Plans depend on the proportion of computing to everything else, which is about that of these peaks on any such device:
# of a core with AVX-512 in float32, and of a GPU.
_CPU_FLOPS = 1.2e11
_GPU_FLOPS = 1e14
_DEVICES_PER_NODE = 8
# Bytes. The account of a plan says what fits, not a typical device.
_ANY = 1e13

# Words in the names of devices that are slower than the SXM modules in the descriptions of clusters.
_LESSER = frozenset({"pcie", "nvl", "mig", "laptop", "d"})


def clusters_named(device: str) -> Iterator[Cluster]:
    """Yields the shipped descriptions of clusters with a device, named as CUDA does."""
    words = set(_words(device))
    for cluster in map(load_cluster, SHIPPED):
        described = _words(cluster.device.name)
        model = next(word for word in described if re.search(r"\d", word))  # `h100` of NVIDIA H100-SXM5-80GB
        if model in words and words & _LESSER == {*described} & _LESSER:
            yield cluster


def _words(name: str) -> list[str]:
    return re.split(r"[\s\-]+", name.lower())


def typical_cluster(device: str | None, num_devices: int) -> Cluster:
    """Returns a cluster of at least so many devices: as it is described for a GPU of this name, or an assumed one;
    None: of cores of a CPU, with a thread each. A dtype without a described peak has the least of the others."""
    if device is None:
        found = _assumed("CPU core", _CPU_FLOPS, CPU_RATES, CPU_LINK)
    else:
        found = next(clusters_named(device), None) or _assumed(device, _GPU_FLOPS, GPU_RATES, GPU_LINK)
    least = min(found.device.flops.values())
    peaks = dict.fromkeys(FORMATS, least) | dict(found.device.flops)
    num_nodes = -(-num_devices // found.devices_per_node)
    return replace(found, device=replace(found.device, flops=peaks, memory=_ANY), num_nodes=num_nodes)


def _assumed(name: str, peak: float, rates: dict[str, Any], link: LinkKind) -> Cluster:
    device = Device(name, {"float32": peak}, _ANY, matmul_efficiency=ASSUMED_EFFICIENCY, **rates)
    return Cluster(f"typical {name}", device, 1, _DEVICES_PER_NODE, link, link)
