"""Writes docs/cli.md from the commands and their help texts: `python -m tools.cli_page`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
COMMAND = [sys.executable, "-m", "typer", "slipstream.cli", "utils", "docs", "--name", "slipstream"]
PREFACE = """\
Every command prints this with `-h`. `slipstream --install-completion` lets bash, zsh, fish or PowerShell, whichever you
type it in, complete commands, options, the names of levels and schedules, and files; open a new shell then.
`--quiet` and `--log-level` stand before a command's name or after it, and colours follow NO_COLOR and FORCE_COLOR.
Errors are one message on standard error: what was given, what is allowed, what to type. The exit code is 2 for wrong
input, 1 where a rank failed or a check did, 3 where numbers of a run aren't finite, 75 where TERM or USR1 asked a run
to stop, and 130 after Ctrl-C: see [Exit codes](reliability.md#exit-codes).
"""


def page() -> str:
    """Returns the page as the commands are now."""
    ended = subprocess.run(COMMAND, capture_output=True, text=True, check=True)
    _, _, commands = ended.stdout.partition("\n")
    return f"# Commands\n\n{PREFACE}{commands.rstrip()}\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
