"""The option of subcommands that may take the best checkpoint of a run."""

from typing import Annotated

from typer import Option

Best = Annotated[
    bool,
    Option(
        "--best",
        help="Of a run with --checkpoint.keep_best=true: the checkpoint of its lowest validation loss.",
    ),
]
