"""Measures how many bytes of tensors are alive, now and at most: by following storages, or by CUDA's allocator."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from slipstream.model import storage_id


class LiveMemory(TorchDispatchMode):
    """The storages of the CPU's tensors: those of `present` tensors, and all that operations within the block make.

    An operation's result is in a storage of its own or in that of an argument, so the arguments say what was there
    before. That doesn't count unless it is `present`, but where an operation has read it, its end does. Exact for what
    tensors hold, each storage once, until its last owner, Python or an autograd graph, releases it. Buffers inside a
    kernel are not tensors and not seen. Backwards are seen because on the CPU they run in the calling thread.
    """

    def __init__(self, present: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.num_bytes = 0
        self.peak = 0
        for tensor in present:
            self._add(tensor)

    def restart_peak(self) -> None:
        self.peak = self.num_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.lift_fresh.default:  # whose argument has just been made, without an operation
            for each in tree_iter((args, kwargs)):
                if isinstance(each, Tensor):
                    self._add(each, counted=False)
        result = func(*args, **kwargs or {})
        for each in (result,) if isinstance(result, Tensor) else tree_iter(result):
            if isinstance(each, Tensor):
                self._add(each)
        return result

    def _add(self, tensor: Tensor, counted: bool = True) -> None:
        if tensor.device.type != "cpu" or isinstance(tensor, FakeTensor):  # a trace's: without memory
            return
        storage, key = tensor.untyped_storage(), storage_id(tensor)
        size = storage.nbytes()
        if size and key not in self._references:
            self._references[key] = weakref.ref(storage, partial(self._remove, key, size))
            self.num_bytes += size * counted
            self.peak = max(self.peak, self.num_bytes)

    def _remove(self, key: int, size: int, _: object) -> None:
        del self._references[key]
        self.num_bytes -= size


class AllocatedMemory:
    """Reads what CUDA's caching allocator has allocated on a device: blocks, so sizes are rounded up."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart_peak()

    @property
    def num_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def restart_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


MemoryMeter = LiveMemory | AllocatedMemory  # `num_bytes` now, and their `peak` since `restart_peak` or the beginning


def memory_meter(device: torch.device, present: Iterable[Tensor] = ()) -> AbstractContextManager[MemoryMeter]:
    """Measures how a device's tensors change within a block. On the CPU those `present` count from the beginning."""
    return nullcontext(AllocatedMemory(device)) if device.type == "cuda" else LiveMemory(present)


def tensors_alive() -> list[Tensor]:
    """Returns every tensor in this process that Python knows of.

    It leaves out those that only stand for one and have no memory: what torch.compile has traced with stays in its
    caches.
    """
    gc.collect()
    found = (each for each in gc.get_objects() if issubclass(type(each), Tensor))
    return [each for each in found if not isinstance(each, FakeTensor)]
