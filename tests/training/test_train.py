"""`slipstream train` goes from text to an exported model, started by itself or by torchrun."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.checkpoint import CheckpointFolder
from slipstream.errors import printable
from slipstream.extras.run_page.run_record import read_run
from slipstream.extras.run_page.sections import run_sections
from slipstream.train.config import load_config
from slipstream.train.data import PackedSequences, TokenisedText, unigram_entropy
from slipstream.train.run_folder import RunFolder
from support.forked import COMMAND, ForkedProgram, launch, run_alone, slipstream_command
from support.parameters import first_of
from support.paths import WORKERS
from support.timeouts import LIMIT, SOON, wait_until
from support.tiny_training import exported_loss, metrics_of, steps_of, tiny_llama

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
TORCHRUN += ["-m", "slipstream", "train"]
LLAMA = tiny_llama(num_hidden_layers=2, num_attention_heads=2, initializer_range=0.1)
HYBRID = tiny_llama(
    model_type="qwen3_5_text",
    layer_types=["linear_attention", "full_attention"] * 2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    initializer_range=0.1,
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


@pytest.fixture
def output(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "output")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, str]:
    """A run that has ended well, and what it wrote on the terminal."""
    folder = tmp_path_factory.mktemp("finished")
    result = slipstream_command("train", write_config(folder), "--training.single_process_steps=2")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return RunFolder(folder / "output"), result.stdout


def write_config(folder: Path) -> Path:
    """A tiny run on two stages: three exports, two validations, a sample."""
    text = folder / "text"
    text.mkdir()
    for index in range(8):
        (text / f"{index}.txt").write_text(f"{index}: the quick brown fox jumps over the lazy dog. " * 40)
    values: dict[str, Any] = {
        "model": {"config": LLAMA},
        "data": {"files": [str(text)], "validation_fraction": 0.25},
        "pipeline": {"slices": [20, 30, 14], "num_microbatches": 2, "schedule": "1f1b"},
        "runtime": {"self_check": False},
        "optimizer": {"lr": 0.01, "warmup_steps": 2},
        "training": {
            "output": str(folder / "output"),
            "seq_len": 64,
            "batch_size": 3,
            "steps": 20,
            "eval_every": 10,
            "export_every": 8,
        },
        "sample": {"prompt": "the quick", "max_new_tokens": 8},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def run(command: list[str], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=LIMIT)


def train(num_ranks: int, config: Path, *changes: str) -> subprocess.CompletedProcess[str]:
    """As torchrun starts its ranks, only sooner."""
    return launch(num_ranks, COMMAND, "train", str(config), *changes)


def validations_of(output: RunFolder) -> list[dict[str, Any]]:
    return [line for line in metrics_of(output.path) if "perplexity" in line]


def numbers_of(output: RunFolder) -> list[int]:
    """The steps that a run has recorded."""
    return [line["step"] for line in steps_of(output.path)]


def test_from_text_to_an_exported_model(finished: tuple[RunFolder, str]) -> None:
    output, terminal = finished
    steps, validations = steps_of(output.path), validations_of(output)
    assert numbers_of(output) == list(range(1, 21))
    assert steps[0]["loss"] == pytest.approx(math.log(300), rel=0.2)
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    for step in steps:
        assert 0 < step["mfu"] < 1
        assert 0 < step["idle_fraction"] < 1
        assert step["tokens_per_second"] == pytest.approx(3 * 64 / step["step_seconds"])
        assert len(step["peak_memory"]) == 2
        assert all(2**26 < peak < 2**32 for peak in step["peak_memory"])
    assert [validation["step"] for validation in validations] == [10, 20]
    assert validations[1]["perplexity"] == pytest.approx(math.exp(validations[1]["validation_loss"]))
    entropy = unigram_entropy(TokenisedText.load(output.inputs, "validation").tokens)
    below = entropy - validations[1]["validation_loss"]
    assert f"{below:.2f} below the text's unigram entropy" in terminal

    assert sorted(path.name for path in output.path.glob("model*")) == ["model", "model-step-16", "model-step-8"]
    assert output.timeline.read_bytes().startswith(b"\x89PNG")
    events = json.loads(output.perfetto.read_text())["traceEvents"]
    assert {event["name"] for event in events} >= {"0F0.0", "0B1.2"}  # a training step, not a validation
    assert "the exported model continues 'the quick':\nthe quick" in terminal

    comparison = json.loads(output.comparison.read_text())
    best = min(comparison["one_process"].values())
    ratio = f"{best / comparison['seconds_per_step']:.2f}x the best single process"
    assert ratio in terminal.splitlines()[-1]


def test_the_export_has_the_trained_weights(finished: tuple[RunFolder, str]) -> None:
    """Its loss on the held-out text, by transformers alone, is the one that was measured."""
    output, _ = finished
    eos = AutoModelForCausalLM.from_pretrained(output.model).config.eos_token_id
    assert AutoTokenizer.from_pretrained(output.model).eos_token_id == eos
    text, seq_len = TokenisedText.load(output.inputs, "validation"), load_config(output.config).training.seq_len
    sequences = PackedSequences(text, seq_len, seed=None, pads=True)
    loss = exported_loss(output.path, sequences.batch(0, sequences.num_sequences))
    assert validations_of(output)[-1]["validation_loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("model", first_of([LLAMA, HYBRID]), ids=["llama", "hybrid"])
def test_a_sample_is_what_the_export_of_its_step_continues(
    config: Path, output: RunFolder, model: dict[str, Any]
) -> None:
    """In the log and on the run's page."""
    steps = ["--pipeline.slices=4", "--training.steps=5", "--training.export_every=2", "--training.eval_every=0"]
    sampled = ["--sample.every=2", "--sample.temperature=0", "--sample.max_new_tokens=12"]
    result = train(2, config, f"--model.config={json.dumps(model)}", *steps, *sampled)
    assert result.returncode == 0, result.stderr
    samples = [line for line in metrics_of(output.path) if "sample" in line]
    assert [line["step"] for line in samples] == [2, 4]
    for line in samples:
        folder = output.model_at(line["step"])
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        inputs = tokenizer("the quick", return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            written = model.generate(**inputs, max_new_tokens=12, do_sample=False, pad_token_id=0)[0]
        assert line["sample"] == tokenizer.decode(written, skip_special_tokens=True)
        assert f"step {line['step']}: the model continues 'the quick':\n{printable(line['sample'])}" in result.stdout
    assert samples[0]["sample"] != samples[1]["sample"]
    page = run_sections(read_run(output.path, "run"))
    assert "<h3>step 2</h3>" in page
    assert "<h3>step 4</h3>" in page


@pytest.mark.grid
def test_the_numbers_do_not_depend_on_how_it_is_started(
    finished: tuple[RunFolder, str], config: Path, output: RunFolder
) -> None:
    cut = "--pipeline.schedule=gpipe", "--pipeline.slices=2"
    result = run(TORCHRUN, config, "--sample.prompt=null", *cut, "--quiet")
    assert result.returncode == 0, result.stderr
    said = [line for line in result.stdout.splitlines() if not line.startswith("exported to ")]
    assert said[0].startswith("step 20/20: loss ")
    assert said[1].startswith("best validation loss")
    assert len(said) == 2
    assert result.stdout.count("exported to ") == 3
    check_same_losses(output, finished[0])


@pytest.mark.parametrize(
    ("pipeline", "slices"),
    [
        pytest.param({"num_ranks": 1, "slices": 1, "num_microbatches": 1}, "", marks=pytest.mark.more),
        pytest.param({"microbatches": [[2, [20, 30, 14]], [1, [40, 24]]]}, "slices: 3 2\n", marks=pytest.mark.grid),
    ],
    ids=["uncut", "microbatches that differ"],
)
def test_the_numbers_do_not_depend_on_how_it_is_cut(
    finished: tuple[RunFolder, str], config: Path, output: RunFolder, pipeline: dict[str, Any], slices: str
) -> None:
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"pipeline": pipeline}))
    result = train(pipeline.get("num_ranks", 2), config, "--sample.prompt=null")
    assert result.returncode == 0, result.stderr
    check_same_losses(output, finished[0])
    assert slices in output.schedule.read_text()


def check_same_losses(output: RunFolder, expected: RunFolder) -> None:
    losses, wanted = ([step["loss"] for step in steps_of(each.path)] for each in (output, expected))
    assert losses == pytest.approx(wanted, rel=1e-4)


@pytest.mark.grid
def test_bad_input_under_torchrun_ends_all_ranks(config: Path, output: RunFolder) -> None:
    result = run(TORCHRUN, config, "--data.files=[nowhere]")
    assert result.returncode != 0
    assert "there is no file or folder nowhere" in result.stderr
    assert not output.path.exists()


@pytest.mark.more
def test_a_loss_that_is_not_finite_stops_the_run(config: Path, output: RunFolder) -> None:
    """It has an exit code of its own. What fails twice in one step goes further back."""
    poisoned = ["--optimizer.lr=1e30", "--optimizer.clip_norm=null", "--checkpoint.every=1"]
    starts = [0, 1, 0]
    for number, started_after in enumerate(starts):
        resume = ["--checkpoint.resume=last-good"] if number else []
        result = train(1, config, "--pp=1", *poisoned, *resume)
        assert result.returncode == 3, result.stderr
        assert "lower optimizer.lr (now 1e+30)" in result.stderr.splitlines()[-1]
        assert ("resumed after step 1" in result.stdout) == (started_after == 1)
        assert ("only a checkpoint before step 1 is good" in result.stdout) == (number == 2)
    lines = [json.loads(line) for line in output.failures.read_text().splitlines()]
    assert lines == [{"step": 2, "started_after": started_after} for started_after in starts]


@pytest.mark.more
@pytest.mark.parametrize("policy", first_of(["rollback", None, "skip", "stop"], 2, "grid"))
def test_bad_steps_of_replicas(config: Path, output: RunFolder, policy: str | None) -> None:
    """They decide alike, with batches of four sequences and a checkpoint every four steps. By default nobody agrees on
    bad numbers: where there are any, nobody goes on."""
    replicas = ["--pipeline.num_ranks=1", "--parallel.data=2", "--training.batch_size=4"]
    settings = (
        [f"--training.bad_numbers={policy}", "--training.spike_factor=20", "--checkpoint.every=4"] if policy else []
    )
    more = ["--training.eval_every=0", "--training.export_every=0", "--sample.prompt=null", "--training.steps=18"]
    result = launch(2, WORKERS / "training/bad_numbers.py", "train", config, *replicas, *settings, *more)
    if policy is None:
        assert result.returncode == 3
        assert "the norm of its gradient nan" in result.stderr
        assert numbers_of(output) == [1, 2, 3, 4, 5]
        return
    if policy == "stop":
        assert result.returncode == 3
        assert "training.bad_numbers=skip or rollback goes on" in result.stderr
        return
    assert result.returncode == 0, result.stderr
    assert "2 steps did not update: 6, 16" in result.stdout
    steps = steps_of(output.path)
    done = {6: "rolled back to step 4", 16: "rolled back to step 12"} if policy == "rollback" else {}
    assert {step["step"]: step["bad"] for step in steps if "bad" in step} == {
        6: {"why": "not finite", "samples": [20, 24], "done": done.get(6, "skipped")},
        16: {"why": "spike", "samples": [60, 64], "done": done.get(16, "skipped")},
    }
    rates = {step["step"]: step["lr"] for step in steps}
    assert rates[7] == (rates[5] if policy == "rollback" else rates[6])  # as many updates before it
    assert numbers_of(output) == list(range(1, 19))


def test_the_last_validation_takes_the_place_of_one_right_before_it(config: Path, output: RunFolder) -> None:
    """Those of eight steps are after every third and the last one; of seven, the one after the sixth is left out. The
    lines in a pipe say how long a step takes, and how long those that are left will."""
    few = ["--training.eval_every=3", "--training.export_every=0", "--sample.prompt=null", "--checkpoint.every=0"]
    result = train(2, config, *few, "--training.steps=7")
    assert result.returncode == 0, result.stderr
    assert [line["step"] for line in validations_of(output)] == [3, 7]
    assert re.search(r"step 4/7: .* tokens/s  [\d.]+ m?s a step  .* [\d.]+ \w+ left$", result.stdout, re.MULTILINE)
    result = train(2, config, *few, "--training.steps=8", "--training.overwrite=true")
    assert result.returncode == 0, result.stderr
    assert [line["step"] for line in validations_of(output)] == [3, 6, 8]


def test_a_model_that_is_not_finite_is_not_exported(config: Path, output: RunFolder) -> None:
    """The loss of its last step was, but the update after it overflows."""
    poisoned = ["--optimizer.lr=3e37", "--optimizer.warmup_steps=0", "--optimizer.weight_decay=10"]
    large = [
        "--model.config.initializer_range=1.0",
        "--training.steps=1",
        "--training.eval_every=0",
        "--checkpoint.every=0",
    ]
    result = train(2, config, *poisoned, *large)
    assert result.returncode == 3, result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: the model is not exported: model.")
    assert not output.model.exists()


@contextmanager
def running(config: Path, *settings: str, command: str = "train") -> Iterator[ForkedProgram]:
    """A run of `slipstream train`, which ends with its ranks whatever happens: they would train for ever."""
    process = ForkedProgram(config.parent, COMMAND, command, config, *settings)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGINT)
            process.communicate()


def is_fork(process: psutil.Process) -> bool:
    """Whether a child of a launcher is neither the watchers' hub nor what removes its temporary folder."""
    return not any("watchdog" in part or "rm -rf" in part for part in process.cmdline())


def ranks_of(launcher: ForkedProgram) -> list[psutil.Process]:
    """Returns what the launcher's fork server has made, the one of its children that is no other program."""
    (server,) = (each for each in psutil.Process(launcher.pid).children() if is_fork(each))
    return server.children()  # type: ignore[no-any-return]


def wait_for_steps(output: RunFolder, number: int) -> None:
    file = output.metrics
    wait_until(lambda: file.exists() and file.read_text().count("\n") > number, "training didn't start")


@pytest.mark.more
def test_a_run_that_is_killed_while_it_starts_can_be_resumed(config: Path, output: RunFolder) -> None:
    settings = ["--training.steps=2", "--checkpoint.every=1", "--checkpoint.resume=latest", "--training.eval_every=0"]
    moment = ["launcher", "slipstream.train.preflight.run_inputs", "save_texts", "2"]
    killed = ForkedProgram(config.parent, WORKERS / "training/killed_at.py", *moment, "train", config, *settings)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert output.config.exists()
    assert not output.metrics.exists()
    resumed = train(2, config, *settings, "--sample.prompt=null")
    assert resumed.returncode == 0, resumed.stderr
    assert f"took over {output.path} from process {killed.pid}" in resumed.stdout
    assert numbers_of(output) == [1, 2]


@pytest.mark.grid
def test_a_full_disk_does_not_end_the_training(config: Path, output: RunFolder) -> None:
    """Only the trained model is missed at the end, which a resumed run would write."""
    settings = ["--training.steps=80", "--training.export_every=30", "--checkpoint.every=40"]
    result = launch(2, WORKERS / "training/small_disk.py", "full", "train", str(config), *settings)
    assert result.returncode == 1, result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(f"error: the trained model can't be written to {output.model}: ")
    assert last.endswith("Make room, and type the same command with --checkpoint.resume=latest")
    for what in ("metrics.jsonl can't be written", "model-step-30 can't be written", "step 40 was not saved"):
        assert what in result.stdout
    steps = numbers_of(output)
    assert steps == list(range(1, len(steps) + 1))
    assert not list(output.path.glob("model*"))


ON_HOST = ["--pp=1", "--memory.context=host", "--training.eval_every=0", "--training.export_every=0"]


@pytest.mark.more
def test_a_run_that_is_killed_with_its_context_on_the_host_goes_on(
    config: Path, output: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a backward, with files in the temporary folder, of which none is left."""
    files = tmp_path / "files"
    files.mkdir()
    monkeypatch.setenv("TMPDIR", str(files))
    settings = [*ON_HOST, "--training.steps=5", "--checkpoint.every=1", "--checkpoint.resume=latest"]
    moment = ["0", "slipstream.attention.store", "ContextStore.finish", "40"]
    killed = launch(1, WORKERS / "training/killed_at.py", *moment, "train", str(config), *settings)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = numbers_of(output)
    assert before
    assert not list(files.iterdir())
    resumed = train(1, config, *settings)
    assert resumed.returncode == 0, resumed.stderr
    assert before < numbers_of(output) == [1, 2, 3, 4, 5]


@pytest.mark.more
def test_a_context_for_which_the_disk_has_no_room_is_named(config: Path) -> None:
    settings = [*ON_HOST, "--training.batch_size=4", "--pipeline.slices=1", "--pipeline.num_microbatches=1"]
    result = launch(1, WORKERS / "training/small_disk.py", "full", "train", str(config), *settings)
    assert result.returncode == 2, result.stderr
    said = result.stderr.splitlines()[-1]
    assert re.match(r"error: memory.context=host: .* \(File too large\)\. Set TMPDIR", said)


# The command where /dev/shm is small and full.
SMALL_SHARED_MEMORY = """
import ctypes, subprocess, sys
from pathlib import Path
from slipstream.cli import main
NEW_MOUNTS = 0x00020000
mounts = "mount --make-rprivate / && mount -t tmpfs -o size=64k slipstream /dev/shm"
if ctypes.CDLL(None).unshare(NEW_MOUNTS) or subprocess.run(mounts, shell=True, capture_output=True).returncode:
    sys.exit("no namespace")
try:
    Path("/dev/shm/full").write_bytes(bytes(2**20))
except OSError:
    main()
"""


@pytest.mark.more
@pytest.mark.skipif(sys.platform != "linux", reason="has no namespaces")
def test_a_small_and_full_shared_memory_does_not_matter(config: Path, output: RunFolder) -> None:
    """As Docker's 64 MB may be full of what others left there."""
    (config.parent / "program.py").write_text(SMALL_SHARED_MEMORY)
    settings = "--training.steps=2", "--training.eval_every=0"
    ended = run_alone(config.parent / "program.py", "train", config, *settings)
    if ended.stderr == "no namespace\n":
        pytest.skip("needs mount namespaces")
    assert ended.returncode == 0, ended.stderr
    assert numbers_of(output) == [1, 2]


@pytest.mark.more
def test_a_run_that_is_killed_in_an_export_leaves_no_half_of_it(config: Path, output: RunFolder) -> None:
    settings = ["--pp=1", "--training.steps=2", "--training.eval_every=0", "--checkpoint.every=2"]
    killed = launch(1, WORKERS / "training/small_disk.py", "kill", "train", str(config), *settings)
    assert killed.returncode == -signal.SIGKILL
    assert not output.model.exists()
    resumed = train(1, config, *settings, "--checkpoint.resume=latest")
    assert resumed.returncode == 0, resumed.stderr
    assert [path.name for path in output.path.glob("model*")] == ["model"]
    assert AutoModelForCausalLM.from_pretrained(output.model) is not None


def wait_for_status(processes: list[psutil.Process], *wanted: str) -> None:
    wait_until(lambda: all(each.status() in wanted for each in processes), f"not all are {wanted}", SOON)


@pytest.mark.more
@pytest.mark.parametrize("how", first_of(["interrupt", "kill a rank"], 1, "grid"))
def test_a_run_that_is_stopped_leaves_nothing_behind(config: Path, output: RunFolder, how: str) -> None:
    """Before, it is stopped and continued, as its ranks and watchers are on a terminal; nobody else gets its folder."""
    settings = ["--training.steps=100000", "--training.eval_every=0", "--checkpoint.every=3"]
    with running(config, *settings) as process:
        wait_for_steps(output, 9)
        ranks = ranks_of(process)
        processes = [psutil.Process(process.pid), *ranks, *(watcher for rank in ranks for watcher in rank.children())]
        assert len(processes) == 5
        process.send_signal(signal.SIGTSTP)
        wait_for_status(processes, psutil.STATUS_STOPPED)
        process.send_signal(signal.SIGCONT)
        wait_for_status(processes, psutil.STATUS_RUNNING, psutil.STATUS_SLEEPING, psutil.STATUS_DISK_SLEEP)
        wait_for_steps(output, output.metrics.read_text().count("\n") + 5)
        # The launcher alone: its ranks are at work.
        process.send_signal(signal.SIGSTOP)
        second = slipstream_command("train", config, "--checkpoint.resume=latest")
        process.send_signal(signal.SIGCONT)
        assert second.returncode == 2
        assert f"output belongs to a run that is at work: process {process.pid} on host" in second.stderr
        assert f"Choose another folder, or end that run first: kill {process.pid} on" in second.stderr
        if how == "interrupt":
            process.send_signal(signal.SIGINT)
        else:
            os.kill(ranks[1].pid, signal.SIGKILL)
        _, errors = process.communicate(timeout=SOON)
        assert not [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]
    last = errors.strip().splitlines()[-1]
    if how == "interrupt":
        assert process.returncode == 130
        assert last.startswith("interrupted; all ranks have ended; the checkpoint of step ")
        assert last.endswith("to go on from it, type the same command with --checkpoint.resume=latest")
    else:
        assert process.returncode == 1
        assert last.startswith("error: rank ")
        assert re.search(rf"rank 1 \(.*, process {ranks[1].pid}\) has ended without a word.*in step \d+", errors)
        assert re.search(r"  rank 0 \(.*, process \d+\), (not )?waiting: in step \d+", errors)
        assert "Traceback" not in errors
        assert "memory" not in last  # of which Linux has ended nobody meanwhile
        assert "was ended by SIGKILL; the other ranks were stopped. Type the same command" in last
        assert re.search(r"with --checkpoint.resume=last-good to go on from step \d+$", last)


def helper(parent: psutil.Process, name: str) -> psutil.Process:
    """Returns the watcher that a rank has started, or the hub of a launcher, once it is there."""

    def find() -> psutil.Process | None:
        for child in parent.children():
            with suppress(psutil.Error):
                if child.cmdline()[-1:] == [f"slipstream.watchdog.{name}"]:
                    return child
        return None

    return wait_until(find, f"there is no {name}", SOON)


@pytest.mark.more
@pytest.mark.parametrize(
    ("command", "victim", "how"),
    [("train", 1, "kill"), ("profile", 1, "stop"), pytest.param("profile", 0, "kill", marks=pytest.mark.grid)],
)
def test_ends_while_costs_are_measured(
    config: Path, monkeypatch: pytest.MonkeyPatch, command: str, victim: int, how: str
) -> None:
    """A lost hub or watcher is named, and measuring goes on; a lost rank is named, and ends the command."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(config.parent))  # so that nothing is measured already
    monkeypatch.setenv("SLIPSTREAM_STALL_LIMIT", "3")
    settings = ["--repeats=100000", "--budget=1000", f"--output={config.parent / 'profile.json'}"]
    begins = "measuring the layers"
    if command == "train":
        settings, begins = (
            ["--training.steps=100000", "--pipeline.schedule=auto", "--pipeline.slices=auto"],
            "planning: ",
        )
    with running(config, *settings, command=command) as process:
        process.wait_for(begins)
        launcher = psutil.Process(process.pid)
        ranks = [each for each in launcher.children(recursive=True) if each.name().startswith("rank ")]
        ranks.sort(key=psutil.Process.name)
        lost = []
        for parent, name in [(launcher, "hub"), (ranks[0], "watcher")] if how == "kill" else []:
            lost.append(helper(parent, name))
            lost[-1].kill()
            process.wait_for(f"(process {lost[-1].pid}) was ended by SIGKILL; it is started again", on_stderr=True)
            assert helper(parent, name).pid != lost[-1].pid
        ranks[victim].send_signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        _, errors = process.communicate(timeout=SOON)
    assert process.returncode == 1
    last, other = errors.strip().splitlines()[-1], 1 - victim
    blamed = re.findall(
        rf"rank {victim} \(.*, process {ranks[victim].pid}\) has (ended without a word|been stopped)", errors
    )
    assert blamed
    assert not re.search(rf"rank {other} \(.*, process \d+\) (has|hangs)", errors)
    assert re.search(rf"  rank {other} \(.*, process {ranks[other].pid}\), (not )?waiting: ", errors)
    if how == "kill":
        assert last.startswith(f"error: rank {victim} was ended by SIGKILL; the other ranks were stopped")
    else:
        assert last.startswith(f"the ranks were stopped. rank {victim} ")
        assert "measuring what layers cost" in last
        assert "(the limit of a wait is 3 s: SLIPSTREAM_STALL_LIMIT)" in last
    assert not [each for each in ranks if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def signal_all(launcher: ForkedProgram, number: int) -> None:
    """Sends a signal to every process of a run, the parents first."""
    for process in (psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)):
        process.send_signal(number)


def wait_for_save(output: RunFolder, after: int) -> int:
    folder = CheckpointFolder(output.checkpoints)
    return wait_until(lambda: [step for step in folder.steps() if step > after], "nothing was saved")[0]


@pytest.mark.grid
def test_a_run_all_of_whose_processes_were_stopped_changes_nothing_once_it_has_lost_its_folder(
    config: Path, output: RunFolder
) -> None:
    """Another one takes the folder over, and has the state of an undisturbed run, to the bit."""
    settings = ["--training.eval_every=0", "--training.export_every=0", "--checkpoint.every=1", "--sample.prompt=null"]
    settings.append("--optimizer.schedule=constant")  # which doesn't depend on the number of steps
    with running(config, "--training.steps=100000", *settings) as first:
        wait_for_save(output, 2)
        signal_all(first, signal.SIGSTOP)
        stopped_after = wait_for_save(output, 2)
        (config.parent / "second").mkdir()
        second_config = Path(shutil.copy(config, config.parent / "second"))
        with running(second_config, "--checkpoint.resume=latest", "--training.steps=100000", *settings) as second:
            wait_for_save(output, stopped_after + 4)
            signal_all(first, signal.SIGCONT)
            _, errors = first.communicate(timeout=SOON)
            assert first.returncode == 1
            assert f"process {second.pid} on host" in errors
            assert "has taken over training.output=" in errors
            second.send_signal(signal.SIGTERM)
            said, errors = second.communicate(timeout=SOON)
        assert second.returncode == 75, errors
        assert f"took over {output.path} from process {first.pid}" in said
    last = CheckpointFolder(output.checkpoints).steps()[0]
    assert numbers_of(output) == list(range(1, last + 1))
    alone = RunFolder(config.parent / "alone")
    undisturbed = train(2, config, *settings, f"--training.steps={last}", f"--training.output={alone.path}")
    assert undisturbed.returncode == 0, undisturbed.stderr
    names = [f"step-{step:08}" for step in (last - 1, last)]
    for each in (output, alone):
        assert sorted(path.name for path in each.checkpoints.iterdir()) == names
        assert not list(each.path.glob("slipstream-run/*.part"))
    files = sorted((alone.checkpoints / names[1]).rglob("*.safetensors"))
    assert len(files) >= 2
    for file in files:
        assert (output.path / file.relative_to(alone.path)).read_bytes() == file.read_bytes()


@pytest.mark.more
def test_a_folder_that_is_removed_does_not_end_the_run(config: Path, output: RunFolder) -> None:
    """It is there again soon, and checkpoints in it, of which the last is the one that a request to stop asks for."""
    settings = ["--training.eval_every=0", "--training.export_every=7", "--checkpoint.every=2", "--sample.prompt=null"]
    with running(config, "--training.steps=100000", *settings) as process:
        wait_for_save(output, 9)
        while output.path.exists():
            shutil.rmtree(output.path, ignore_errors=True)
        wait_for_save(output, 9)
        process.send_signal(signal.SIGTERM)
        said, errors = process.communicate(timeout=SOON)
        assert process.returncode == 75, errors
    assert "Traceback" not in errors + said
    last = CheckpointFolder(output.checkpoints).steps()[0]
    assert numbers_of(output) == list(range(1, last + 1))  # those before too
    assert output.find_unlisted(adopts_checkpoints=False) is None
    assert f"SIGTERM ended the run after step {last}; it is saved in" in errors
    resumed = train(2, config, *settings, "--checkpoint.resume=latest", f"--training.steps={last + 1}")
    assert resumed.returncode == 0, resumed.stderr
    assert f"resumed after step {last}" in resumed.stdout
    assert AutoTokenizer.from_pretrained(output.model) is not None


@pytest.mark.more
@pytest.mark.parametrize("how", first_of(["reader", "full"], 1, "grid"))
def test_a_run_goes_on_whose_output_nobody_reads(config: Path, output: RunFolder, how: str) -> None:
    """As after `| head`, in a `tee` that dies, and in /dev/full; what it says is in the folder."""
    settings = ["--training.steps=3", "--training.eval_every=0", "--training.export_every=0"]
    stdout, stderr = config.parent / "stdout", config.parent / "stderr"
    if how == "reader":
        os.mkfifo(stdout)
        stderr.symlink_to(stdout)
    else:
        stdout.symlink_to("/dev/full")
        stderr.symlink_to("/dev/full")
    with running(config, *settings) as process:
        if how == "reader":
            with stdout.open() as reader:
                while line := reader.readline():
                    if "ranks are connected" in line:
                        break
                else:
                    pytest.fail("it ended before its ranks were connected")
        else:
            wait_for_steps(output, 0)
        for path in (stdout, stderr):
            path.unlink()
            path.touch()  # for what reads it when the run has ended
        process.communicate()
        assert process.returncode == 0
    assert numbers_of(output) == [1, 2, 3]
    said = output.log.read_text()
    assert f"exported to {output.model}" in said
    assert "the exported model continues" in said


STOPS_ITSELF = """
import functools, os, signal, sys
from transformers import LlamaModel
from slipstream.cli import main
from slipstream.train.preflight import all_checks

class Asked:
    def __init__(self, times):
        self.times = times
    def __call__(self, *_):
        self.times -= 1
        if self.times == 0:
            os.kill(os.getpid(), signal.SIGTERM)

def asks_before(function, ask, swallows=False):
    @functools.wraps(function)
    def asking(*arguments, **named):
        try:
            ask()
        except BaseException:
            if not swallows:
                raise
            raise ValueError("of the model")
        return function(*arguments, **named)
    return asking

how, times = sys.argv.pop(1), int(sys.argv.pop(1))
if how == "text":
    all_checks.prepare_text = asks_before(all_checks.prepare_text, Asked(times))
else:
    LlamaModel.forward = asks_before(LlamaModel.forward, Asked(times), swallows=how == "swallowed")
main()
"""


@pytest.mark.more
@pytest.mark.parametrize(
    ("how", "times"), first_of([("text", 1), ("swallowed", 9), ("model", 1), ("model", 9)], 2, "grid")
)
def test_a_request_to_stop_in_the_preflight_is_answered_like_others(
    config: Path, output: RunFolder, how: str, times: int
) -> None:
    """While the text is tokenised, and in the calls of a toy of the model, whose errors are caught."""
    script = config.with_name("stops.py")
    script.write_text(STOPS_ITSELF)
    ended = run_alone(script, how, str(times), "train", config, "--runtime.self_check=true")
    assert ended.returncode == 75, ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert last == "SIGTERM ended the run while no rank was training; there is nothing new to save"
    assert not output.path.exists()


@pytest.mark.more
def test_a_run_that_is_asked_to_stop_saves_its_step(config: Path, output: RunFolder) -> None:
    """With no checkpoints otherwise."""
    with running(config, "--training.steps=100000", "--training.eval_every=0", "--training.export_every=0") as process:
        wait_for_steps(output, 5)
        ranks = ranks_of(process)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=SOON)
    assert process.returncode == 75
    step = numbers_of(output)[-1]
    folder = output.checkpoints / f"step-{step:08}"
    assert errors.strip().splitlines()[-1] == (
        f"SIGTERM ended the run after step {step}; it is saved in {folder}: go on from there with "
        "--checkpoint.resume=latest"
    )
    assert CheckpointFolder(output.checkpoints).steps() == [step]
    assert not [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.more
def test_a_run_is_started_again_after_a_crash(config: Path, output: RunFolder) -> None:
    settings = ["--training.max_restarts=1", "--checkpoint.every=5", "--training.steps=30", "--sample.prompt=null"]
    settings += ["--training.eval_every=0", "--training.export_every=0"]
    ended = run_alone(WORKERS / "training/killed_once.py", "13", "train", config, *settings)
    assert ended.returncode == 0, ended.stderr
    assert "was ended by SIGKILL; the other ranks were stopped\nrestart 1 of 1 in 1 s, from the last" in ended.stdout
    assert re.search(r"resumed after step (5|10)\b", ended.stdout)  # it may not have been complete before the crash
    saves = {line["step"]: line for line in metrics_of(output.path) if "save_seconds" in line}
    assert [*saves][-4:] == [15, 20, 25, 30]
    assert all(save["save_seconds"] > 0 and save["checkpoint_bytes"] > 2**18 for save in saves.values())
    assert numbers_of(output) == list(range(1, 31))


def test_a_run_is_started_again_whose_folder_was_removed(
    config: Path, output: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its first step, as its checkpoints are gone."""
    monkeypatch.setenv("REMOVED", "1")
    settings = ["--training.max_restarts=1", "--checkpoint.every=1", "--training.steps=3", "--sample.prompt=null"]
    settings += ["--training.eval_every=0", "--training.export_every=0"]
    ended = run_alone(WORKERS / "training/killed_once.py", "3", "train", config, *settings)
    assert ended.returncode == 0, ended.stderr
    assert "checkpoint.resume=last-good: there is no checkpoint, so step 1 is the first" in ended.stdout
    assert numbers_of(output) == [1, 2, 3]
    assert CheckpointFolder(output.checkpoints).steps() == [3, 2]
    assert AutoTokenizer.from_pretrained(output.model) is not None
    assert output.find_unlisted(adopts_checkpoints=False) is None
