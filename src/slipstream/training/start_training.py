"""A whole run as the command line starts it: check, prepare, start the ranks, compare."""

from __future__ import annotations

from slipstream.launch import Progress, has_launcher, launch_ranks, make_console
from slipstream.training.config import Config
from slipstream.training.device_choice import check_machine
from slipstream.training.preflight import preflight
from slipstream.training.restarts import launch_with_restarts
from slipstream.training.run_folder import RunFolder


def start_training(config: Config) -> None:
    """Trains as configured: with local ranks that it starts, or as one rank under torchrun or srun.

    Raises:
        SlipstreamError: for bad input, before a rank is started.
        RankFailedError: if a rank ended early, after `training.max_restarts` more starts.
        StoppedRunError: if the run was asked to stop.
    """
    if has_launcher():
        from slipstream.training.training_rank import join_run

        join_run(config)
        return
    progress, folder, num_ranks = Progress(make_console()), RunFolder(config.training.output), config.num_processes
    check_machine(config)
    preflight(config, progress).write()
    progress.say("starting 1 rank" if num_ranks == 1 else f"starting {num_ranks} ranks")
    launch_with_restarts(folder, num_ranks, config.training.max_restarts, progress)
    if config.training.single_process_steps:
        _compare(folder, progress)


def _compare(folder: RunFolder, progress: Progress) -> None:
    from slipstream.training.comparison import compare, steps_of

    if not steps_of(folder):
        progress.say("the run had already reached its last step, so there is none to compare with one process")
        return
    with progress.waiting("measuring one process alone"):
        launch_ranks(["-m", "slipstream.training.comparison", str(folder.config)], num_ranks=1)
    progress.say(compare(folder))
