"""The GPUs of this machine, the rates of their products and attention kernels, and how fast they exchange."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from slipstream.errors import SlipstreamError
from slipstream.extras.doctor.finding import Finding, error_text
from slipstream.launch import has_launcher
from slipstream.model import check_compiler
from slipstream.parallel import allocator_setting, describe_sharing, fragmentation_advice
from slipstream.units import bytes_text

_DRIVER = Path("/proc/driver/nvidia/version")
_SMI_SECONDS = 5
_OURS = 2e9  # bytes; more than CUDA's own context takes


def find_gpus() -> Iterator[Finding]:
    """Yields each GPU that this process will use, or why there is none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        yield _unused([str(warning.message) for warning in caught])
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
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    indices = range(num_gpus)
    if has_launcher():
        local = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", 0)))
        indices = indices[local : local + 1]
    return [torch.device("cuda", index) for index in indices] or [torch.device("cpu")]


def exchange_device() -> torch.device:
    """Returns where the messages of this process's rank are while it exchanges: on its GPU where NCCL connects these,
    else in the host's memory."""
    is_shared = bool(describe_sharing(_num_local_ranks()))
    return torch.device("cpu") if is_shared else devices()[0]


def _num_local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1))) if has_launcher() else 1


def _describe(device: torch.device) -> Finding:
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
    others = [str(index) for index in range(torch.cuda.device_count()) if index != device.index]
    return f"CUDA_VISIBLE_DEVICES={','.join(others)}"


def _driver() -> str:
    """Returns the version of NVIDIA's driver."""
    text = _DRIVER.read_text() if _DRIVER.exists() else ""
    match = re.search(r"(\d+\.\d+(\.\d+)?)", text)
    return (
        match.group(1) if match else next(iter(_ask("--query-gpu=driver_version", "--format=csv,noheader")), "unknown")
    )


def _unused(warned: list[str]) -> Finding:
    """Returns the remedy for GPUs that the driver sees and PyTorch can't use, if there are any."""
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


_ON_GPUS = {
    "FlashAttention-2": SDPBackend.FLASH_ATTENTION,
    "cuDNN attention": SDPBackend.CUDNN_ATTENTION,
    "efficient attention": SDPBackend.EFFICIENT_ATTENTION,
}
_ON_CPUS = {"flash attention": SDPBackend.FLASH_ATTENTION}
_FORWARD_AND_BACKWARD = 3.5  # times the multiplications of a forward: 2 products, and then 5
_ROUNDING = 0.02  # relative rounding error of sums in bfloat16
# PyTorch's further warnings when it is asked for one kernel alone
_NO_REASONS = ("not used because", "runtime disabled")
_Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class _Size:
    """The shapes of the measurements on a kind of device."""

    matrix: int
    heads: int
    tokens: int
    width: int


_SIZES = {"cpu": _Size(512, 4, 512, 64), "cuda": _Size(8192, 16, 8192, 128)}


def find_products() -> Iterator[Finding]:
    """Yields the rate of a matrix product on every device, and whether its numbers are right."""
    for device in devices():
        topic = f"matrix product, {_name(device)}"
        try:
            _check_product(device)
            yield Finding(topic, _rate_of_products(device))
        # torch.OutOfMemoryError is a RuntimeError, too.
        except (RuntimeError, ArithmeticError) as error:
            yield Finding(topic, "failed", _broken(device, error))


def _broken(device: torch.device, error: Exception) -> str:
    if device.type == "cpu":
        return f"{error_text(error)}; install another build of PyTorch"
    if isinstance(error, torch.OutOfMemoryError):
        free = bytes_text(torch.cuda.mem_get_info(device)[0])
        return f"only {free} of GPU {device.index} are free; end the programs that nvidia-smi shows on it"
    how = f"is PyTorch built for it ({', '.join(torch.cuda.get_arch_list())})?"
    return f"{error_text(error)}; {how} Otherwise see nvidia-smi -q and dmesg, and leave the GPU out"


def _check_product(device: torch.device) -> None:
    """Raises ArithmeticError where a product of ones is far from the number of its terms."""
    n = _SIZES[device.type].matrix
    ones = torch.ones(n, n, dtype=_dtype(device), device=device)
    wrong = int(((ones @ ones).float() / n - 1).abs().gt(_ROUNDING).sum())
    if wrong:
        raise ArithmeticError(f"{wrong} of {n * n} elements of a matrix product are wrong")


def _rate_of_products(device: torch.device) -> str:
    n = _SIZES[device.type].matrix
    dtype = _dtype(device)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    seconds = seconds_per_call(lambda: torch.mm(a, b), device)
    return f"{_rate_text(2 * n**3 / seconds)} ({n} x {n}, {_short(dtype)})"


def find_attention() -> Iterator[Finding]:
    """Yields the rate of each attention kernel, forward and backward, on the first device."""
    device = devices()[0]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    for name, backend in (_ON_GPUS if device.type == "cuda" else _ON_CPUS).items():
        yield Finding(name, _sdpa_rate(backend, device))
    if device.type == "cuda":
        yield Finding("FlashAttention-3", _package_rate("flash_attn_interface", device))
        yield Finding("FlashAttention-4", _can_import("flash_attn.cute"))


def _sdpa_rate(backend: SDPBackend, device: torch.device) -> str:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel([backend]):
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    # PyTorch's warnings say why it leaves a kernel out.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return _attention_rate(attention, device, tokens_first=False)
        except RuntimeError as error:
            reasons = [str(warning.message).partition(" (Triggered")[0] for warning in caught]
            reasons = [reason for reason in reasons if not any(words in reason for words in _NO_REASONS)]
            return f"not here: {' '.join(reasons) or error_text(error)}"


def _package_rate(module: str, device: torch.device) -> str:
    """Returns the rate of a package with FlashAttention's interface, or why it isn't here."""
    missing = _can_import(module)
    if missing.startswith("not here"):
        return missing
    run: Any = importlib.import_module(module).flash_attn_func

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = run(query, key, value, causal=True)
        return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]

    try:
        return _attention_rate(attention, device, tokens_first=True)
    # A package may raise anything.
    except Exception as error:
        return f"not here: {error_text(error)}"


def _can_import(module: str) -> str:
    try:
        if find_spec(module.partition(".")[0]) is None:
            return f"not here: {module} isn't installed"
        importlib.import_module(module)
    # A package may raise anything.
    except Exception as error:
        return f"not here: {error_text(error)}"
    return f"{module} can be imported; not measured, as it is compiled when it first runs"


def _attention_rate(attention: _Attention, device: torch.device, tokens_first: bool) -> str:
    size = _SIZES[device.type]
    dtype = _dtype(device)
    places = (size.tokens, size.heads) if tokens_first else (size.heads, size.tokens)
    shape = (1, *places, size.width)
    query, key, value, grad = (torch.randn(shape, device=device).to(dtype) for _ in range(4))
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    seconds = seconds_per_call(lambda: torch.autograd.grad(attention(query, key, value), inputs, grad), device)
    # FLOPs of the visible half of the scores.
    flops = _FORWARD_AND_BACKWARD * 2 * size.heads * size.tokens**2 * size.width
    described = f"{size.heads} heads of {size.width}, {size.tokens} tokens, causal, {_short(dtype)}"
    return f"{_rate_text(flops / seconds)} forward and backward ({described})"


def find_compiler() -> Iterator[Finding]:
    """Yields whether torch.compile, which `runtime.fused` needs, finds a compiler."""
    kind = devices()[0].type
    try:
        check_compiler(kind)
    except SlipstreamError as error:
        yield Finding("compiler", "not here", advice=str(error))
        return
    yield Finding("compiler", f"{'Triton' if kind == 'cuda' else 'C++ compiler'} found; runtime.fused can be used")


def _dtype(device: torch.device) -> torch.dtype:
    if device.type == "cpu":
        return torch.float32
    major = torch.cuda.get_device_capability(device)[0]
    return torch.bfloat16 if major >= 8 or torch.version.hip else torch.float16


def _name(device: torch.device) -> str:
    return "CPU" if device.type == "cpu" else f"GPU {device.index}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rate_text(flops: float) -> str:
    return f"{flops / 1e12:.3g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.3g} GFLOP/s"


_SECONDS = 0.05  # seconds of measuring
_MOST_CALLS = 50


def seconds_per_call(call: Callable[[], object], *on: torch.device) -> float:
    """Returns the seconds of a call, on average of about 50 ms of them; the first two, which also pay for memory and
    for choosing a kernel, don't count."""
    _elapsed(call, 2, on)
    num_calls = max(1, min(_MOST_CALLS, int(_SECONDS / max(_elapsed(call, 1, on), 1e-9))))
    return _elapsed(call, num_calls, on) / num_calls


def _elapsed(call: Callable[[], object], times: int, on: tuple[torch.device, ...]) -> float:
    _wait(on)
    began = time.perf_counter()
    for _ in range(times):
        call()
    _wait(on)
    return time.perf_counter() - began


def _wait(on: tuple[torch.device, ...]) -> None:
    for device in on:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
