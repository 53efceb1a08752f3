"""Chooses the device that a rank computes on, and checks that this machine meets the ranks' needs."""

from __future__ import annotations

import os

import torch

from slipstream.errors import SlipstreamError
from slipstream.model import check_compiler
from slipstream.network_interfaces import interface_problems
from slipstream.parallel import choose_backend, describe_sharing, gpu_of, refuse_shards, room_of_rank
from slipstream.train.config import Config
from slipstream.units import plural


def count_local_ranks(config: Config) -> int:
    """Returns the number of ranks on this machine: all of the run's, unless a launcher says otherwise."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", config.num_processes))


def choose_device_type(config: Config) -> str:
    """Returns "cuda" where the configuration asks for it or there is a GPU, which ranks may share, otherwise "cpu"."""
    if config.training.device != "auto":
        return config.training.device
    return "cuda" if torch.cuda.device_count() else "cpu"


def choose_device(config: Config) -> torch.device:
    """Returns this rank's GPU, which becomes the current one, or the CPU."""
    if choose_device_type(config) == "cpu":
        return torch.device("cpu")
    device = gpu_of(int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def choose_backends(config: Config) -> str:
    """Returns the backends of the ranks' process group: gloo between processors, and one for GPUs.

    Raises SlipstreamError where `runtime.transport` asks for one that can't."""
    backend = choose_backend(config.runtime.transport, choose_device_type(config), count_local_ranks(config))
    # Gloo connects processors and GPUs.
    return "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo"


def sharing_here(config: Config) -> str:
    """Returns how this machine's ranks share its GPUs, such as "2 ranks share 1 GPU"; "" where they don't."""
    return describe_sharing(count_local_ranks(config)) if choose_device_type(config) == "cuda" else ""


def describe_device(config: Config) -> str:
    """Returns the kind of device, which all machines of a run must have: "cpu", "cuda", or that ranks share GPUs."""
    return "cuda, shared by ranks" if sharing_here(config) else choose_device_type(config)


def describe_run(config: Config) -> str:
    """Returns a line on choices that a configuration may have left open: the mesh, the device, the precision,
    checkpoints, and where results go."""
    device = choose_device_type(config)
    every = config.checkpoint.every
    saves = "none" if every == 0 else every if every == "auto" else f"every {plural(every or 0, 'step')}"
    saves = "at the end, and once it has trained for ten minutes" if every is None else saves
    return (
        f"{config.mesh_text} on {device}, training.precision={config.training.precision}; checkpoints: {saves}; "
        f"results go to {config.training.output.absolute()}"
    )


def share_of_gpu(config: Config) -> float:
    """Returns the part of a GPU that a rank has on average; 1 where it computes on a processor."""
    return min(1.0, torch.cuda.device_count() / count_local_ranks(config)) if sharing_here(config) else 1.0


def memory_of_a_rank(config: Config) -> float:
    """Returns the bytes that a rank may plan with on this machine, whose ranks have equal parts of its memory."""
    return room_of_rank(torch.device(choose_device_type(config)), count_local_ranks(config))


def check_machine(config: Config) -> None:
    """Raises SlipstreamError where this machine lacks a GPU that is asked for or a compiler for `runtime.fused`, or is
    asked for something that ranks that share a GPU can't do."""
    if config.training.device == "cuda" and not torch.cuda.device_count():
        raise SlipstreamError(
            "training.device=cuda needs a CUDA device, but there is none; use --training.device=cpu or a machine with "
            "a GPU"
        )
    backends = choose_backends(config) if config.num_processes > 1 else ""
    for problem in interface_problems(os.environ, "nccl" in backends).values():
        raise SlipstreamError(problem)
    if config.parallel.shard == "parameters" and backends == "gloo" and choose_device_type(config) == "cuda":
        refuse_shards()
    if config.runtime.fused:
        check_compiler(choose_device_type(config))
