"""The ranks along one axis of the mesh: collectives between them, and counts of their traffic.

Collectives on tensors of a GPU over gloo, by way of host memory; on others as torch.distributed has them.

NCCL refuses two processes on one GPU. Gloo takes tensors of a GPU in some collectives and not in others, so it is
given none.
"""

from __future__ import annotations

import atexit
import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.autograd_calls import with_backward
from slipstream.errors import LostRankError, SlipstreamError
from slipstream.watchdog import explain_loss, finished_ranks, waiting

_Result = TypeVar("_Result")

NO_LIMIT = timedelta(days=1)
"""The limit of a process group itself: its watchers end a run far sooner, and know more."""


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns ascending ranks in words, such as "ranks 0-3"."""
    first = ranks[0]
    last = ranks[-1]
    if first == last:
        return f"rank {first}"
    is_gapless = len(ranks) == last + 1 - first
    return f"ranks {first}-{last}" if is_gapless else f"ranks {', '.join(map(str, ranks))}"


class GroupHolder(Protocol):
    """An object that keeps process groups alive."""

    def release_groups(self) -> None:
        """Releases the process groups, as nothing more will be exchanged."""
        ...


_holders: WeakSet[GroupHolder] = WeakSet()


def release_groups_at_exit(holder: GroupHolder) -> None:
    """Ends the holder's groups, including their threads, before the interpreter ends."""
    _holders.add(holder)


@atexit.register
def _end_groups() -> None:
    """Ends all groups, since Gloo's threads release the tensors of a collective only some time after it completes.

    A thread that does so while the interpreter ends is stopped in the middle, which aborts the process ("terminate
    called without an active exception"). A group's end joins its threads, but it ends only with its last owner. Where
    `destroy_process_group` wasn't called the run has failed, and threads may wait for others for long.
    """
    if _holders and not (dist.is_available() and dist.is_initialized()):
        for holder in list(_holders):
            holder.release_groups()
        gc.collect()


class RankGroup:
    """A process group, or this process alone: then nothing is sent and every result is the argument.

    `calls` and `payload` count the collectives by name and the bytes that each of them processed: the whole tensor of
    an all-reduce, the gathered one of an all-gather, the one that is scattered of a reduce-scatter, the one from other
    ranks in an all-to-all. Every method that exchanges tensors or values is collective over the group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self.global_ranks = [0] if process_group is None else dist.get_process_group_ranks(process_group)
        self.size = len(self.global_ranks)
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.calls: Counter[str] = Counter()
        self.payload: Counter[str] = Counter()
        release_groups_at_exit(self)

    def release_groups(self) -> None:
        """Releases the process group."""
        self.process_group = None

    @property
    def uses_nccl(self) -> bool:
        """Whether the group communicates by NCCL."""
        return self.process_group is not None and dist.get_backend(self.process_group) == "nccl"

    @property
    def gpu_backend(self) -> str:
        """The backend that connects the ranks' GPUs: "nccl" or "gloo", by way of host memory; "" where none does."""
        return gpu_backend(self.process_group)

    def sum(self, tensor: Tensor) -> Tensor:
        """Replaces the tensor, on every rank, by the sum over the ranks, and returns it. Collective."""
        self._reduce(tensor, dist.ReduceOp.SUM)
        return tensor

    def start_sum(self, tensor: Tensor) -> PendingWork | None:
        """Starts `sum`; don't touch the tensor until the returned work has been waited for. Collective."""
        return self._reduce(tensor, dist.ReduceOp.SUM, wait=False)

    def max(self, tensor: Tensor) -> Tensor:
        """Replaces the tensor, on every rank, by the elementwise maximum over the ranks, and returns it. Collective."""
        self._reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Returns every rank's tensor, all of one shape, in order: (size, *shape). Collective."""
        gathered, work = self.start_all_gather(tensor)
        if work is not None:
            with self.loss_named("an all-gather"):
                work.wait()
        return gathered

    def start_all_gather(self, tensor: Tensor) -> tuple[Tensor, PendingWork | None]:
        """Starts `all_gather`; don't touch either tensor until the work has been waited for. Collective."""
        if self.size == 1:
            return tensor[None], None
        gathered = tensor.new_empty(self.size, *tensor.shape)
        self._count("all_gather", gathered)
        flat = tensor.contiguous().view(-1)
        with self.loss_named("an all-gather"):
            return gathered, _start(_all_gather, gathered.view(-1), flat, self.process_group)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Returns this rank's part (*shape) of the sum over the ranks of (size, *shape). Collective."""
        mine, work = self.start_reduce_scatter(tensor)
        if work is not None:
            with self.loss_named("a reduce-scatter"):
                work.wait()
        return mine

    def start_reduce_scatter(self, tensor: Tensor) -> tuple[Tensor, PendingWork | None]:
        """Starts `reduce_scatter`; don't touch either tensor until the work has been waited for. Collective."""
        if self.size == 1:
            return tensor[0], None
        mine = tensor.new_empty(tensor.shape[1:])
        self._count("reduce_scatter", tensor)
        flat = tensor.contiguous().view(-1)
        return mine, _start(_reduce_scatter, mine.view(-1), flat, self.process_group)

    def all_to_all(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Returns the rows (dim 0) that all ranks have for this one, in order. Collective.

        `sent` has the number of rows for each rank, which lie one after the other in `tensor`, and `received` how many
        come from each; both may be 0.
        """
        if self.size == 1:
            return tensor
        result = tensor.new_empty(sum(received), *tensor.shape[1:])
        self.calls["all_to_all"] += 1
        self.payload["all_to_all"] += result.nbytes - result[: received[self.rank]].nbytes
        is_staged = _is_staged(tensor, self.process_group)
        host = _host_memory(result) if is_staged else result
        flat = _on_host(tensor) if is_staged else tensor.contiguous()
        with self.loss_named("an all-to-all"):
            dist.all_to_all_single(host, flat, [*received], [*sent], group=self.process_group)
        return result.copy_(host) if is_staged else result

    def gather(self, value: Any) -> list[Any]:
        """Returns every rank's value, of any type that pickles, in order, on every rank. Collective."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.loss_named("an exchange of values"):
            dist.all_gather_object(values, value, group=self.process_group)
        return values

    def run_on_leader(self, decide: Callable[[], _Result]) -> _Result:
        """Returns on every rank the result of the first rank's call; the others don't call. Its SlipstreamError or
        OSError too is raised on every rank, so that none waits for a rank that has given up. Collective."""
        mine: tuple[_Result | None, SlipstreamError | OSError | None] = None, None
        if self.rank == 0:
            try:
                mine = decide(), None
            except (SlipstreamError, OSError) as error:
                mine = None, error
        decision, problem = self.gather(mine)[0]
        if problem is not None:
            raise problem
        result: _Result = decision
        return result

    def all_or_none(self, act: Callable[[], _Result]) -> _Result:
        """Returns the result of this rank's call, once no rank's has failed: the first rank's SlipstreamError is raised
        on all. Collective."""
        result, problem = None, None
        try:
            result = act()
        except SlipstreamError as error:
            problem = error
        if failure := next(filter(None, self.gather(problem)), None):
            raise failure
        return result  # type: ignore[return-value]

    def barrier(self) -> None:
        """Waits until all ranks are here. Collective."""
        if self.size > 1:
            with self.loss_named("a barrier"):
                dist.barrier(group=self.process_group)

    def __deepcopy__(self, memo: dict[int, Any]) -> RankGroup:
        return self  # a copy of a module communicates with the same ranks

    def _reduce(self, tensor: Tensor, op: Any, wait: bool = True) -> PendingWork | None:
        if self.size == 1:
            return None
        self._count("all_reduce", tensor)
        with self.loss_named("an all-reduce"):
            if not wait:
                return start_all_reduce(tensor, op, self.process_group)
            all_reduce(tensor, op, self.process_group)
        return None

    def explained(self, what: str, error: RuntimeError) -> str:
        """Returns why this rank waited in vain in `what`: the watchers' verdict, or which ranks didn't come."""
        if verdict := explain_loss(""):
            return verdict
        me = self.global_ranks[self.rank]
        finished = finished_ranks()
        others = [rank for rank in self.global_ranks if rank != me]
        if ended := [rank for rank in others if rank in finished]:
            missing = f"{ranks_text(ended)}, which {'has' if len(ended) == 1 else 'have'} ended without an error"
        else:
            which = "which" if len(others) == 1 else "of which one"
            missing = f"{ranks_text(others)}, {which} has ended or doesn't answer; see its own last lines"
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        return f"rank {me} waited in {what} for {missing} ({reason})"

    @contextmanager
    def loss_named(self, what: str) -> Iterator[None]:
        """Turns an error of gloo or NCCL, which the end of another rank causes, into one that says so."""
        try:
            with waiting(what.encode()):
                yield
        except RuntimeError as error:
            raise LostRankError(self.explained(what, error)) from error

    def _count(self, name: str, tensor: Tensor) -> None:
        self.calls[name] += 1
        self.payload[name] += tensor.nbytes


def sum_over_ranks(tensor: Tensor, group: RankGroup) -> Tensor:
    """Returns the sum of the ranks' tensors, on all ranks; each gets the gradient of the sum. Collective."""
    # in new memory, as a recomputation may have kept the inputs
    return with_backward(lambda value: (group.sum(copied(value)),), lambda gradient: (gradient,), tensor)[0]


def copied(tensor: Tensor) -> Tensor:
    """Returns the tensor in new memory, contiguous."""
    return tensor.clone(memory_format=torch.contiguous_format)


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
        self._work = work
        self._host = host
        self._result = result
        self._sent = sent  # kept until the collective ends

    def wait(self) -> None:
        self._work.wait()
        self._result.detach().copy_(self._host, non_blocking=True)  # torch reuses pinned memory only after such a copy


def gpu_backend(process_group: dist.ProcessGroup | None) -> str:
    """Returns the backend that connects the GPUs of a group, "nccl" or "gloo"; "" where none does."""
    backends = "" if process_group is None else dist.get_backend_config(process_group)
    return dict(pair.split(":") for pair in backends.split(",") if pair).get("cuda", "")


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


def _start(
    collective: Callable[..., PendingWork], result: Tensor, tensor: Tensor, group: dist.ProcessGroup | None
) -> PendingWork:
    """Starts to fill `result` by a collective of every rank's flat `tensor`."""
    if not _is_staged(tensor, group):
        return collective(result, tensor, group=group, async_op=True)
    sent, host = _on_host(tensor), _host_memory(result)
    return StagedWork(collective(host, sent, group=group, async_op=True), host, result, sent)


def send_tensor(tensor: Tensor, to: int, group: dist.ProcessGroup | None) -> None:
    """Sends a contiguous tensor to a global rank, which calls `receive_tensor`."""
    dist.send(_on_host(tensor) if _is_staged(tensor, group) else tensor, to, group)


def receive_tensor(tensor: Tensor, source: int, group: dist.ProcessGroup | None) -> None:
    """Fills a contiguous tensor with a global rank's tensor of `send_tensor`."""
    if not _is_staged(tensor, group):
        dist.recv(tensor, source, group)
        return
    host = _host_memory(tensor)
    dist.recv(host, source, group)
    tensor.copy_(host)


def _is_staged(tensor: Tensor, group: dist.ProcessGroup | None) -> bool:
    return tensor.is_cuda and gpu_backend(group) == "gloo"


def _on_host(tensor: Tensor) -> Tensor:
    return _host_memory(tensor).copy_(tensor.detach())


def _host_memory(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
