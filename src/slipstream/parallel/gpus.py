"""The GPU of each process of a machine, their connection, and the memory of PyTorch's allocator on each."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from slipstream.errors import SlipstreamError
from slipstream.machine_memory import machine_memory
from slipstream.units import bytes_text, times_text

TransportName = Literal["auto", "nccl", "gloo"]

# With these NCCL takes processes that share a GPU for processes of different machines, which talk by sockets. Up to
# version 2.29.7 it refuses them by host and bus; from 2.30 on they are allowed by a variable.
_SHARED = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "1",
    "NCCL_PROTO": "Simple",
    "NCCL_ALGO": "Ring",
}
_log = logging.getLogger(__name__)


def gpu_of(local_rank: int) -> torch.device:
    """Returns the GPU of a process of this machine; where there are fewer than processes, they take turns."""
    return torch.device("cuda", local_rank % max(torch.cuda.device_count(), 1))


_ROOM = 0.95  # the share of a device's memory beside fragments and libraries


def room_of_rank(device: torch.device, num_local: int) -> float:
    """Returns the bytes of a device's memory that a process may plan with.

    `num_local` processes of this machine have equal parts of it, unless a launcher says how many there are.
    """
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", num_local))
    if device.type != "cuda":
        return _ROOM * machine_memory().usable / num_local
    share = min(1.0, torch.cuda.device_count() / num_local)
    return _ROOM * share * torch.cuda.get_device_properties(device).total_memory


def choose_backend(
    transport: TransportName, device_type: str, num_local: int, option: str = "runtime.transport"
) -> Literal["nccl", "gloo"]:
    """Returns the backend that connects `num_local` processes of this machine: NCCL where each has a GPU of its own, or
    where `transport` is "nccl" and they share GPUs (`share_gpus_by_nccl`).

    Raises SlipstreamError, which names the `option`, where `transport` is "nccl" and they compute on CPUs.
    """
    num_gpus = torch.cuda.device_count() if device_type == "cuda" else 0
    if transport == "nccl" and not num_gpus:
        raise SlipstreamError(
            f"{option}=nccl: {num_local} ranks compute on CPUs, and NCCL connects GPUs. Leave it out or give gloo."
        )
    return "nccl" if transport == "nccl" or (transport == "auto" and num_gpus >= num_local) else "gloo"


def share_gpus_by_nccl(rank: int, num_local: int) -> None:
    """Lets NCCL connect processes that share a GPU; nothing where each has its own. Call it before NCCL's first
    communicator is made.

    The processes take turns on the GPU, so an exchange takes milliseconds: this shows that a cluster's run is right,
    not its speed. Variables that are set already are kept.
    """
    if not (sharing := describe_sharing(num_local)):
        return
    for name, value in ({"NCCL_HOSTID": str(rank)} | _SHARED).items():
        os.environ.setdefault(name, value)
    if rank == 0:
        _log.warning(
            "%s, connected by NCCL over sockets: every exchange takes milliseconds, so don't judge speed by it", sharing
        )


def describe_sharing(num_local: int) -> str:
    """Returns how the processes of this machine share its GPUs, such as "2 ranks share 1 GPU", or "" where they
    don't."""
    num_gpus = torch.cuda.device_count()
    if not 0 < num_gpus < num_local:
        return ""
    return f"{num_local} ranks share {num_gpus} {'GPU' if num_gpus == 1 else 'GPUs'}"


def check_transport(
    transport: TransportName, device: torch.device, backend: str, option: str = "runtime.transport"
) -> None:
    """Raises SlipstreamError, which names the `option`, where a process group that is there already, with this backend
    for GPUs, isn't the one that `transport` asks for."""
    if transport == "nccl" and (device.type == "cpu" or backend != "nccl"):
        found = "the ranks compute on CPUs" if device.type == "cpu" else f"the process group connects GPUs by {backend}"
        raise SlipstreamError(
            f"{option}=nccl, but {found}. Leave it out or give gloo, or start the program by torchrun with a "
            'GPU for each rank and Pipeline(device="cuda").'
        )
    if transport == "gloo" and device.type == "cuda" and backend == "nccl":
        raise SlipstreamError(
            f"{option}=gloo, but the process group connects GPUs by NCCL. Leave it out, or call "
            'torch.distributed.init_process_group("gloo") before anything else makes the group.'
        )


def refuse_shards() -> None:
    """Raises SlipstreamError for parameters that are sharded over replicas whose GPUs gloo connects."""
    raise SlipstreamError(
        "parallel.shard=parameters: FSDP2 exchanges shards between GPUs by NCCL alone, and gloo connects these, "
        "as where ranks share a GPU. Use parallel.shard=optimizer instead, or give each rank a GPU of its own."
    )


# torch 2.11 to 2.13 read the first that is set. The newer name, PYTORCH_ALLOC_CONF, is read where the older isn't.
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"
_MUCH = 0.2  # reserved bytes that no tensor uses, as a share of the tensors' bytes
_LITTLE = 2**30  # bytes too few to report, whatever their share
_ADVICE_OF_TORCH = " If reserved but unallocated"  # beginning of torch's advice, given even if it has been followed


@dataclass(frozen=True)
class GpuMemory:
    """The counters of the allocator of a process's GPU: bytes, and numbers of events."""

    allocated: int  # peak of the tensors' bytes
    reserved: int  # peak of the bytes taken from the driver
    between: int  # free bytes in segments that are partly in use
    retries: int  # times that all unused segments went back to the driver for want of a large enough block
    failures: int  # out-of-memory errors

    @classmethod
    def now(cls) -> GpuMemory | None:
        """Returns the counters of the current GPU; None where this process has no tensors on one."""
        counters = torch.cuda.memory_stats()
        if not counters.get("allocated_bytes.all.peak"):
            return None
        return cls(
            allocated=counters["allocated_bytes.all.peak"],
            reserved=counters["reserved_bytes.all.peak"],
            between=counters["inactive_split_bytes.all.current"],
            retries=counters["num_alloc_retries"],
            failures=counters["num_ooms"],
        )

    @property
    def is_fragmented(self) -> bool:
        """Whether much more is reserved than tensors have needed at the same time."""
        return self.reserved - self.allocated > max(_MUCH * self.allocated, _LITTLE)

    def describe(self) -> str:
        """Returns a text on the most memory in use."""
        return (
            f"tensors held {bytes_text(self.allocated)} of the GPU at most, and PyTorch's allocator had reserved "
            f"{bytes_text(self.reserved)}"
        )


def allocator_setting(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the variable that PyTorch's allocator reads and its value, as it is typed; "" where none is set."""
    name = next((name for name in _VARIABLES if name in environment), None)
    return "" if name is None else f"{name}={environment[name]}"


def expands_segments(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether segments may grow."""
    return _EXPANDABLE.lower() in allocator_setting(environment).replace(" ", "").lower()


def fragmentation_advice() -> str:
    """Returns the variable to set against gaps between tensors; settings that are there stay."""
    if expands_segments():
        return f"{_EXPANDABLE} is set already, which keeps gaps small: only needing less memory helps further"
    name, _, value = allocator_setting().partition("=")
    others = [setting for setting in value.split(",") if setting and "expandable_segments" not in setting]
    setting = f"{name or _VARIABLES[0]}={','.join([*others, _EXPANDABLE])}"
    return f"put {setting} before the command: then tensors of any size can use gaps between others"


@contextmanager
def shortage_explained() -> Iterator[None]:
    """Adds to an error for lack of a GPU's memory the allocator's counters, and the remedy."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        first = str(error).partition("\n")[0].partition(_ADVICE_OF_TORCH)[0].rstrip(". ")
        if (held := GpuMemory.now()) is not None:
            gaps = f"; {bytes_text(held.between)} lay free between tensors"
            again = f", and it had given back all that was unused {times_text(held.retries)}" if held.retries else ""
            first += f". In this process {held.describe()}{again}{gaps}. Against gaps, {fragmentation_advice()}"
        error.args = (first,)
        raise
