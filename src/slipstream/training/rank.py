"""One rank of a run, of our own launcher's or of torchrun's."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from slipstream.errors import SlipstreamError
from slipstream.training.config import Config, load_config
from slipstream.training.launch import reported_to_the_launcher
from slipstream.training.output import Output
from slipstream.training.preflight import check_world_size, preflight
from slipstream.training.progress import Progress, make_console
from slipstream.training.trainer import Trainer, make_pipeline

# Under torchrun rank 0 reads and tokenises the text while the others wait.
_PATIENCE = timedelta(hours=4)


def choose_device(config: Config) -> torch.device:
    """This rank's GPU where there is one for each local rank (or CUDA is asked for), else the CPU."""
    local_rank, num_local = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    choice = config.training.device
    if choice == "cpu" or (choice == "auto" and torch.cuda.device_count() < num_local):
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def train_as_rank(config: Config) -> None:
    """Trains as one rank of a process group; the inputs lie in the output folder."""
    device = choose_device(config)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)
    _run(config, device)


def join(config: Config) -> None:
    """Trains as one rank under torchrun: rank 0 checks and prepares, and all go on or end together."""
    check_world_size(config, os.environ)
    device = choose_device(config)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)
    problem: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            preflight(config, Progress(make_console())).write(Output(config.training.output))
        except SlipstreamError as error:
            problem = [str(error)]
    dist.broadcast_object_list(problem)
    if problem[0] is not None:
        dist.destroy_process_group()
        raise SlipstreamError(problem[0])
    if not Output(config.training.output).inputs.is_dir():
        raise SlipstreamError(
            f"rank {dist.get_rank()} doesn't see {config.training.output}, which rank 0 wrote; "
            f"name a training.output on a disk that all machines share"
        )
    _run(config, device)


def _run(config: Config, device: torch.device) -> None:
    disable_progress_bar()  # transformers' bars would write over ours
    torch.manual_seed(config.training.seed)
    progress = Progress(make_console() if dist.get_rank() == 0 else None)
    Trainer(config, make_pipeline(config, device), device, progress).run()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """The process that our launcher starts."""
    with reported_to_the_launcher():
        train_as_rank(load_config(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
