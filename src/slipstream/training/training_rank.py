"""One rank of a run, of our own launcher's, torchrun's or Slurm's."""

from __future__ import annotations

import os
import sys
import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from slipstream.errors import SlipstreamError
from slipstream.launch import (
    ConnectedRanks,
    Progress,
    connect_ranks,
    describe_process,
    make_console,
    name_ranks,
    reported_to_the_launcher,
    slurm,
    time_limit,
)
from slipstream.schedule import Schedule
from slipstream.training.config import Config, load_config, named_schedule
from slipstream.training.preflight import check_device, check_world_size, preflight
from slipstream.training.run_folder import RunFolder
from slipstream.training.trainer import start

# Under torchrun rank 0 reads and tokenises the text while the others wait.
_PATIENCE = timedelta(hours=4)
# NFS may show a folder as it was for as long as this (acdirmax).
_SECONDS_TO_APPEAR = 60.0


def choose_device_type(config: Config) -> str:
    """cuda where there is a GPU for each local rank (or it is asked for), else cpu."""
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    choice = config.training.device
    return "cpu" if choice == "cpu" or (choice == "auto" and torch.cuda.device_count() < num_local) else "cuda"


def choose_device(config: Config) -> torch.device:
    """This rank's GPU, or the CPU."""
    if choose_device_type(config) == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def train_as_rank(config: Config) -> None:
    """Trains as one rank of a process group; the inputs lie in the output folder."""
    device = choose_device(config)
    dist.init_process_group(_backend(device), timeout=_PATIENCE)
    _run(config, device)


def join(config: Config) -> None:
    """Trains as one rank under torchrun or srun: rank 0 checks and prepares, and all go on or end together.

    Raises SlipstreamError before a model is built where the ranks don't fit together, and what rank 0 found.
    """
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        os.environ.update(slurm.torchrun_variables(os.environ))
    meeting = connect_ranks(_describe(config), _find_problem(config))
    check_world_size(config, os.environ)
    device = choose_device(config)
    meeting.store.set_timeout(_PATIENCE)
    group: dict[str, Any] = {"rank": meeting.rank, "world_size": meeting.world_size, "store": meeting.store}
    dist.init_process_group(_backend(device), timeout=_PATIENCE, **group)
    try:
        _prepare(config, meeting)
    except SlipstreamError:
        dist.destroy_process_group()
        raise
    _run(config, device)


def _describe(config: Config) -> dict[str, str]:
    """Returns the versions, the device and the settings of this rank, which must be the same on all."""
    schedule = named_schedule(config.pipeline)
    texts = {f"contents of {config.pipeline.schedule}": str(schedule)} if isinstance(schedule, Schedule) else {}
    return describe_process(config.model_dump(mode="json"), choose_device_type(config), texts)


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _find_problem(config: Config) -> str | None:
    """What keeps this rank from taking part, though others may be ready."""
    try:
        check_device(config, os.environ)
    except SlipstreamError as error:
        return str(error)
    return None


def _prepare(config: Config, meeting: ConnectedRanks) -> None:
    """Rank 0 checks and writes the inputs. Raises on every rank what it found, or who doesn't see what it wrote."""
    output = RunFolder(config.training.output)
    mark = output.inputs / "run_id"  # a folder that an earlier run left on one node's own disk has another
    said: list[str | None] = [None, None]  # a problem, this run's mark
    if meeting.rank == 0:
        progress = Progress(make_console())
        progress.say(f"met: {meeting}")
        try:
            preflight(config, progress).write(output)
            said = [None, uuid.uuid4().hex]
            mark.write_text(str(said[1]))
        except SlipstreamError as error:
            said = [str(error), None]
    dist.broadcast_object_list(said)
    if said[0] is not None:
        raise SlipstreamError(said[0])
    sees: list[bool] = [False] * meeting.world_size
    dist.all_gather_object(sees, _appears(mark, str(said[1])))
    blind = [rank for rank, seen in enumerate(sees) if not seen]
    if blind:
        raise SlipstreamError(
            f"{name_ranks(blind, meeting.hosts)}: what rank 0 ({meeting.hosts[0]}) wrote to {output.folder} isn't "
            f"there; name a training.output on a disk that all machines share"
        )


def _appears(file: Path, text: str) -> bool:
    """Whether the file has this text, now or soon."""
    deadline = time.monotonic() + min(_SECONDS_TO_APPEAR, time_limit(os.environ))
    while not (file.exists() and file.read_text() == text):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _run(config: Config, device: torch.device) -> None:
    disable_progress_bar()  # transformers' bars would write over ours
    torch.manual_seed(config.training.seed)
    progress = Progress(make_console() if dist.get_rank() == 0 else None)
    start(config, device, progress).run()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """The process that our launcher starts."""
    with reported_to_the_launcher():
        train_as_rank(load_config(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
