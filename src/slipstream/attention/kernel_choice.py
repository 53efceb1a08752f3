"""Chooses between fused attention kernels by timing them, once for each shape on each kind of GPU.

Which is fastest depends on the GPU: cuDNN's is about twice as fast as FlashAttention-2 on Hopper, and slower on Ampere.
What was found is kept in `$XDG_CACHE_HOME/slipstream/attention.json`, by default in `~/.cache`; deleting it is safe.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.attention.attention_backend import QueryState
from slipstream.attention.cuda_kernels import CudnnKernel, FlashKernel, FusedKernel, add_gradients
from slipstream.attention.key_ranges import RegularMask

_log = logging.getLogger(__name__)
_ROUNDED = 64  # cuDNN makes a plan of some 50 ms for every new shape: only for lengths that are chosen, and so repeat
_WIDEST_CUDNN = 128
_REPEATS = 3

KERNELS: Mapping[str, FusedKernel] = {"flash": FlashKernel(), "cudnn": CudnnKernel()}


class AttentionShape(NamedTuple):
    """The sizes for which kernels are compared; lengths are powers of two."""

    dtype: str
    heads: int
    key_heads: int
    width: int
    length: int  # of the slice
    keys: int  # that it reads

    def __str__(self) -> str:
        kind = f"{self.dtype} {self.heads}/{self.key_heads} heads of {self.width}"
        return f"{kind}, {self.length} tokens, {self.keys} keys"


def choose_kernel(query: Tensor, key_heads: int, mask: RegularMask) -> FusedKernel:
    """Returns the fastest kernel for a slice with a regular mask; the first call for a shape times them.

    Args:
        query: (B,H,T,D) on a GPU, float16 or bfloat16.
        key_heads: of keys and values.
        mask: of all queries.
    """
    num_keys = mask.past + query.shape[2]
    if mask.window is not None or not _cudnn_takes(query.shape[-1], query.shape[2], num_keys):
        return KERNELS["flash"]
    dtype = str(query.dtype).removeprefix("torch.")
    sizes = query.shape[1], key_heads, query.shape[3], _power_of_two(query.shape[2]), _power_of_two(num_keys)
    return KERNELS[_fastest(AttentionShape(dtype, *sizes), query.device.index or 0)]


def chosen_kernels() -> dict[str, str]:
    """Returns the kernel of each shape that this process has met."""
    return {str(shape): name for (shape, _), name in _known.items()}


def kept_file() -> Path:
    """Returns where choices are kept; it need not exist."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "slipstream" / "attention.json"


_known: dict[tuple[AttentionShape, int], str] = {}


def _cudnn_takes(width: int, *lengths: int) -> bool:
    if width > _WIDEST_CUDNN or any(length % _ROUNDED for length in lengths):
        return False
    is_allowed = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    is_there = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    is_repeatable = not torch.are_deterministic_algorithms_enabled()  # its backward adds in another order every time
    return is_allowed and is_there and is_repeatable


def _power_of_two(length: int) -> int:
    return 1 << (length - 1).bit_length()


def _fastest(shape: AttentionShape, device: int) -> str:
    found = _known.get((shape, device))
    if found is None:
        kept = _read().get(_hardware(device), {})
        found = kept.get(str(shape), "")
        if found not in KERNELS:
            found = _measure(shape, torch.device("cuda", device))
            _keep(_hardware(device), str(shape), found)
        _known[shape, device] = found
    return found


@torch.no_grad()
def _measure(shape: AttentionShape, device: torch.device) -> str:
    """Returns the name of the kernel that takes least for forward and backward."""
    seconds = {name: _seconds(kernel, shape, device) for name, kernel in KERNELS.items()}
    name = min(seconds, key=lambda each: seconds[each])
    others = ", ".join(f"{each} {1e3 * seconds[each]:.2f} ms" for each in KERNELS)
    _log.info("attention of %s: %s (forward and backward: %s)", shape, name, others)
    return name


def _seconds(kernel: FusedKernel, shape: AttentionShape, device: torch.device) -> float:
    """Returns the median time of forward and backward, infinite where the kernel refuses the shape."""
    dtype, generator = getattr(torch, shape.dtype), torch.Generator(device).manual_seed(0)

    def draw(heads: int, length: int) -> Tensor:
        numbers = torch.randn(1, length, heads, shape.width, device=device, dtype=dtype, generator=generator)
        return numbers.transpose(1, 2)

    query, grad = draw(shape.heads, shape.length), draw(shape.heads, shape.length)
    key, value = draw(shape.key_heads, shape.keys), draw(shape.key_heads, shape.keys)
    mask = RegularMask(0, shape.keys - shape.length)
    wide = [torch.zeros_like(each, dtype=torch.float32) for each in (key, value)]

    def run() -> None:
        output, lse = kernel.forward(query, key, value, mask, 0.1)
        _, parts = kernel.backward(QueryState(query, output, lse, grad), key, value, mask, 0.1)
        add_gradients(parts, mask.past, *wide)

    try:
        return _timed(run, device)
    except RuntimeError as error:
        _log.info("attention of %s can't be computed by %s: %s", shape, type(kernel).__name__, error)
        return inf


def _timed(run: Callable[[], None], device: torch.device) -> float:
    """Returns the median time of a graph of `run`: short slices would be timed by what kernels cost the host."""
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
def _hardware(device: int) -> str:
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, cuDNN {cudnn}"


def _read() -> dict[str, dict[str, str]]:
    with suppress(OSError, ValueError):
        found = json.loads(kept_file().read_text())
        if isinstance(found, dict):
            return found
    return {}


def _keep(hardware: str, shape: str, name: str) -> None:
    """Adds a choice to the file; where that can't be written, the next process measures again."""
    found = _read()
    found.setdefault(hardware, {})[shape] = name
    with suppress(OSError):
        kept_file().parent.mkdir(parents=True, exist_ok=True)
        part = kept_file().with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(found, indent=1))
        part.replace(kept_file())
