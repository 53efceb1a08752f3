"""This machine as the planner sees it: its devices by name where they are known, else with a rate that is measured."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from slipstream.planner.costs import SHIPPED, Cluster, Device, LinkKind, load_cluster
from slipstream.training.metrics.device_peak import measure_peak, peak_by_name

_MOST_CORES = 8  # beyond which they share the memory's bandwidth more than they help
# Assumed of what isn't in a description; a run measures its own costs before its first step.
_EFFICIENCY = ((1.0, 0.05), (64.0, 0.5), (256.0, 0.8), (1024.0, 0.9))
_CPU_RATES = {"memory_bandwidth": 10e9, "kernel_seconds": 5e-6, "action_seconds": 5e-4}
_GPU_RATES = {"memory_bandwidth": 500e9, "kernel_seconds": 5e-6, "action_seconds": 5e-4}
_CPU_LINK = LinkKind(bandwidth=2e9, latency=1e-4)
_GPU_LINK = LinkKind(bandwidth=25e9, latency=1e-5)


def this_machine() -> Cluster:
    """Returns one node of this machine's GPUs, or of its cores where there is no GPU, with one thread each."""
    return _gpus(torch.cuda.device_count()) if torch.cuda.is_available() else _cores()


def dtype_here() -> str:
    """Returns the dtype in which this machine trains fastest: bfloat16 on GPUs that have it."""
    return "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float32"


def _gpus(number: int) -> Cluster:
    memory, name = float(torch.cuda.get_device_properties(0).total_memory), torch.cuda.get_device_name(0)
    kind = dtype_here()
    for shipped in map(load_cluster, SHIPPED):
        if (peak := peak_by_name(name, getattr(torch, kind))) and shipped.device.name in peak.source:
            device = replace(shipped.device, memory=memory)
            return replace(shipped, name=f"{number} of {name}", num_nodes=1, devices_per_node=number, device=device)
    measured = measure_peak(torch.device("cuda"), getattr(torch, kind)).flops
    device = Device(name, {kind: measured}, memory, efficiency=_EFFICIENCY, **_GPU_RATES)
    return Cluster(f"{number} of {name}", device, 1, number, _GPU_LINK, _GPU_LINK)


def _cores() -> Cluster:
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux
    allowed = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    number = min(allowed, _MOST_CORES)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / number
    with _one_thread():
        measured = measure_peak(torch.device("cpu"), torch.float32).flops
    device = Device("CPU core", {"float32": measured}, memory, efficiency=_EFFICIENCY, **_CPU_RATES)
    return Cluster(f"{number} CPU {'core' if number == 1 else 'cores'}", device, 1, number, _CPU_LINK, _CPU_LINK)


@contextmanager
def _one_thread() -> Iterator[None]:
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(number)
