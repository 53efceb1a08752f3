"""Whether the processes, the devices and the compiler here are those that a run needs."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from slipstream.errors import SlipstreamError
from slipstream.model import check_compiler
from slipstream.training.config import Config
from slipstream.training.device_choice import choose_device_type, count_local_ranks


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


def check_world_size(config: Config, environment: Mapping[str, str] = os.environ) -> None:
    """Raises SlipstreamError where the launcher started another number of processes than the run has ranks."""
    world_size, num_ranks = int(environment["WORLD_SIZE"]), config.num_processes
    if world_size == num_ranks:
        return
    if num_ranks == config.pipeline.num_ranks:
        raise SlipstreamError(
            f"the launcher started {world_size} processes, but pipeline.num_ranks={num_ranks} needs {num_ranks}; use "
            f"torchrun --nproc-per-node={num_ranks} or --pipeline.num_ranks={world_size}"
        )
    raise SlipstreamError(
        f"the launcher started {world_size} processes, but {config.mesh_text} need {num_ranks}; start {num_ranks} "
        f"processes, or choose three numbers whose product is {world_size}"
    )
