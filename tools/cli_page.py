"""Writes docs/cli.md from the commands and their help texts: `python -m tools.cli_page`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
COMMAND = [sys.executable, "-m", "typer", "slipstream.cli", "utils", "docs", "--name", "slipstream"]
PREFACE = """\
Every command prints this with `-h`. `slipstream --install-completion` lets the shell that you type it in (bash, zsh,
fish or PowerShell) complete commands, options, names and files; open a new shell afterwards. `--quiet` and
`--log-level` may stand before or after a command's name, and colours follow NO_COLOR and FORCE_COLOR. Errors are one
message on standard error: what was given, what is allowed, what to type. The exit code is 2 for wrong input, 1 if a
rank or a check failed, 3 if numbers of a run aren't finite, 75 if TERM or USR1 asked a run to stop, and 130 after
Ctrl-C: see [Exit codes](restarts.md#exit-codes).
"""


def page() -> str:
    """Returns the page as the commands are now."""
    ended = subprocess.run(COMMAND, capture_output=True, text=True, check=True)
    _, _, commands = ended.stdout.partition("\n")
    return f"# Commands\n\n{PREFACE}{commands.rstrip()}\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
