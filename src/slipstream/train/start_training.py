"""A whole run as the command line starts it: check, prepare, start the ranks, compare."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from slipstream.checkpoint import CheckpointFolder
from slipstream.errors import InterruptedRunError, RankFailedError
from slipstream.launch import (
    ForkServer,
    Progress,
    RegroupedError,
    fork_server,
    has_launcher,
    launch_ranks,
)
from slipstream.terminal import go_on_in, make_console
from slipstream.train.config import Config
from slipstream.train.device_choice import check_machine, choose_backends, describe_run, sharing_here
from slipstream.train.elastic_mesh import LocalPlaces, mesh_of_processes, mesh_settings
from slipstream.train.folder_lock import FolderLock
from slipstream.train.preflight import less_memory, memory_account, preflight
from slipstream.train.run_folder import RunFolder, read_lines
from slipstream.units import plural

_RUN_BY_RANKS = (
    "slipstream.train.training_rank",
    "slipstream.train.comparison",
    "transformers.models.auto.modeling_auto",
)


def start_training(config: Config) -> None:
    """Trains as configured: with local ranks that it starts, or as one rank under torchrun or srun.

    Raises:
        SlipstreamError: for bad input, before a rank is started.
        RankFailedError: if a rank ended early, after `training.max_restarts` more starts.
        StoppedRunError: if the ranks were asked to stop.
        InterruptedRunError: after Ctrl-C, where there is a checkpoint to go on from; KeyboardInterrupt where not.
    """
    if has_launcher():
        from slipstream.train.training_rank import join_run

        join_run(config)
        return
    progress = Progress(make_console())
    folder = config.folder
    num_ranks = config.num_processes
    for module in _RUN_BY_RANKS:
        import_module(module)
    # before anything below starts threads or looks for GPUs
    with fork_server() as server:
        check_machine(config)
        inputs = preflight(config, progress)
        if inputs.is_finished:
            return
        with FolderLock(folder.path, progress.warn) as lock, _said_how_to_go_on(inputs.config, inputs.model.config):
            inputs.write()
            lock.on_removal(inputs.write_again)
            go_on_in(folder.log)
            progress.say(describe_run(config))
            progress.say(
                f"starting {plural(num_ranks, 'rank')}"
                + ("" if server else ", which import torch and transformers first")
            )
            if sharing := sharing_here(config):
                way = "NCCL and sockets" if "nccl" in choose_backends(config) else "gloo and pinned host memory"
                progress.say(f"{sharing}: messages go through {way}")
            launch_with_restarts(config, lock, progress, server)
            if config.training.single_process_steps:
                _compare(folder, lock.key, progress, server)


@contextmanager
def _said_how_to_go_on(config: Config, model_config: Any) -> Iterator[None]:
    """Prints at the end, after Ctrl-C or a failure, how to go on, and from which checkpoint if there is one."""
    folder = config.folder
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
        # The error says by itself how to go on.
        if "--checkpoint.resume" in str(error):
            raise
        steps = CheckpointFolder(folder.checkpoints).steps()
        again = "Type the same command with --training.overwrite=true to begin again"
        account = partial(memory_account, config, model_config)
        if steps:
            again = f"Type the same command with --checkpoint.resume=last-good to go on from step {steps[0]}"
        raise RankFailedError(". ".join([str(error), *less_memory(str(error), config, account), again])) from error


def _compare(folder: RunFolder, owner: str, progress: Progress, server: ForkServer | None) -> None:
    from slipstream.train.comparison import compare, steps_of

    if not steps_of(folder):
        progress.say("no step of this start is in the metrics, so there is none to compare with one process")
        return
    with progress.waiting("measuring one process alone"):
        launch_ranks("slipstream.train.comparison", [str(folder.config), owner], 1, server)
    progress.say_result(compare(folder))


_RANK = "slipstream.train.training_rank"
_LONGEST_WAIT = 60.0  # seconds between a crash and the next start


def launch_with_restarts(
    config: Config,
    lock: FolderLock,
    progress: Progress,
    server: ForkServer | None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Runs the ranks of a run whose folder is locked, at most `training.max_restarts` times again after one has
    crashed, with a wait that doubles while the run gets no further.

    With `training.min_ranks` a process that was killed is lost: the run goes on with those that are left, however
    often, and is started again with more once lost ones are back.

    Raises:
        RankFailedError: if a step has failed twice, a rank has crashed once more than it is started again, or too few
            are left.
        SlipstreamError, NonFiniteError, StoppedRunError: of a rank; another start would end likewise.
    """
    folder = config.folder
    max_restarts = config.training.max_restarts
    failed_step = None
    places = LocalPlaces(folder, config.num_processes)
    resume = list[str]()
    restart = without_progress = 0
    while True:
        before = _contents(folder.metrics)
        there = places.there
        mesh = mesh_of_processes(config, len(there))
        used = there[: mesh.num_processes]
        settings = [] if mesh is config else mesh_settings(mesh)
        try:
            arguments = [str(folder.config), lock.key, *resume, *settings]
            launch_ranks(_RANK, arguments, used, server, partial(places.have_room_for_more, config, used))
            places.forget()
            return
        except RegroupedError:
            why, how = "processes that were lost are back", "restart in 0 s"
            wait = 0.0
        except RankFailedError as error:
            after = _contents(folder.metrics)
            last = max((int(line.get("step", 0)) for line in read_lines(folder.metrics)), default=0)
            step = None if after == before else last + 1  # None: a failure before the first step
            lost = [] if config.training.min_ranks is None else [used[rank] for rank in error.lost]
            restart += not lost
            if restart > max_restarts:
                raise
            if step is not None and step == failed_step:
                raise RankFailedError(
                    f"{error}; step {step} has failed twice, so the run is not started again"
                ) from None
            without_progress = 0 if step is not None and step > (failed_step or 0) else without_progress + 1
            failed_step = step or failed_step
            wait = min(_LONGEST_WAIT, 2.0**without_progress)
            why = str(error)
            how = f"restart in {wait:.0f} s" if lost else f"restart {restart} of {max_restarts} in {wait:.0f} s"
            if lost:
                places.lose(lost, why.splitlines()[-1])
                _check_enough(config, places, error)
        resume = ["--checkpoint.resume=last-good"]
        progress.warn(f"{why}\n{how}, from the last good checkpoint{_describe_mesh(config, places)}")
        sleep(wait)
        # Of a disk that fails the ranks will say more.
        with suppress(OSError):
            lock.make_again()


def _check_enough(config: Config, places: LocalPlaces, error: RankFailedError) -> None:
    num_there = len(places.there)
    least = config.training.min_ranks
    if num_there < (least or 0):
        are = "1 of {} processes is" if num_there == 1 else f"{num_there} of {{}} processes are"
        raise RankFailedError(
            f"{error}; {are.format(config.num_processes)} left, fewer than training.min_ranks={least}"
        ) from None


def _describe_mesh(config: Config, places: LocalPlaces) -> str:
    """Returns the end of a sentence about the processes of the next start, which are named where not all are used."""
    if config.training.min_ranks is None:
        return ""
    there = places.there
    num_processes = config.num_processes
    mesh = mesh_of_processes(config, len(there))
    idle = there[mesh.num_processes :]
    lost = [place for place in range(num_processes) if place not in there]
    parts = [f", with {mesh.num_processes} of {num_processes} processes as {mesh.mesh_text}"]
    if idle:
        parts.append(f"; {_named(idle)} without work")
    if lost:
        files = " ".join(str(places.file(place)) for place in lost)
        parts.append(f"; {_named(lost)} lost: once that is over, type rm {files}")
    return "".join(parts)


def _named(places: Sequence[int]) -> str:
    numbers = ", ".join(map(str, places))
    return f"process {numbers} is" if len(places) == 1 else f"processes {numbers} are"


def _contents(metrics: Path) -> bytes:
    return metrics.read_bytes() if metrics.exists() else b""
