"""A real bash, in which `slipstream --install-completion` has run, completes commands, options, values and files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.timeouts import LIMIT

# What bash does at a Tab: it gives the words to the function that `complete` named, and shows what this leaves.
TAB = """
function_of_slipstream=$(complete -p slipstream | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
for line in "$@"; do
    read -ra COMP_WORDS <<< "$line"
    [[ $line == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
    $function_of_slipstream slipstream
    echo "${COMPREPLY[*]}"
done
"""
EXPECTED = {
    "slipstream pr": "profile",
    "slipstream plan --seq": "--seq-len",
    "slipstream train config.yaml --q": "--quiet",
    "slipstream --log-level w": "warning",
    "slipstream train config.yaml --log-level ": "debug info warning error",
    "slipstream timeline zb-": "zb-h1 zb-h2 zb-v",
    "slipstream train conf": "",  # bash then completes files
}


def bash(home: Path, command: str, *arguments: str) -> str:
    """What an interactive bash of someone with this home writes."""
    place = {"HOME": str(home), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ended = subprocess.run(
        ["bash", "-i", "-c", command, "bash", *arguments],
        env=os.environ | place,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        start_new_session=True,  # no terminal, which an interactive shell would take over
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_after_the_installation(tmp_path: Path) -> None:
    bash(tmp_path, "slipstream --install-completion || exit; :")  # as its last command bash would become it
    assert "slipstream" in (tmp_path / ".bashrc").read_text()
    assert bash(tmp_path, TAB, *EXPECTED).splitlines() == [*EXPECTED.values()]
    kind = bash(tmp_path, "complete -p slipstream")
    assert "-o default" in kind  # files, where the command has no answer
