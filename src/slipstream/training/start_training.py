"""A whole run from the command line's point of view: check, prepare, start the ranks, compare."""

from __future__ import annotations

from slipstream.launch import Progress, has_launcher, launch_ranks, make_console
from slipstream.training.config import Config
from slipstream.training.run_folder import RunFolder


def start_training(config: Config) -> None:
    """Trains as configured: with local ranks of its own, or as one rank under torchrun or srun.

    Raises SlipstreamError for bad input (nothing has started), RankFailedError where a rank ended early.
    """
    if has_launcher():
        from slipstream.training.training_rank import join

        join(config)
        return
    output = RunFolder(config.training.output)
    progress = Progress(make_console())
    _prepare(config, output, progress)
    num_ranks = config.num_processes
    progress.say("starting 1 rank" if num_ranks == 1 else f"starting {num_ranks} ranks")
    launch_ranks(["-m", "slipstream.training.training_rank", str(output.config)], num_ranks)
    if config.training.single_process_steps:
        _compare(output, progress)


def _compare(output: RunFolder, progress: Progress) -> None:
    from slipstream.training.comparison import compare, steps_of

    if not steps_of(output):
        progress.say("no step was left to take, so none to compare with one process")
        return
    with progress.waiting("measuring one process alone"):
        launch_ranks(["-m", "slipstream.training.comparison", str(output.config)], num_ranks=1)
    progress.say(compare(output))


def _prepare(config: Config, output: RunFolder, progress: Progress) -> None:
    """Checks and writes the inputs; on return their memory is free again."""
    from slipstream.training.preflight import preflight

    preflight(config, progress).write(output)
