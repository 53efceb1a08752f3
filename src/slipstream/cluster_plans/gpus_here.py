"""This machine's GPUs as a cluster of one node, where a shipped cluster describes such GPUs."""

from __future__ import annotations

from dataclasses import replace

import torch

from slipstream.cost import Cluster, clusters_named
from slipstream.machine_memory import machine_memory


def gpus_here() -> Cluster | None:
    """Returns all GPUs that torch sees, with their memory and this machine's; None where there is none, where they
    differ, and where no shipped cluster has a device of their name."""
    names = gpu_names()
    described = next(clusters_named(names[0]), None) if len({*names}) == 1 else None
    if described is None:
        return None
    number = len(names)
    device = replace(
        described.device,
        memory=float(torch.cuda.get_device_properties(0).total_memory),
        host_memory=machine_memory().usable / number,
    )
    return replace(described, name=f"{number} of {names[0]}", num_nodes=1, devices_per_node=number, device=device)


def gpu_names() -> list[str]:
    """Returns the name of each GPU that torch sees."""
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
