"""`slipstream train`: trains and exports a model as a configuration says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from typer import Argument, Context

from slipstream.terminal import outlast_readers, shows


def train(
    context: Context, config: Annotated[Path, Argument(help="A YAML file; see the documentation for its settings.")]
) -> None:
    """Train a model as CONFIG says.

    Any setting can be given on the command line: --training.steps=100 --pipeline.slices=[128,256,640].
    Starts its own local processes, or joins those of torchrun or srun.
    """
    outlast_readers()
    if shows("info") and os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print("importing torch and transformers", flush=True)  # which takes seconds, and minutes on a busy disk
    from slipstream.training.config import load_config
    from slipstream.training.start_training import start_training

    start_training(load_config(config, context.args))
