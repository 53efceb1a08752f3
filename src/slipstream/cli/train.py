"""`slipstream init`, `train` and `runs`: a configuration, its training, and the page of a run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType
from typing import Annotated, Never

from typer import Argument, Context, Option

from slipstream.cli.options import Overwrite, TrustRemoteCode, check_new_file
from slipstream.errors import NOTHING_TO_SAVE, STOP_SIGNALS, SlipstreamError, StoppedRunError
from slipstream.terminal import fail, make_console, outlast_readers, shows

_LEAST_FILES, _ENOUGH_FILES = 256, 4096  # open files and connections, some for each rank and group


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


def _end_before_the_run(number: int, _frame: FrameType | None) -> Never:
    """Ends this process, which has no ranks and nothing to save."""
    fail(f"{signal.Signals(number).name} {NOTHING_TO_SAVE}", StoppedRunError.exit_code, at_once=True)


def train(
    context: Context, config: Annotated[Path, Argument(help="A YAML file; see the documentation for its settings.")]
) -> None:
    """Train a model as CONFIG says.

    Any setting can be given on the command line: --training.steps=100 --pipeline.slices=[128,256,640].
    Starts its own local processes, or joins those of torchrun or srun.
    """
    outlast_readers()
    allow_open_files()
    from slipstream.train.config import load_config

    settings = load_config(config, context.args)
    # Until the run takes the signals.
    handlers = {number: signal.signal(number, _end_before_the_run) for number in STOP_SIGNALS}
    try:
        if shows("info") and os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
            # Importing them takes seconds, and minutes on a busy disk.
            print("importing torch and transformers", flush=True)
        from slipstream.train.start_training import start_training

        start_training(settings)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def init(
    context: Context,
    model: Annotated[
        str, Argument(help="A model's folder, hub name, config.json, or a training configuration (.yaml).")
    ],
    data: Annotated[
        str,
        Argument(
            help="A text, a .jsonl, .json, .csv or .parquet table, a folder, a data set's hub name, or python-stdlib."
        ),
    ],
    output: Annotated[Path, Option(help="The file to write.")] = Path("config.yaml"),
    overwrite: Overwrite = False,
    remote_code: TrustRemoteCode = False,
) -> None:
    """Write a configuration that trains MODEL on DATA on this machine, with comments: for `slipstream train`.

    Finds out the kind of DATA's rows: text, conversations, prompts with completions, or pairs of answers. Any setting
    can be given as for `slipstream train`: --training.seq_len=4096.
    """
    check_new_file(output, "--output", overwrite)
    from slipstream.train.config import read_settings

    chosen = read_settings([*context.args, *(["model.trust_remote_code=true"] if remote_code else [])])
    from slipstream.extras.first_config import write_config
    from slipstream.launch import Progress

    progress = Progress(make_console())
    written = write_config(model, data, output, chosen, progress)
    output.write_text(written.text, encoding="utf-8")
    for line in written.lines:
        progress.say(line)
    progress.say_result(f"wrote {output}; to train: slipstream train {output}")


def runs(
    folder: Annotated[
        Path, Argument(help="The output folder of a run, which may still be going on, or a folder of runs.")
    ],
    output: Annotated[
        Path | None,
        Option(help="The file to write. Default: FOLDER/run.html, or FOLDER/runs.html for a folder of runs."),
    ] = None,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace the file even if it isn't a run page; run pages are always replaced.")
    ] = False,
) -> None:
    """Write an HTML page of the runs in FOLDER: curves, the last step, events, settings. It needs no network."""
    from slipstream.extras.run_page import write_run_page

    path, num_runs = write_run_page(folder, output, overwrite)
    print(f"wrote {path} ({num_runs} {'run' if num_runs == 1 else 'runs'})")
