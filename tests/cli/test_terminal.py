"""What a run shows: on a terminal of 80 columns one line that moves, in a pipe lines without control characters."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from slipstream.launch import Progress

CONFIG = {
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "vocab_size": 300,
            "max_position_embeddings": 64,
        }
    },
    "data": {"files": ["book.txt"]},
    "pipeline": {"num_ranks": 1, "slices": 2},
    "runtime": {"self_check": False},
    "training": {"steps": 12, "seq_len": 32, "eval_every": 0},
}
FIGURES = ["loss 2.345", "12,345 tokens/s", "norm 1.23", "lr 0.0003", "MFU 41%", "idle 12%", "61.2 GB"]
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def _in_a_terminal(command: list[str], folder: Path) -> str:
    """Returns what a command writes to a terminal of 80 columns."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    with subprocess.Popen(
        command, cwd=folder, stdout=follower, stderr=follower, stdin=follower, env=environment | {"TERM": "xterm"}
    ) as process:
        os.close(follower)
        said = b""
        while chunk := _read(leader):
            said += chunk
    os.close(leader)
    assert process.returncode == 0, said.decode()
    return said.decode()


def _read(leader: int) -> bytes:
    try:
        return os.read(leader, 65536)
    except OSError:  # Linux's end of a terminal
        return b""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What the same run says on a terminal and in a pipe, at the same time."""
    folder = tmp_path_factory.mktemp("terminal")
    (folder / "book.txt").write_text("some words to learn from. " * 400)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    train = [sys.executable, "-m", "slipstream", "train", "config.yaml"]
    with ThreadPoolExecutor() as pool:
        shown = pool.submit(_in_a_terminal, [*train, "--training.output=shown"], folder)
        piped = subprocess.run(
            [*train, "--training.output=piped"], cwd=folder, capture_output=True, text=True, timeout=300, check=False
        )
        assert piped.returncode == 0, piped.stderr
        return shown.result(), piped.stdout + piped.stderr


def test_a_terminal_shows_a_line_that_fits(said: tuple[str, str]) -> None:
    bars = [part for part in re.split(r"[\r\n]+", _CONTROL.sub("", said[0])) if "left" in part]
    assert max(map(len, bars)) <= 80
    assert re.fullmatch(r"[━╺╸]+ 12/12  loss \d\.\d+  [\d,]+ tokens/s .*0:00:00 left", bars[-1].strip())
    assert "the first step is the slowest" in bars[0]
    lines = [_CONTROL.sub("", line) for line in said[0].splitlines()]
    assert any(re.match(r".*step 12/12: loss .*tokens/s.*idle", line) for line in lines)  # stays


def test_a_pipe_gets_lines_without_control_characters(said: tuple[str, str]) -> None:
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", said[1])
    assert sum(line.startswith("step ") for line in said[1].splitlines()) == 12


def test_what_happens_before_the_first_step_is_said_in_order(said: tuple[str, str]) -> None:
    stages = ["importing torch", "reading text", "training a tokenizer", "tokenising", "starting 1 rank", "building"]
    stages += ["first is the slowest", "step 1/12"]
    for text, expected in ((said[0], stages[:-2]), (said[1], stages)):
        places = [text.find(stage) for stage in expected]
        assert -1 not in places, text
        assert places == sorted(places)


@pytest.mark.parametrize(
    ("width", "last"), [(80, "norm 1.23"), (68, "tokens/s"), (200, "61.2 GB")], ids=["80", "narrow", "wide"]
)
def test_a_figure_is_shown_whole_or_not_at_all(width: int, last: str) -> None:
    file = io.StringIO()
    with Progress(Console(file=file, force_terminal=True, width=width)).training(100_000, 99_000) as show:
        show(99_001, FIGURES)
    bars = [part for part in re.split(r"[\r\n]+", _CONTROL.sub("", file.getvalue())) if "left" in part]
    assert len(bars[-1]) <= width
    assert re.search(rf"{re.escape(last)} +-:--:-- left", bars[-1])


def test_a_long_run_in_a_pipe_says_its_first_step() -> None:
    """And not only the first of twenty parts, which may be hours away."""
    file = io.StringIO()
    with Progress(Console(file=file, width=200)).training(100_000) as show:
        for step in range(1, 4):
            show(step, FIGURES)
    assert file.getvalue().splitlines()[1:] == [f"step 1/100000: {'  '.join(FIGURES)}"]
