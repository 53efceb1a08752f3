"""The GPU of each process of a machine, which may have fewer GPUs than processes, and what connects them."""

from __future__ import annotations

import logging
import os
from typing import Literal

import torch

from slipstream.errors import SlipstreamError

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


def choose_backend(
    transport: TransportName, device_type: str, num_local: int, option: str = "runtime.transport"
) -> Literal["nccl", "gloo"]:
    """Returns what connects `num_local` processes of this machine: NCCL where each has a GPU of its own, or where
    `transport` is "nccl" and they share GPUs (`share_gpus_by_nccl`).

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

    The processes take turns on the GPU, so an exchange takes milliseconds: this shows that what runs on a cluster is
    right, not how fast it is. Variables that are set already are kept.
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
    for GPUs, isn't what `transport` asks for."""
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
        "parallel.shard_parameters=true: FSDP2 exchanges shards between GPUs by NCCL alone, and gloo connects these, "
        "as where ranks share a GPU. Use shard_optimizer=true instead, or give each rank a GPU of its own."
    )
