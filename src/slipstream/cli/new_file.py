"""The files that subcommands write: none replaces one that exists, unless that is asked for."""

from pathlib import Path
from typing import Annotated

from typer import Option

from slipstream.errors import SlipstreamError

Overwrite = Annotated[bool, Option("--overwrite", help="Replace files that exist.")]


def check_new_file(path: Path, option: str, overwrite: bool) -> None:
    """Checks that a file can be written.

    Raises:
        SlipstreamError: where its folder doesn't exist, or the file does and `overwrite` is False.
    """
    if not path.parent.is_dir():
        raise SlipstreamError(f"{option}={path}: there is no folder {path.parent}; create it first")
    if path.is_dir():
        raise SlipstreamError(f"{option}={path} is a folder; name a file in it")
    if path.exists() and not overwrite:
        raise SlipstreamError(f"{option}={path} exists; choose another file, or give --overwrite to replace it")
