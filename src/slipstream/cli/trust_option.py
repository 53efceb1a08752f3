"""The option of subcommands that may run a model's own code."""

from typing import Annotated

from typer import Option

TrustRemoteCode = Annotated[
    bool,
    Option(
        "--trust-remote-code",
        help="Run Python code that comes with the model. It can do whatever you can: read it first.",
    ),
]
