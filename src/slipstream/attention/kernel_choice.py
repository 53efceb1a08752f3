"""Chooses between fused attention kernels by timing them, once for each shape on each kind of GPU.

Which is fastest depends on the GPU: cuDNN's is about twice as fast as FlashAttention-2 on Hopper, and slower on Ampere.
Times are kept in `$XDG_CACHE_HOME/slipstream/attention.json`, by default in `~/.cache`; deleting it is safe.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.atomic_files import cache_folder, keep_measured, read_kept
from slipstream.attention.backend import QueryState
from slipstream.attention.kernel_passes import add_gradients
from slipstream.attention.kernels import CudnnKernel, FlashKernel, FusedKernel, HeadsApart, package_kernels
from slipstream.attention.masks import RegularMask

_log = logging.getLogger(__name__)
# cuDNN makes a plan of some 50 ms for every new shape, so it gets only chosen lengths, which repeat.
_ROUNDED = 64
_WIDEST_CUDNN = 128
_MOST_APART = 1 << 28  # numbers in the gradients of keys of query heads by themselves: half a gigabyte
_WORTH = 1.03  # largest ratio of times at which the kernel that rounds these gradients once less is preferred
_REPEATS = 3
_AGREEMENT = 0.03  # largest difference from FlashAttention's results, in float16 and bfloat16
_Milliseconds = dict[str, float | None]  # kernel -> ms; None for a refused shape or a wrong result

KERNELS: Mapping[str, FusedKernel] = {"flash": FlashKernel(), "cudnn": CudnnKernel()}  # PyTorch's kernels


class AttentionShape(NamedTuple):
    """The sizes for which kernels are compared; lengths are powers of two."""

    dtype: str
    heads: int
    key_heads: int
    width: int
    length: int  # queries, the slice's tokens
    keys: int  # keys read
    window: int = 0  # width of a sliding window; 0: none

    def __str__(self) -> str:
        kind = f"{self.dtype} {self.heads}/{self.key_heads} heads of {self.width}"
        window = f", a window of {self.window}" if self.window else ""
        return f"{kind}, {self.length} tokens, {self.keys} keys{window}"

    @property
    def mask(self) -> RegularMask:
        return RegularMask(0, self.keys - self.length, self.window or None)


def choose_kernel(query: Tensor, key_heads: int, mask: RegularMask) -> FusedKernel:
    """Returns the fastest kernel for a slice with a regular mask; the first call for a shape times them.

    Args:
        query: (B,H,T,D) on a GPU, float16 or bfloat16.
        key_heads: of keys and values.
        mask: of all queries.
    """
    allowed = torch.backends.cuda.cudnn_sdp_enabled(), torch.are_deterministic_algorithms_enabled()  # type: ignore[no-untyped-call]
    return _choose(query.dtype, query.shape[1:], key_heads, mask.past, mask.window, query.device.index or 0, allowed)


# Every slice of every layer asks, and documents keep coming in new lengths.
@lru_cache(maxsize=4096)
def _choose(
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    key_heads: int,
    past: int,
    window: int | None,
    device: int,
    _allowed: tuple[bool, bool],
) -> FusedKernel:
    """Returns the fastest kernel for queries of a shape (H,T,D); other kernels may be allowed later."""
    heads, length, width = shape
    kernels = _candidates(width, length, past, window, device)
    if key_heads < heads and heads * (past + length) * width <= _MOST_APART:
        kernels |= {f"{name}, heads apart": HeadsApart(kernel) for name, kernel in kernels.items()}
    if len(kernels) == 1:
        return KERNELS["flash"]
    sizes = heads, key_heads, width, _power_of_two(length), _power_of_two(past + length)
    window = 0 if window is None else _power_of_two(window)
    name = str(dtype).removeprefix("torch.")
    return kernels[_fastest(AttentionShape(name, *sizes, window), device, kernels)]


def chosen_kernels() -> dict[str, str]:
    """Returns the kernel of each shape that this process has met."""
    return {str(shape): name for (shape, _), name in _known.items()}


def kept_file() -> Path:
    """Returns where choices are kept; it need not exist."""
    return cache_folder() / "attention.json"


_known: dict[tuple[AttentionShape, int], str] = {}  # the kernel chosen last
_measured: dict[tuple[AttentionShape, int], _Milliseconds] = {}


def _candidates(width: int, length: int, past: int, window: int | None, device: int) -> dict[str, FusedKernel]:
    """Returns the kernels that can compute a slice, by name."""
    kernels = {"flash": KERNELS["flash"]} | package_kernels(_capability(device))
    if window is None and _cudnn_takes(width, length, past + length):
        kernels["cudnn"] = KERNELS["cudnn"]
    return kernels


def _cudnn_takes(width: int, *lengths: int) -> bool:
    if width > _WIDEST_CUDNN or any(length % _ROUNDED for length in lengths):
        return False
    is_allowed = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    is_there = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    # cuDNN's backward adds in a different order every time.
    is_repeatable = not torch.are_deterministic_algorithms_enabled()
    return is_allowed and is_there and is_repeatable


def _power_of_two(length: int) -> int:
    return 1 << (length - 1).bit_length()


def _fastest(shape: AttentionShape, device: int, kernels: Mapping[str, FusedKernel]) -> str:
    """Returns the name of the kernel that takes least for forward and backward."""
    times = _measured.setdefault((shape, device), {})
    if not kernels.keys() <= times.keys():
        times |= _kept(device, shape)
        if missing := {name: kernel for name, kernel in kernels.items() if name not in times}:
            times |= {
                name: _milliseconds(kernel, shape, torch.device("cuda", device)) for name, kernel in missing.items()
            }
            _keep(device, shape, times)
        others = ", ".join(f"{other} {'-' if times[other] is None else f'{times[other]:.2f} ms'}" for other in kernels)
        _log.info("attention of %s, forward and backward: %s", shape, others)

    def cost(name: str) -> float:
        """The time, or less for fewer errors."""
        known = times[name]
        return inf if known is None else known / (_WORTH if isinstance(kernels[name], HeadsApart) else 1)

    _known[shape, device] = min(kernels, key=cost)
    return _known[shape, device]


@torch.no_grad()
def _milliseconds(kernel: FusedKernel, shape: AttentionShape, device: torch.device) -> float | None:
    """Returns the median time of forward and backward; None where the kernel refuses the shape, or is wrong."""
    run = partial(_run, draw=_drawn(shape, device), mask=shape.mask)
    try:
        if not agrees(run(kernel), run(KERNELS["flash"])):
            _log.warning("attention of %s by %s isn't used: it differs from FlashAttention", shape, _name(kernel))
            return None
        return 1e3 * _timed(partial(run, kernel), device)
    # A package's kernel may raise anything.
    except Exception as error:
        _log.info("attention of %s can't be computed by %s: %s", shape, _name(kernel), error)
        return None


def agrees(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Returns whether each tensor is the expected one, but for rounding."""
    pairs = zip(found, expected, strict=True)
    return all(bool((a - b).float().norm() <= _AGREEMENT * b.float().norm()) for a, b in pairs)


def _name(kernel: FusedKernel) -> str:
    inner = kernel.kernel if isinstance(kernel, HeadsApart) else kernel
    return type(inner).__name__.removesuffix("Kernel") + (", heads apart" if inner is not kernel else "")


def _drawn(shape: AttentionShape, device: torch.device) -> tuple[Tensor, ...]:
    """Returns random queries, gradients of their output, keys and values."""
    dtype = getattr(torch, shape.dtype)
    generator = torch.Generator(device).manual_seed(0)
    sizes = [(shape.heads, shape.length)] * 2 + [(shape.key_heads, shape.keys)] * 2
    return tuple(
        torch.randn(1, length, heads, shape.width, device=device, dtype=dtype, generator=generator).transpose(1, 2)
        for heads, length in sizes
    )


def _run(kernel: FusedKernel, draw: tuple[Tensor, ...], mask: RegularMask) -> list[Tensor]:
    """Returns a slice's output and the gradients of queries, keys and values."""
    query, grad, key, value = draw
    output, lse = kernel.forward(query, key, value, mask, 0.1)
    grad_query, parts = kernel.backward(QueryState(query, output, lse, grad), key, value, mask, 0.1)
    wide = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in (key, value)]
    return [output, grad_query, *add_gradients(parts, mask.past, *wide), *wide]


def _timed(run: Callable[[], object], device: torch.device) -> float:
    """Returns the median time of a graph of `run`: else short slices would be timed by the host's launches."""
    run()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()
        graph.capture_begin(capture_error_mode="thread_local")
        run()
        graph.capture_end()
        graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]  # type: ignore[no-untyped-call]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
    torch.cuda.synchronize(device)
    return float(median(a.elapsed_time(b) for a, b in pairwise(events))) / 1e3


@cache
def _capability(device: int) -> int:
    return torch.cuda.get_device_capability(device)[0]


@cache
def _hardware(device: int) -> str:
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, cuDNN {cudnn}"


def _kept(device: int, shape: AttentionShape) -> _Milliseconds:
    times = read_kept(kept_file()).get(_hardware(device), {}).get(str(shape), {})
    return times if isinstance(times, dict) else {}


def _keep(device: int, shape: AttentionShape, milliseconds: _Milliseconds) -> None:
    """Adds a shape's times to the file."""
    times = read_kept(kept_file())
    times.setdefault(_hardware(device), {})[str(shape)] = milliseconds
    keep_measured(kept_file(), times)
