"""Makes the process group of the processes that torchrun started, and ends it with the program."""

from __future__ import annotations

import atexit
import os
import socket
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from slipstream.errors import SlipstreamError
from slipstream.network_interfaces import interface_problems, joining_hint
from slipstream.parallel.gpus import TransportName, choose_backend, gpu_of, share_gpus_by_nccl
from slipstream.parallel.rank_group import NO_LIMIT
from slipstream.parallel.store_connection import accepts, connected_store, describe_held_port, time_limit
from slipstream.parallel.watched_group import watch_store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# The variables by which other launchers say how many processes they have started
_COUNTS = {"srun": "SLURM_STEP_NUM_TASKS", "mpirun": "OMPI_COMM_WORLD_SIZE"}
_PROCESS = {"srun": "SLURM_PROCID", "mpirun": "OMPI_COMM_WORLD_RANK"}
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join_launched_group(
    device: torch.device | str | None = None,
    stall_limit: float | Literal["off"] | None = None,
    is_provisional: bool = False,
    transport: TransportName = "auto",
    option: str = "runtime.transport",
) -> None:
    """Makes the default process group of the processes that torchrun started, unless there is one: by NCCL where each
    process of this machine has a GPU of its own and neither `device` nor `transport` says otherwise, else by gloo.
    Where `device` is CUDA and there are fewer GPUs, processes share them. Nothing for a process that is alone. Its
    ranks are watched before they make it, as `watch_group` does. Collective.

    Without it, every process would train a whole copy of the model by itself. The group is destroyed when the program
    ends.

    Raises:
        SlipstreamError: if another launcher has started several processes, which only it can connect; or if
            `transport`, which was given as the `option`, can't connect these.
    """
    if not dist.is_available() or dist.is_initialized():
        return
    environment = os.environ
    if {"RANK", "WORLD_SIZE"} <= environment.keys():
        if int(environment["WORLD_SIZE"]) > 1:
            backend = _take_gpu(environment, device, transport, option)
            _make_group(environment, backend, stall_limit, is_provisional)
        return
    for launcher, size in _COUNTS.items():
        if _PROCESS[launcher] in environment and int(environment.get(size, 1)) > 1:
            raise SlipstreamError(
                f"{launcher} started {environment[size]} processes ({size}), but they have no process group, so each "
                "would train a copy of its own. Start the program with torchrun, or call "
                "torch.distributed.init_process_group(...) before the Pipeline is made."
            )


def _take_gpu(
    environment: Mapping[str, str], device: torch.device | str | None, transport: TransportName, option: str
) -> str:
    """Makes this process's GPU, if it is to use one, the current one; returns the backend of the group."""
    num_local = int(environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"]))
    device_type = "cuda" if device is None else torch.device(device).type
    backend = choose_backend(transport, device_type, num_local, option)
    if backend == "nccl":
        share_gpus_by_nccl(int(environment["RANK"]), num_local)
    if backend == "nccl" or (device is not None and device_type == "cuda"):
        torch.cuda.set_device(gpu_of(int(environment.get("LOCAL_RANK", environment["RANK"]))))
    return backend


def _make_group(
    environment: Mapping[str, str], backend: str, stall_limit: float | Literal["off"] | None, is_provisional: bool
) -> None:
    missing = [name for name in _NEEDED if name not in environment]
    if missing:
        raise SlipstreamError(
            f"WORLD_SIZE={environment['WORLD_SIZE']} says that several processes run, but {', '.join(missing)} is "
            "missing, so they can't be connected. Start them with torchrun, call "
            "torch.distributed.init_process_group(...) before the Pipeline is made, or, for a process by itself, "
            f"remove WORLD_SIZE{joining_hint(environment)}."
        )
    store, rank, size = _launched_store(environment)
    watch_store(store, rank, size, stall_limit, is_provisional)
    for problem in interface_problems(environment, "nccl" in backend).values():  # now the others hear of it
        raise SlipstreamError(f"rank {rank} on {socket.gethostname()}: {problem}")
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=NO_LIMIT)
    end_group_at_exit()


def _launched_store(environment: Mapping[str, str]) -> tuple[Store, int, int]:
    """Returns the store at MASTER_ADDR, this rank and how many there are. Raises SlipstreamError where it can't listen
    there, or another program does."""
    # torchrun's agent has its own store, which is there before the ranks start.
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        found: tuple[Store, int, int] = next(rendezvous("env://", timeout=NO_LIMIT))
        return found
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    address = environment["MASTER_ADDR"]
    port = int(environment["MASTER_PORT"])
    seconds = time_limit(environment)

    def connect() -> Store:
        return dist.TCPStore(  # type: ignore[attr-defined]
            address, port, size, is_master=rank == 0, timeout=NO_LIMIT, wait_for_workers=False, multi_tenant=True
        )

    # As long as nobody listens there, rank 0 may still start.
    store = connected_store(connect, seconds, lambda: accepts(address, port, seconds))
    if not isinstance(store, Exception):
        return store, rank, size
    place = f"MASTER_ADDR={address}, MASTER_PORT={port}"
    reason = str(store).partition("\n")[0]
    raise SlipstreamError(describe_held_port(rank, place, reason) + joining_hint(environment)) from store


def end_group_at_exit() -> None:
    """Has the default process group destroyed when the program ends; for one that another library has made."""
    atexit.unregister(_end_group)
    atexit.register(_end_group)


def _end_group() -> None:
    """Destroys the group at the end of a program that hasn't failed: else others may wait, and it would with them."""
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()
