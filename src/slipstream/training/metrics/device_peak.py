"""The most that a device computes: from its data sheet where that is known, else measured by a matrix product."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import torch

from slipstream.planner.costs import SHIPPED, Device, load_cluster

_SIZES = {"cpu": 1024, "cuda": 8192}  # of the square matrices
_SECONDS = 0.5  # of measuring
_MOST_PRODUCTS = 50
# words in the names of devices that have less than the SXM modules that clusters are described with
_LESSER = frozenset({"pcie", "nvl", "mig"})


@dataclass(frozen=True)
class DevicePeak:
    """FLOP/s of one device, and where the number comes from."""

    flops: float
    source: str


def find_peak(device: torch.device, dtype: torch.dtype) -> DevicePeak:
    """What MFU is measured against, for products of `dtype`.

    A CUDA device's is that of the cluster descriptions that come with Slipstream, found by its name. For another
    device, a dtype without an entry, and a CPU, the fastest of some products is taken: then all ranks of a machine
    should ask at the same time, as they compute side by side when they train.
    """
    if device.type == "cuda":
        known = peak_by_name(torch.cuda.get_device_name(device), dtype)
        if known is not None:
            return known
    return measure_peak(device, dtype)


def peak_by_name(name: str, dtype: torch.dtype) -> DevicePeak | None:
    """From the descriptions, for a name as CUDA gives it; None where no description is of that device and dtype."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return None  # then float32 products run as TensorFloat-32 or bfloat16, which the descriptions don't know
    words, kind = _words(name), str(dtype).removeprefix("torch.")
    for each in _shipped_devices():
        if _model(each.name) in words and not words & _LESSER and kind in each.flops:
            return DevicePeak(each.flops[kind], f"data sheet of {each.name}, {kind}")
    return None


def measure_peak(device: torch.device, dtype: torch.dtype) -> DevicePeak:
    """The fastest of the products of two square matrices, within half a second or so."""
    size = _SIZES.get(device.type, _SIZES["cuda"])
    generator = torch.Generator().manual_seed(0)  # training's own random numbers stay as they are
    a, b = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    _seconds(a, b)  # the first one also pays for memory and for choosing a kernel
    best, began, runs = float("inf"), time.perf_counter(), 0
    while runs == 0 or (time.perf_counter() - began < _SECONDS and runs < _MOST_PRODUCTS):
        best, runs = min(best, _seconds(a, b)), runs + 1
    kind = str(dtype).removeprefix("torch.")
    return DevicePeak(
        2 * size**3 / best, f"measured: {size} x {size} by {size} x {size}, {kind}, on this {device.type}"
    )


def _seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    _wait(a.device)
    began = time.perf_counter()
    torch.mm(a, b)
    _wait(a.device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _shipped_devices() -> list[Device]:
    return [load_cluster(name).device for name in SHIPPED]


def _words(name: str) -> set[str]:
    return set(re.split(r"[\s\-]+", name.lower()))


def _model(name: str) -> str:
    """`h100` of NVIDIA H100-SXM5-80GB."""
    return re.split(r"[\s\-]+", name.lower())[1]
