"""What a run shows: on a terminal of 80 columns one line that moves, in a pipe lines without control characters."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import pty
import re
import select
import shutil
import struct
import termios
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from slipstream.cli import app
from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.terminal import LEVELS, LastingStream, Level, at_level, log_details, make_console, shows
from support.forked import COMMAND, ForkedProgram, slipstream_command
from support.tiny_training import tiny_llama

CONFIG = {
    "model": {"config": tiny_llama(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)},
    "pipeline": {"num_ranks": 1, "slices": 2},
    "runtime": {"self_check": False},
    "training": {"steps": 12, "seq_len": 32, "eval_every": 0},
}
FIGURES = ["loss 2.345", "12,345 tokens/s", "norm 1.23", "lr 0.0003", "MFU 41%", "idle 12%", "61.2 GB"]
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def _in_a_terminal(folder: Path, *arguments: str | Path) -> str:
    """Returns what `slipstream` writes to a terminal of 80 columns."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    for name in ("stdout", "stderr"):
        (folder / name).symlink_to(os.ttyname(follower))
    process = ForkedProgram(folder, COMMAND, *arguments)
    said = b""
    while process.returncode is None or select.select([leader], [], [], 0)[0]:
        if select.select([leader], [], [], 0.1)[0]:
            said += os.read(leader, 65536)
    for each in (leader, follower):
        os.close(each)
    assert process.returncode == 0, said.decode()
    return said.decode()


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What the same run says on a terminal and in a file."""
    folder = tmp_path_factory.mktemp("terminal")
    (folder / "book.txt").write_text("some words to learn from. " * 400)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(CONFIG | {"data": {"files": [str(folder / "book.txt")]}}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        shown = _in_a_terminal(folder, "train", config, f"--training.output={folder / 'shown'}")
    piped = slipstream_command("train", config, f"--training.output={folder / 'piped'}")
    assert piped.returncode == 0, piped.stderr
    return shown, piped.stdout + piped.stderr


@pytest.mark.more
def test_a_terminal_shows_a_line_that_fits(said: tuple[str, str]) -> None:
    bars = [part for part in re.split(r"[\r\n]+", _CONTROL.sub("", said[0])) if "left" in part]
    assert max(map(len, bars)) <= 80
    assert re.fullmatch(r"[━╺╸]+ 12/12  loss \d\.\d+  [\d,]+ tokens/s .*0:00:00 left", bars[-1].strip())
    assert "the first step is the slowest" in bars[0]
    lines = [_CONTROL.sub("", line) for line in said[0].splitlines()]
    assert any(re.match(r".*step 12/12: loss .*tokens/s.*idle", line) for line in lines)  # stays


@pytest.mark.more
def test_a_pipe_gets_lines_without_control_characters(said: tuple[str, str]) -> None:
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", said[1])
    assert sum(line.startswith("step ") for line in said[1].splitlines()) == 12


@pytest.mark.more
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


@pytest.mark.parametrize(
    ("level", "said"),
    [
        ("debug", ["found", "odd", "waiting", "training: 9", "step 1/9", "step 2/9", "result"]),
        ("info", ["found", "odd", "waiting", "training: 9", "step 1/9", "step 2/9", "result"]),
        ("warning", ["odd", "step 2/9", "result"]),
        ("error", ["step 2/9", "result"]),
    ],
)
def test_each_level_says_less(level: Level, said: list[str]) -> None:
    file = io.StringIO()
    with at_level(level):
        progress = Progress(Console(file=file, width=200))
        progress.say("found")
        progress.warn("odd")
        with progress.waiting("waiting"), progress.counting("waiting too", 1):
            pass
        with progress.training(9) as show:
            show(1, ["loss 2"])
            show(2, ["loss 1"])
        progress.say_result("result")
    lines = [line for line in file.getvalue().splitlines() if line != "waiting too"]
    assert len(lines) == len(said)
    assert all(line.startswith(words) for line, words in zip(lines, said, strict=True))


def test_a_terminal_shows_no_bar_where_it_is_to_be_quiet() -> None:
    file = io.StringIO()
    with at_level("warning"):
        progress = Progress(Console(file=file, force_terminal=True, highlight=False))
        with progress.waiting("waiting"), progress.counting("counting", 1), progress.training(9) as show:
            show(1, ["loss 2"])
    assert file.getvalue() == "step 1/9: loss 2\n"


def test_details_of_every_step_are_said_where_they_are_asked_for() -> None:
    file = io.StringIO()
    with at_level("debug"), Progress(Console(file=file, width=200)).training(1000) as show:
        for step in range(1, 5):
            show(step, ["loss 2"])
    lines = file.getvalue().splitlines()[1:]
    assert [line.partition("  ")[0] for line in lines] == [f"step {step}/1000: loss 2" for step in range(1, 5)]


def test_a_pipe_is_told_how_far_long_work_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, tokenising alone may take minutes."""
    file = io.StringIO()
    monkeypatch.setattr("slipstream.launch.progress._LONGEST_SILENCE", 0.05)
    with Progress(Console(file=file, width=200)).counting("tokenising", 400) as show:
        show(1)
        time.sleep(0.1)
        show(100)
        show(200)
        time.sleep(0.1)
        show(400)
    begin, quarter, end = file.getvalue().splitlines()
    assert (begin, end) == ("tokenising", "tokenising: 100%")
    assert re.fullmatch(r"tokenising: 25%  [\d.]+ seconds left", quarter)


def test_a_pipe_is_told_the_time_that_is_left() -> None:
    """It is that of the steps after the first, which is the slowest; there is none before one and at the end."""
    file = io.StringIO()
    with Progress(Console(file=file, width=200)).training(5, 1) as show:
        time.sleep(1)
        for step in range(2, 6):
            show(step, ["loss 2"])
            time.sleep(0.02)
    left = [
        re.fullmatch(r"step \d/5: loss 2(?:  (\d.\d) seconds left)?", line) for line in file.getvalue().splitlines()[1:]
    ]
    found = [None if match is None else match[1] for match in left]
    assert found[0] is found[-1] is None
    assert [float(seconds) < 1 for seconds in found[1:-1]] == [True, True]


def test_tables_in_a_pipe_have_no_blanks_at_the_ends_of_lines_and_are_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "of-a-long-name" / ("x" * 200)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba", "num_hidden_layers": 2}))
    for has_colours in (False, True):
        if has_colours:
            monkeypatch.setenv("FORCE_COLOR", "1")
        ended = slipstream_command("check", folder)
        assert ("\x1b[" in ended.stdout) == has_colours
        lines = [_CONTROL.sub("", line) for line in ended.stdout.splitlines()]
        assert len(lines) > 8
        assert [line for line in lines if line != line.rstrip()] == []
        (context,) = [line for line in lines if line.startswith("context parallelism")]
        assert re.search(r"  1 rank: layer 0 carries a state from token to token.*in order$", context)
        (experts,) = [line for line in lines if line.startswith("expert parallelism")]
        assert "ep=" not in experts
        assert "Leave it out" not in experts
        (tensor,) = [line for line in lines if line.startswith("tensor parallelism")]
        assert tensor.endswith("or train with tp=1.")  # a line of several hundred columns


def test_what_the_package_logs_is_said_by_its_rank_where_details_are(capsys: pytest.CaptureFixture[str]) -> None:
    for level in LEVELS:
        with at_level(level):
            log_details("rank 1")
            logging.getLogger("slipstream.train").debug("at level %s", level)
    assert capsys.readouterr().err == "debug: rank 1: at level debug\n"


def test_every_command_can_be_told_how_much_to_say() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert {"init", "train", "eval", "timeline"} <= commands.keys()
    for command in commands.values():
        assert {"quiet", "log_level"} <= {each.name for each in command.params}


@pytest.mark.parametrize(
    ("words", "is_quiet"),
    [
        (["runs", "nothing"], False),
        (["--quiet", "runs", "nothing"], True),
        (["runs", "nothing", "-q"], True),
        (["runs", "nothing", "--log-level=error"], True),
        (["--log-level=debug", "runs", "nothing", "--quiet"], True),
    ],
)
def test_it_can_be_told_before_and_after_the_commands_name(
    words: list[str], is_quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = []
    monkeypatch.setattr(
        "slipstream.extras.run_page.write_run_page", lambda *_: heard.append(shows("info")) or (Path(), 1)
    )
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.exception
    assert heard == [not is_quiet]
    assert shows("info")  # it holds for the command alone
    assert not shows("debug")


def test_two_answers_to_how_much_are_refused() -> None:
    result = CliRunner().invoke(app, ["runs", "nothing", "--quiet", "--log-level=debug"])
    assert isinstance(result.exception, SlipstreamError)
    assert "--quiet and --log-level=debug both set the log level" in str(result.exception)


def test_an_unknown_level_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_LOG_LEVEL", "warn")
    with pytest.raises(SlipstreamError, match=r"SLIPSTREAM_LOG_LEVEL=warn isn't a level; did you mean 'warning'\?"):
        shows("info")


@pytest.mark.parametrize(
    ("asked", "is_coloured"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)],
)
def test_a_pipe_has_colours_where_they_are_asked_for_and_no_bars(
    asked: dict[str, str], is_coloured: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm", **asked}.items():
        monkeypatch.setenv(name, value)
    console = make_console()
    console.print("words", style="red")
    with Progress(console).training(9) as show:
        show(1, ["loss 2"])
    said = capsys.readouterr().out
    assert ("\x1b[31m" in said) == is_coloured
    assert _CONTROL.sub("", said).splitlines() == [
        "words",
        "training: 9 steps, of which the first is the slowest",
        "step 1/9: loss 2",
    ]
    assert "\x1b[?25l" not in said  # the cursor stays


def test_what_nobody_reads_goes_on_in_a_file_that_is_made_again(tmp_path: Path) -> None:
    """Somebody removes the run's folder, which the run makes again; and a link there is not followed."""
    reader, writer = os.pipe()
    os.close(reader)
    file = tmp_path / "run" / "output.log"
    file.parent.mkdir()
    with os.fdopen(writer, "w") as raw:
        stream = LastingStream(raw)
        stream.go_on_in(file)
        for text in ("first\n", "lost\n", "third\n", "linked\n"):
            if text == "lost\n":
                shutil.rmtree(file.parent)
            elif text == "third\n":
                file.parent.mkdir()
            elif text == "linked\n":
                assert file.read_text() == "third\n"
                (tmp_path / "other").touch()
                file.unlink()
                file.symlink_to(tmp_path / "other")
            else:
                assert not file.exists()
            stream.write(text)
            stream.flush()
            assert file.exists() == (text != "lost\n")
    assert (tmp_path / "other").read_text() == ""
