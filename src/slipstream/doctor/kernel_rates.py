"""The rates of matrix products and of each attention kernel that there is here, and what torch.compile finds."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from slipstream.doctor.devices import devices
from slipstream.doctor.finding import Finding, error_text
from slipstream.doctor.timing import seconds_per_call
from slipstream.errors import SlipstreamError
from slipstream.model import check_compiler
from slipstream.units import bytes_text

_ON_GPUS = {
    "FlashAttention-2": SDPBackend.FLASH_ATTENTION,
    "cuDNN attention": SDPBackend.CUDNN_ATTENTION,
    "efficient attention": SDPBackend.EFFICIENT_ATTENTION,
}
_ON_CPUS = {"flash attention": SDPBackend.FLASH_ATTENTION}
_FORWARD_AND_BACKWARD = 3.5  # times the multiplications of a forward: 2 products, and then 5
_ROUNDING = 0.02  # of sums whose parts are added in bfloat16
# What PyTorch also says when it is asked for one kernel alone
_NO_REASONS = ("not used because", "runtime disabled")
_Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class _Size:
    """The shapes of what is measured on a kind of device."""

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
        except (RuntimeError, ArithmeticError) as error:  # torch.OutOfMemoryError is a RuntimeError
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
    n, dtype = _SIZES[device.type].matrix, _dtype(device)
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

    with warnings.catch_warnings(record=True) as caught:  # which say why PyTorch leaves a kernel out
        warnings.simplefilter("always")
        try:
            return _attention_rate(attention, device, tokens_first=False)
        except RuntimeError as error:
            reasons = [str(each.message).partition(" (Triggered")[0] for each in caught]
            reasons = [each for each in reasons if not any(words in each for words in _NO_REASONS)]
            return f"not here: {' '.join(reasons) or error_text(error)}"


def _package_rate(module: str, device: torch.device) -> str:
    """Returns the rate of a package with FlashAttention's interface, or why it isn't here."""
    missing = _can_import(module)
    if missing.startswith("not here"):
        return missing
    run: Any = importlib.import_module(module).flash_attn_func

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found = run(query, key, value, causal=True)
        return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]

    try:
        return _attention_rate(attention, device, tokens_first=True)
    except Exception as error:  # of a package that may do anything
        return f"not here: {error_text(error)}"


def _can_import(module: str) -> str:
    try:
        if find_spec(module.partition(".")[0]) is None:
            return f"not here: {module} isn't installed"
        importlib.import_module(module)
    except Exception as error:  # of a package that may do anything
        return f"not here: {error_text(error)}"
    return f"{module} can be imported; not measured, as it is compiled when it first runs"


def _attention_rate(attention: _Attention, device: torch.device, tokens_first: bool) -> str:
    size, dtype = _SIZES[device.type], _dtype(device)
    places = (size.tokens, size.heads) if tokens_first else (size.heads, size.tokens)
    shape = (1, *places, size.width)
    query, key, value, grad = (torch.randn(shape, device=device).to(dtype) for _ in range(4))
    inputs = [each.requires_grad_() for each in (query, key, value)]
    seconds = seconds_per_call(lambda: torch.autograd.grad(attention(query, key, value), inputs, grad), device)
    flops = _FORWARD_AND_BACKWARD * 2 * size.heads * size.tokens**2 * size.width  # of the half that is seen
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
