"""One rank of a run, started by `slipstream train`, torchrun or Slurm."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from slipstream import launch
from slipstream.errors import SlipstreamError
from slipstream.model import trust_remote_code
from slipstream.network_interfaces import joining_hint
from slipstream.options import Memory
from slipstream.parallel import NO_LIMIT, RankGroup, share_gpus_by_nccl, shortage_explained
from slipstream.schedule import Schedule
from slipstream.terminal import go_on_in, log_details, make_console, outlast_readers
from slipstream.train.config import Config, load_config, named_schedule
from slipstream.train.device_choice import (
    check_machine,
    choose_backends,
    choose_device,
    count_local_ranks,
    describe_device,
    describe_run,
    sharing_here,
)
from slipstream.train.elastic_mesh import mesh_of_processes
from slipstream.train.folder_lock import FolderLock
from slipstream.train.mesh_choice import choose_mesh
from slipstream.train.preflight import less_memory, preflight
from slipstream.train.run_context import RunContext
from slipstream.train.trainer import Trainer
from slipstream.units import plural
from slipstream.watchdog import watchdog_paused

# A launched rank runs this module as __main__, so __name__ won't do.
_log = logging.getLogger("slipstream.train.training_rank")

# NFS may show a folder as it was for as long as this (acdirmax).
_SECONDS_TO_APPEAR = 60.0


def join_run(config: Config) -> None:
    """Trains as one rank under torchrun or srun: all ranks connect, rank 0 prepares the run, and all train. Collective.

    Raises:
        SlipstreamError: on every rank, before a model is built, if the ranks don't fit together or preflight failed.
    """
    stop = launch.StopRequest()
    stop.listen()
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        os.environ.update(launch.local_ranks.torchrun_variables(os.environ))
    is_elastic = config.training.min_ranks is not None
    if is_elastic:
        config = mesh_of_those_there(config, os.environ)
    problem = None  # this rank's obstacle, though others may be ready
    try:
        check_machine(config)
    except SlipstreamError as error:
        problem = str(error)
    if os.environ["RANK"] == "0":
        why = f"RANK and WORLD_SIZE={os.environ['WORLD_SIZE']} are set: " if joining_hint(os.environ) else ""
        launch.Progress(make_console()).say(f"{why}connecting {plural(config.num_processes, 'rank')}")
    ranks = launch.connect_ranks(_describe(config), problem)
    config = _resumed_after_restart(config, ranks.is_restart)
    if not is_elastic:
        check_world_size(config)
    ranks.store.set_timeout(NO_LIMIT)
    place = ranks.place
    limit = config.training.stall_limit
    if place.rank >= config.num_processes:
        ranks.wait_for_the_end(stop)
        return
    try:
        with (
            ranks.end_told_to_idle_ones(config.num_processes),
            launch.watched_run(ranks.store, place.rank, config.num_processes, limit, ranks.address),
        ):
            _join(config, ranks, stop)
    # No launcher of ours adds this advice.
    except torch.OutOfMemoryError as error:
        error.args = (". ".join([str(error), *less_memory(str(error), config)]),)
        raise


def _join(config: Config, ranks: launch.ConnectedRanks, stop: launch.StopRequest) -> None:
    """Trains with the ranks that are connected. Collective."""
    device = _init_process_group(config, rank=ranks.place.rank, world_size=config.num_processes, store=ranks.store)
    progress = launch.Progress(make_console() if ranks.place.rank == 0 else None)
    # Rank 0 takes the lock, and the others join it.
    lock = FolderLock(config.training.output, progress.warn)
    try:
        try:
            # Rank 0 reads and tokenises the text while the others wait.
            with watchdog_paused("preparing the run"):
                is_finished, config = _prepare(config, ranks, lock, progress)
        except SlipstreamError:
            dist.destroy_process_group()
            raise
        if is_finished:
            dist.destroy_process_group()
        else:
            _train(config, device, stop)
    finally:
        lock.release()


def _resumed_after_restart(config: Config, is_restart: bool) -> Config:
    """Returns the configuration of a run that torchrun may have started again: it then goes on from the last good
    checkpoint."""
    if config.checkpoint.resume != "no" or not is_restart:
        return config
    checkpoint = config.checkpoint.model_copy(update={"resume": "last-good"})
    return config.model_copy(update={"checkpoint": checkpoint})


def mesh_of_those_there(config: Config, environment: Mapping[str, str]) -> Config:
    """Returns the configuration with the mesh of as many processes as torchrun has started.

    Raises:
        SlipstreamError: where the launcher can't change their number, a later start couldn't go on, or too few are
            there.
    """
    world_size = int(environment["WORLD_SIZE"])
    least = config.training.min_ranks or 1
    setting = f"training.min_ranks={least}"
    if "TORCHELASTIC_RUN_ID" not in environment:
        launcher = "srun" if "SLURM_PROCID" in environment else "this launcher"
        raise SlipstreamError(
            f"{setting}, but {launcher} starts a fixed number of processes and ends with the first that is lost. Start "
            "one torchrun --nnodes=MIN:MAX --rdzv-backend=c10d on each node (under Slurm: srun --ntasks-per-node=1 "
            "torchrun ...), or leave training.min_ranks out"
        )
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise SlipstreamError(
            f"{setting}: a node that joins later doesn't find the store that torchrun's agents share over all starts. "
            "Type export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on each node first, so that each start has its own"
        )
    if config.checkpoint.resume == "no":
        raise SlipstreamError(
            f"{setting} under torchrun, where a node that joins can't tell a first start from a later one: give "
            "--checkpoint.resume=last-good, which begins where there is no checkpoint yet"
        )
    if world_size < least:
        raise SlipstreamError(
            f"the launcher started {plural(world_size, 'process')}, fewer than {setting}; "
            f"start more, as by torchrun --nnodes=MIN:MAX with a larger MIN, or give --training.min_ranks={world_size}"
        )
    return mesh_of_processes(config, world_size)


def check_world_size(config: Config, environment: Mapping[str, str] = os.environ) -> None:
    """Raises SlipstreamError where the launcher started another number of processes than the run has ranks."""
    world_size = int(environment["WORLD_SIZE"])
    num_ranks = config.num_processes
    if world_size == num_ranks:
        return
    replicas = ""
    if world_size % num_ranks == 0:
        replicas = f", or --parallel.data={config.parallel.data * world_size // num_ranks} for replicas on the others"
    if num_ranks == config.pipeline.num_ranks:
        raise SlipstreamError(
            f"the launcher started {world_size} processes, but pipeline.num_ranks={num_ranks} needs {num_ranks}; use "
            f"torchrun --nproc-per-node={num_ranks} or --pipeline.num_ranks={world_size}{replicas}"
            + joining_hint(environment)
        )
    raise SlipstreamError(
        f"the launcher started {world_size} processes, but {config.mesh_text} need {num_ranks}; start {num_ranks} "
        f"processes{replicas}, or choose numbers whose product is {world_size}{joining_hint(environment)}"
    )


def _describe(config: Config) -> dict[str, str]:
    """Returns the versions, the device and the settings of this rank, which must be the same on all."""
    schedule = named_schedule(config.pipeline)
    texts = {f"contents of {config.pipeline.schedule}": str(schedule)} if isinstance(schedule, Schedule) else {}
    return launch.describe_process(config.model_dump(mode="json"), describe_device(config), texts)


def _prepare(
    config: Config, ranks: launch.ConnectedRanks, lock: FolderLock, progress: launch.Progress
) -> tuple[bool, Config]:
    """Lets rank 0 check the run, take its folder and write to it; returns whether nothing is left to train, and the
    configuration with what was decided for all ranks. Collective.

    Raises SlipstreamError on every rank if that fails, or if a rank doesn't see the folder.
    """
    world = RankGroup(dist.group.WORLD)
    folder = config.folder

    def prepared() -> tuple[bool, str, str, Memory]:
        about = [f"all ranks connected: {ranks}", sharing_here(config), ranks.describe_store()]
        progress.say("; ".join(filter(None, about)))
        inputs = preflight(config, progress)
        progress.say(describe_run(config))
        # A folder that an earlier run left on one node's own disk has another id.
        run_id = uuid.uuid4().hex
        if not inputs.is_finished:
            lock.take()
            inputs.write()
            lock.on_removal(inputs.write_again)
            folder.run_id.write_text(run_id)
        return inputs.is_finished, run_id, lock.key, inputs.config.memory

    is_finished, run_id, owner, memory = world.run_on_leader(prepared)
    config = config.model_copy(update={"memory": memory})
    if is_finished:
        return True, config
    blind = [rank for rank, sees in enumerate(world.gather(_appears(folder.run_id, run_id))) if not sees]
    if blind:
        raise SlipstreamError(
            f"{launch.name_ranks(blind, ranks.hosts)}: what rank 0 ({ranks.hosts[0]}) wrote to {folder.path} isn't "
            "there; name a training.output on a disk that all machines share"
        )
    if world.rank != 0:
        lock.join(owner, beats=False)
    return False, config


def _appears(file: Path, text: str) -> bool:
    """Returns whether the file has this text, now or within the time that a network's disk may need."""
    deadline = time.monotonic() + min(_SECONDS_TO_APPEAR, launch.time_limit(os.environ))
    while not (file.exists() and file.read_text() == text):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _init_process_group(config: Config, **connection: Any) -> torch.device:
    """Connects the ranks through gloo, and their GPUs through NCCL unless ranks share one and don't ask for it; returns
    this rank's device."""
    device = choose_device(config)
    backends = choose_backends(config)
    if "nccl" in backends:
        share_gpus_by_nccl(connection["rank"], count_local_ranks(config))
    dist.init_process_group(backends, timeout=NO_LIMIT, **connection)
    return device


def _train(config: Config, device: torch.device, stop: launch.StopRequest) -> None:
    go_on_in(config.folder.log)
    # transformers' bars would write over ours.
    disable_progress_bar()
    if config.model.trust_remote_code:
        trust_remote_code(str(config.model.path))
    rank = dist.get_rank()
    log_details(f"rank {rank}")
    _log.debug("process %d on %s, %s, threads: %d", os.getpid(), socket.gethostname(), device, torch.get_num_threads())
    torch.manual_seed(config.training.seed)
    progress = launch.Progress(make_console() if rank == 0 else None)
    run = RunContext.of(config, device, progress)
    with watchdog_paused("comparing meshes"):
        choose_mesh(run)
    progress.say("ranks are connected; building the model")
    with shortage_explained():
        with watchdog_paused("building the model", uses_disk=True):
            trainer = Trainer(run, stop)
        trainer.run()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Trains as one of the local ranks that `start_training` launches: `python -m ... config.yaml OWNER [SETTINGS]`."""
    outlast_readers()
    with launch.reported_to_the_launcher():
        stop = launch.StopRequest()
        stop.listen()
        config = load_config(Path(sys.argv[1]), sys.argv[3:])
        FolderLock(config.training.output, print).join(sys.argv[2], beats=os.environ["RANK"] == "0")
        with launch.watched_local_rank(config.training.stall_limit) as connection:
            _train(config, _init_process_group(config, **connection), stop)


if __name__ == "__main__":
    main()
