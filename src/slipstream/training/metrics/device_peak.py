"""The peak throughput of a device: from its data sheet where that is known, otherwise measured."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import torch

from slipstream.planner.costs import SHIPPED, load_cluster

_SIZES = {"cpu": 1024, "cuda": 8192}  # of the square matrices
_SECONDS = 0.5  # of measuring
_MOST_PRODUCTS = 50
# Words in the names of devices that are slower than the SXM modules in the descriptions of clusters.
_LESSER = frozenset({"pcie", "nvl", "mig"})


@dataclass(frozen=True)
class DevicePeak:
    """The FLOP/s of one device, and the source of the number."""

    flops: float
    source: str


def find_peak(device: torch.device, dtype: torch.dtype, share: float = 1.0) -> DevicePeak:
    """Returns the peak that MFU is measured against, for matrix products of `dtype`, of a rank with a `share` of a GPU.

    A CUDA device is looked up by its name in the cluster descriptions that come with Slipstream. For a CPU, an unknown
    device and a dtype without an entry, the fastest of some products is taken: then all ranks of a machine should call
    this at the same time, as they share the machine when they train.
    """
    known = peak_by_name(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
    if known is None:
        return measure_peak(device, dtype)
    return known if share == 1 else DevicePeak(share * known.flops, f"{known.source}, {share:.3g} of it for each rank")


def peak_by_name(name: str, dtype: torch.dtype) -> DevicePeak | None:
    """Returns the peak that the descriptions give for a device, named as CUDA does; None where they have none."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return None  # float32 products then run as TensorFloat-32 or bfloat16, which the descriptions don't have
    words, kind = set(_words(name)), str(dtype).removeprefix("torch.")
    for each in (load_cluster(shipped).device for shipped in SHIPPED):
        model = _words(each.name)[1]  # `h100` of NVIDIA H100-SXM5-80GB
        if model in words and not words & _LESSER and kind in each.flops:
            return DevicePeak(each.flops[kind], f"data sheet of {each.name}, {kind}")
    return None


def measure_peak(device: torch.device, dtype: torch.dtype) -> DevicePeak:
    """Returns the rate of the fastest product of two square matrices; takes half a second or so."""
    n = _SIZES.get(device.type, _SIZES["cuda"])
    generator = torch.Generator().manual_seed(0)  # training's own random numbers stay as they are
    a, b = (torch.randn(n, n, generator=generator).to(device, dtype) for _ in range(2))
    _seconds(a, b)  # the first one also pays for memory and for choosing a kernel
    best, began, runs = float("inf"), time.perf_counter(), 0
    while runs == 0 or (time.perf_counter() - began < _SECONDS and runs < _MOST_PRODUCTS):
        best, runs = min(best, _seconds(a, b)), runs + 1
    kind = str(dtype).removeprefix("torch.")
    return DevicePeak(2 * n**3 / best, f"measured: {n} x {n} by {n} x {n}, {kind}, on this {device.type}")


def _seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    device = torch.get_device_module(a.device)
    device.synchronize()
    began = time.perf_counter()
    torch.mm(a, b)
    device.synchronize()
    return time.perf_counter() - began


def _words(name: str) -> list[str]:
    return re.split(r"[\s\-]+", name.lower())
