"""A whole run as the command line starts it: check, prepare, start the ranks, compare."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from slipstream.checkpoint import CheckpointFolder
from slipstream.errors import InterruptedRunError, RankFailedError
from slipstream.launch import ForkServer, Progress, ended_by_requests, fork_server, has_launcher, launch_ranks
from slipstream.terminal import go_on_in, make_console
from slipstream.training.config import Config
from slipstream.training.device_choice import check_machine, choose_backends, sharing_here
from slipstream.training.ownership import FolderLock
from slipstream.training.preflight import less_memory, memory_account, preflight
from slipstream.training.restarts import launch_with_restarts
from slipstream.training.run_folder import RunFolder

_RUN_BY_RANKS = (
    "slipstream.training.training_rank",
    "slipstream.training.comparison",
    "transformers.models.auto.modeling_auto",
)


def start_training(config: Config) -> None:
    """Trains as configured: with local ranks that it starts, or as one rank under torchrun or srun.

    Raises:
        SlipstreamError: for bad input, before a rank is started.
        RankFailedError: if a rank ended early, after `training.max_restarts` more starts.
        StoppedRunError: if the run was asked to stop.
        InterruptedRunError: after Ctrl-C, where there is a checkpoint to go on from; KeyboardInterrupt where not.
    """
    if has_launcher():
        from slipstream.training.training_rank import join_run

        join_run(config)
        return
    progress, folder, num_ranks = Progress(make_console()), RunFolder(config.training.output), config.num_processes
    for module in _RUN_BY_RANKS:
        import_module(module)
    with ended_by_requests(), fork_server() as server:  # before anything below starts threads or looks for GPUs
        check_machine(config)
        inputs = preflight(config, progress)
        if inputs.is_finished:
            return
        with FolderLock(folder.path, progress.warn) as lock, _said_how_to_go_on(config, inputs.model_config):
            inputs.write()
            go_on_in(folder.log)
            ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
            progress.say(f"starting {ranks}" + ("" if server else ", which import torch and transformers first"))
            if sharing := sharing_here(config):
                way = "NCCL and sockets" if "nccl" in choose_backends(config) else "gloo and pinned host memory"
                progress.say(f"{sharing}: messages go through {way}")
            launch_with_restarts(folder, lock.key, num_ranks, config.training.max_restarts, progress, server)
            if config.training.single_process_steps:
                _compare(folder, lock.key, progress, server)


@contextmanager
def _said_how_to_go_on(config: Config, model_config: Any) -> Iterator[None]:
    """Says last, after Ctrl-C and after a failure, what to type to go on: from which checkpoint, if there is one."""
    folder = RunFolder(config.training.output)
    try:
        yield
    except KeyboardInterrupt:
        steps = CheckpointFolder(folder.checkpoints).steps()
        if not steps:
            raise
        raise InterruptedRunError(
            f"the checkpoint of step {steps[0]} is in {folder.checkpoints}: to go on from it, type the same command "
            "with --checkpoint.resume=latest"
        ) from None
    except RankFailedError as error:
        if "--checkpoint.resume" in str(error):  # it says it by itself
            raise
        steps = CheckpointFolder(folder.checkpoints).steps()
        again = "Type the same command with --training.overwrite=true to begin again"
        account = partial(memory_account, config, model_config)
        if steps:
            again = f"Type the same command with --checkpoint.resume=last-good to go on from step {steps[0]}"
        raise RankFailedError(". ".join([str(error), *less_memory(str(error), config, account), again])) from error


def _compare(folder: RunFolder, owner: str, progress: Progress, server: ForkServer | None) -> None:
    from slipstream.training.comparison import compare, steps_of

    if not steps_of(folder):
        progress.say("no step of this start is in the metrics, so there is none to compare with one process")
        return
    with progress.waiting("measuring one process alone"):
        launch_ranks("slipstream.training.comparison", [str(folder.config), owner], 1, server)
    progress.say_result(compare(folder))
