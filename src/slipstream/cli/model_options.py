"""The options of subcommands that open a model."""

from typing import Annotated

from typer import Option

Best = Annotated[
    bool,
    Option(
        "--best",
        help="Of a run with --checkpoint.keep_best=true: the checkpoint of its lowest validation loss.",
    ),
]

TrustRemoteCode = Annotated[
    bool,
    Option(
        "--trust-remote-code",
        help="Run Python code that comes with the model. It can do whatever you can: read it first.",
    ),
]
