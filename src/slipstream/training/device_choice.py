"""Chooses the device that a rank computes on, and checks that this machine has what the ranks need."""

from __future__ import annotations

import os

import torch

from slipstream.errors import SlipstreamError
from slipstream.model import check_compiler
from slipstream.training.config import Config


def count_local_ranks(config: Config) -> int:
    """Returns the number of ranks on this machine: all of the run's, unless a launcher says otherwise."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", config.num_processes))


def choose_device_type(config: Config) -> str:
    """Returns "cuda" where the configuration asks for it or every local rank has a GPU, otherwise "cpu"."""
    choice = config.training.device
    if choice == "auto":
        return "cuda" if torch.cuda.device_count() >= count_local_ranks(config) else "cpu"
    return choice


def choose_device(config: Config) -> torch.device:
    """Returns this rank's GPU, which becomes the current one, or the CPU."""
    if choose_device_type(config) == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def check_machine(config: Config) -> None:
    """Raises SlipstreamError where this machine has too few GPUs, or no compiler for `runtime.fused`."""
    num_local, num_devices = count_local_ranks(config), torch.cuda.device_count()
    if config.training.device == "cuda" and num_devices < num_local:
        raise SlipstreamError(
            f"training.device=cuda needs {num_local} CUDA devices, one for each rank, but there are {num_devices}; "
            "use --training.device=cpu or fewer ranks"
        )
    if config.runtime.fused:
        check_compiler(choose_device_type(config))
