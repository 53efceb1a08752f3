"""Which device a rank computes on."""

from __future__ import annotations

import os

import torch

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
