"""Collectives on tensors of a GPU over gloo, by way of host memory; on others as torch.distributed has them.

NCCL refuses two processes on one GPU. Gloo takes tensors of a GPU in some collectives and not in others, so it is
given none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13's names, and the older ones that it deprecates
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class PendingWork(Protocol):
    """A collective that has begun."""

    def wait(self) -> object:
        """Returns when the result may be used on the current stream."""
        ...


class StagedWork:
    """A collective on host memory, whose result goes to the GPU when it is waited for."""

    def __init__(self, work: PendingWork, host: Tensor, result: Tensor, sent: Tensor) -> None:
        self._work, self._host, self._result = work, host, result
        self._sent = sent  # kept until the collective ends

    def wait(self) -> None:
        self._work.wait()
        self._result.detach().copy_(self._host, non_blocking=True)  # torch reuses pinned memory only after such a copy


def gpu_backend(process_group: dist.ProcessGroup | None) -> str:
    """Returns what connects the GPUs of a group, "nccl" or "gloo"; "" where nothing does."""
    backends = "" if process_group is None else dist.get_backend_config(process_group)
    return dict(each.split(":") for each in backends.split(",") if each).get("cuda", "")


def all_reduce(tensor: Tensor, op: Any, group: dist.ProcessGroup | None) -> None:
    """Replaces the tensor on every rank by the reduction over the ranks. Collective."""
    if _is_staged(tensor, group):
        start_all_reduce(tensor, op, group).wait()
    else:
        dist.all_reduce(tensor, op, group=group)


def start_all_reduce(tensor: Tensor, op: Any, group: dist.ProcessGroup | None) -> PendingWork:
    """Starts `all_reduce`; don't touch the tensor until the work has been waited for. Collective."""
    if not _is_staged(tensor, group):
        work: PendingWork = dist.all_reduce(tensor, op, group=group, async_op=True)
        return work
    host = _on_host(tensor)
    return StagedWork(dist.all_reduce(host, op, group=group, async_op=True), host, tensor, host)


def start_all_gather(gathered: Tensor, tensor: Tensor, group: dist.ProcessGroup | None) -> PendingWork:
    """Starts to fill `gathered` (size * n,) with every rank's `tensor` (n,). Collective."""
    return _start(_all_gather, gathered, tensor, group)


def start_reduce_scatter(mine: Tensor, tensor: Tensor, group: dist.ProcessGroup | None) -> PendingWork:
    """Starts to fill `mine` (n,) with this rank's part of the ranks' sum of `tensor` (size * n,). Collective."""
    return _start(_reduce_scatter, mine, tensor, group)


def _start(
    collective: Callable[..., PendingWork], result: Tensor, tensor: Tensor, group: dist.ProcessGroup | None
) -> PendingWork:
    if not _is_staged(tensor, group):
        return collective(result, tensor, group=group, async_op=True)
    sent, host = _on_host(tensor), _host_memory(result)
    return StagedWork(collective(host, sent, group=group, async_op=True), host, result, sent)


def send_tensor(tensor: Tensor, to: int, group: dist.ProcessGroup | None) -> None:
    """Sends a contiguous tensor to a global rank, which calls `receive_tensor`."""
    dist.send(_on_host(tensor) if _is_staged(tensor, group) else tensor, to, group)


def receive_tensor(tensor: Tensor, source: int, group: dist.ProcessGroup | None) -> None:
    """Fills a contiguous tensor with what a global rank sends by `send_tensor`."""
    if not _is_staged(tensor, group):
        dist.recv(tensor, source, group)
        return
    host = _host_memory(tensor)
    dist.recv(host, source, group)
    tensor.copy_(host)


def _is_staged(tensor: Tensor, group: dist.ProcessGroup | None) -> bool:
    return tensor.is_cuda and gpu_backend(group) == "gloo"


def _on_host(tensor: Tensor) -> Tensor:
    """Returns a copy in host memory, complete."""
    return _host_memory(tensor).copy_(tensor.detach())


def _host_memory(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
