"""`slipstream train`: trains and exports a model as a configuration says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from typer import Argument, Context

from slipstream.errors import SlipstreamError
from slipstream.terminal import outlast_readers, shows

_LEAST_FILES, _ENOUGH_FILES = 256, 4096  # and connections: some for each rank and group


def allow_open_files() -> None:
    """Lets this process, and the ranks that it starts, have as many files open as the system allows it, up to enough.

    Raises:
        SlipstreamError: where that is too few.
    """
    import resource

    soft, hard = (
        _ENOUGH_FILES if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    allowed = max(soft, min(hard, _ENOUGH_FILES))
    if allowed < _LEAST_FILES:
        raise SlipstreamError(
            f"the limit of open files is {allowed}, and a rank needs {_LEAST_FILES} for its files and connections. "
            f"Type ulimit -n {_ENOUGH_FILES} first, in a new shell if this one refuses that"
        )
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def train(
    context: Context, config: Annotated[Path, Argument(help="A YAML file; see the documentation for its settings.")]
) -> None:
    """Train a model as CONFIG says.

    Any setting can be given on the command line: --training.steps=100 --pipeline.slices=[128,256,640].
    Starts its own local processes, or joins those of torchrun or srun.
    """
    outlast_readers()
    allow_open_files()
    if shows("info") and os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print("importing torch and transformers", flush=True)  # which takes seconds, and minutes on a busy disk
    from slipstream.training.config import load_config
    from slipstream.training.start_training import start_training

    start_training(load_config(config, context.args))
