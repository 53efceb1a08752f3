"""`slipstream init`: the first configuration of a model and data, with a plan for this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Context, Option

from slipstream.cli.model_options import TrustRemoteCode
from slipstream.cli.new_file import Overwrite, check_new_file
from slipstream.terminal import make_console


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

    What the rows of DATA are is found: text, conversations, prompts with completions, or pairs of answers. Any setting
    can be given as for `slipstream train`: --training.seq_len=4096.
    """
    check_new_file(output, "--output", overwrite)
    from slipstream.launch import Progress
    from slipstream.training.new_config import read_settings, write_config

    given = read_settings([*context.args, *(["model.trust_remote_code=true"] if remote_code else [])])
    progress = Progress(make_console())
    written = write_config(model, data, output, given, progress)
    output.write_text(written.text, encoding="utf-8")
    for line in written.lines:
        progress.say(line)
    progress.say_result(f"wrote {output}; to train: slipstream train {output}")
