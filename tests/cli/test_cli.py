"""The `slipstream` command starts quickly, explains itself, and ends bad input with a message and exit code 2."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from slipstream.cli import app
from slipstream.train.config.config_values import parse_config
from slipstream.train.preflight import lone_rank_facts
from slipstream.version import __version__
from support.forked import slipstream_command
from support.parameters import first_of
from support.timeouts import LIMIT, SOON
from support.tiny_training import tiny_llama, tiny_training


def slipstream(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slipstream", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)


def test_help_is_quick() -> None:
    seconds = []  # of computing: how long others make it wait is no fault of its own
    for _ in range(2):
        before = os.times()
        result = slipstream("--help")
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
        assert result.returncode == 0
        assert "train" in result.stdout
    assert min(seconds) < 0.5


@pytest.mark.parametrize("command", ["train", "timeline", "check"])
def test_every_command_explains_itself(command: str) -> None:
    long, short = (CliRunner().invoke(app, [command, option]) for option in ("--help", "-h"))
    assert long.exit_code == 0
    assert "Usage" in long.stdout
    assert short.stdout == long.stdout


def test_the_version_is_that_of_the_package() -> None:
    result = slipstream("--version")
    assert (result.returncode, result.stdout) == (0, f"slipstream {__version__}\n")


FAILS_WITH_A_THREAD_LEFT = """
import threading
from slipstream import cli
from slipstream.errors import RankFailedError

def fail():
    threading.Thread(target=threading.Event().wait).start()  # which Python would join, before it takes all modules down
    print("the run's last line")
    raise RankFailedError("rank 1 was ended by SIGKILL")

cli.app = fail
cli.main()
"""


def test_after_a_failed_rank_the_command_waits_for_nothing() -> None:
    command = [sys.executable, "-c", FAILS_WITH_A_THREAD_LEFT]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SOON)
    said = "error: rank 1 was ended by SIGKILL\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "the run's last line\n", said)


@pytest.mark.parametrize(("soft", "hard"), first_of([(32, 32), (64, 4096), (64, 64), (128, 128)], 2))
def test_too_few_open_files_are_said_before_anything_is_imported(tmp_path: Path, soft: int, hard: int) -> None:
    """Where the shell alone is strict, the command takes what the system allows."""
    command = [sys.executable, "-m", "slipstream", "train", str(tmp_path / "missing.yaml")]
    limited = ["sh", "-c", f'ulimit -Sn {soft}; ulimit -Hn {hard}; exec "$@"', "sh", *command]
    ended = subprocess.run(limited, capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 2
    (said,) = ended.stderr.splitlines()
    if hard < 256:
        assert said.startswith(f"error: the limit of open files is {hard}, and a rank needs 256 for its files")
        assert "Type ulimit -n 4096 first, in a new shell if this one refuses that" in said
        assert "importing" not in ended.stdout
    else:
        assert "missing.yaml" in said


def test_bad_input_ends_with_its_message_and_code_2(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "model: {config: {model_type: llama}}\n"
        "data: {corpus: python-stdlib}\n"
        f"training: {{output: {tmp_path / 'output'}, steps: 1, seq_len: 8}}\n"
    )
    result = slipstream_command("train", config, "--training.stepz=3")
    assert result.returncode == 2
    assert result.stderr.splitlines() == ["error: unknown key training.stepz; did you mean 'training.steps'?"]
    result = slipstream_command("train", config, "--pipeline.num_ranks=64", "--pipeline.slices=2")
    assert result.returncode == 2
    assert result.stderr.startswith("error: pipeline.num_ranks=64 is more than the model's 32 layers")
    assert not (tmp_path / "output").exists()


def test_check_tells_whether_a_model_can_be_sliced(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    result = slipstream_command("check", tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    for expected in (
        r"0-31 +LlamaDecoderLayer +keys and values \(attention over the context store\)",
        r"stages +up to 32 of whole layers, 64 of half layers",
        r"tensor parallelism +1, 2, 4, 8, 16, 32 ranks",
        r"context parallelism +1, 2, 4, 8, 16, 32 ranks by heads for tokens, those of tp included; any number by keys",
        r"expert parallelism +1 rank: 'llama' has no experts that can be spread, whose weights a layer holds together$",
        r"tied weights +none",
        r"longest sequence +2,048 tokens",
        r"tokenizer +no tokenizer in .*: the folder has no tokenizer\.json",
        r"token slices +exact: largest relative difference .*e-1\d in outputs",
    ):
        assert any(re.search(expected, line) for line in lines), result.stdout


def test_check_says_what_one_rank_holds_and_what_to_type(tmp_path: Path) -> None:
    settings = tiny_training(1, 0)
    settings["data"] |= {"files": [str(tmp_path / "text.txt")]}
    settings["training"]["output"] = str(tmp_path / "run")

    def found(pipeline: dict[str, Any], **memory: Any) -> dict[str, str]:
        config = parse_config(settings | {"pipeline": pipeline, "memory": memory})
        return dict(lone_rank_facts(config, LlamaConfig(**tiny_llama())))

    alone = found({"num_ranks": 1})
    assert re.search(r"^8 slices of 8 tokens: by counted operations a step holds .*B, and this", alone["slices"])
    assert re.search(r"^[\d.]+ GB.*, [\d.]+ GB free$", alone["this machine"])
    assert "with memory.recompute=stage: by counted" in found({"num_ranks": 1}, limit=1.8e6)["slices"]
    given = found({"num_ranks": 1, "slices": 4}, limit=1.8e6)["slices"]
    assert re.search(r"^4 slices of 16 tokens: .*, but memory.limit is 1.80 MB. Give memory.recompute=stage, ", given)
    assert found({"num_ranks": 1}, recompute=3)["slices"] == "what memory.recompute=3 saves isn't counted"
    assert found({"num_ranks": 2}) == {}


def test_check_ends_with_1_and_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    result = slipstream_command("check", tmp_path)
    assert result.returncode == 1, result.stderr
    assert "refused: model_type 'bert' isn't causal" in result.stdout
    assert "Set is_decoder=True" in result.stdout
    assert "Traceback" not in result.stderr
