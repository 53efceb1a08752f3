"""A run that loses processes goes on with what is left, as if it had been stopped and resumed by hand on its meshes."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml

from slipstream.errors import SlipstreamError
from slipstream.options import Memory
from slipstream.train.config import Config, ParallelSection, TrainingSection, parse_config
from slipstream.train.data import TokenisedText, sequences_of
from slipstream.train.elastic_mesh import mesh_of_processes, with_mesh_of
from slipstream.train.model_files import load_model_config
from slipstream.train.preflight import simulated_ratio
from slipstream.train.preflight.optimizer_check import check_optimizer
from slipstream.train.preflight.smaller_meshes import check_smaller_meshes
from slipstream.train.run_folder import RunFolder
from slipstream.train.training_rank import mesh_of_those_there
from support.forked import ForkedProgram
from support.paths import ROOT, TESTS, WORKERS, with_path
from support.timeouts import LIMIT, wait_until
from support.tiny_training import half_of, tiny_training

HELD_AT = WORKERS / "training/held_at.py"
# Each round has two starts and two runs by hand, of which a busy machine takes minutes.
ROUNDS = [
    pytest.param(1, marks=[pytest.mark.more, pytest.mark.timeout(1800)]),
    pytest.param(5, marks=[pytest.mark.grid, pytest.mark.timeout(7200)]),
]
MESHES: list[tuple[dict[str, Any], list[str]]] = [
    # settings, and of 8 processes, 7, ..., as many as there are entries: stages x replicas x ranks that share layers
    ({"num_ranks": 2, "data": 4}, ["2x4x1", "2x3x1", "2x3x1", "2x2x1", "2x2x1", "2x1x1", "2x1x1", "1x1x1"]),
    ({"num_ranks": 8}, ["8x1x1", *["4x1x1"] * 4, *["2x1x1"] * 2, "1x1x1"]),
    ({"num_ranks": 6}, ["6x1x1", "6x1x1", "6x1x1", *["3x1x1"] * 3, "2x1x1", "1x1x1"]),
    ({"num_ranks": 2, "data": 2, "tensor": 2}, ["2x2x2", *["2x1x2"] * 4, *["1x1x2"] * 2, "process forms no mesh"]),
    ({"num_ranks": 2, "data": 4, "partition": [1, 7]}, [*[""] * 6, "2x1x1", "partition=.* names 2 stages"]),
    (
        {"num_ranks": 2, "data": 2, "microbatches": [[2, [64]], [2, [64]]]},
        [*[""] * 4, "2x2x1", "1x2x1", "1x2x1", "pipeline.microbatches"],
    ),
]


def configured(output: Path = Path("nowhere"), **settings: Any) -> Config:
    """Two stages of eight layers, with rows of one microbatch each, and what is given by the section that has it."""
    values = tiny_training(4, 2, num_hidden_layers=8)
    values["data"]["corpus"] = "python-stdlib"
    values["parallel"], values["optimizer"], values["memory"] = {}, {}, {}
    values["training"] |= {"output": str(output), "batch_size": 8}
    if "microbatches" in settings:
        del values["pipeline"]["slices"]
    for name, value in settings.items():
        sections = (each for each in ("parallel", "memory", "training") if name in SECTIONS[each].model_fields)
        values["optimizer" if name == "name" else next(sections, "pipeline")][name] = value
    return parse_config(values)


SECTIONS = {"parallel": ParallelSection, "memory": Memory, "training": TrainingSection}


def held(rounds: int) -> str:
    """In each round of 16 steps, four ranks wait before the eighth, and two before the twelfth."""
    return ",".join(f"4:{16 * number + 8},2:{16 * number + 12}" for number in range(rounds))


def write_config(folder: Path, rounds: int, **checkpoint: Any) -> Path:
    """Two stages in two replicas, with rows of one microbatch each; every second step is saved."""
    folder.mkdir()
    text = folder / "text.txt"
    text.write_text(" ".join(f"{n} is {n * n % 97} more than {n % 13}." for n in range(2000)))
    values = tiny_training(16 * rounds, 2)
    values["data"]["files"] = [str(text)]
    values["parallel"] = {"data": 2}
    values["pipeline"]["num_microbatches"] = 2
    values["training"] |= {"output": str(folder / "run"), "min_ranks": 2, "stall_limit": LIMIT}
    values["checkpoint"] |= {"keep_every": 2, **checkpoint}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def lines_of(output: RunFolder) -> list[dict[str, Any]]:
    """The lines of the metrics that are whole."""
    text = output.metrics.read_bytes() if output.metrics.exists() else b""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"}\n")]


def steps_of(output: RunFolder) -> list[int]:
    return [line["step"] for line in lines_of(output) if "loss" in line]


def wait_for_step(output: RunFolder, step: int, process: ForkedProgram | subprocess.Popen[bytes]) -> None:
    """Waits until a step is the last of a run that goes on."""

    def is_there() -> bool:
        code = process.returncode if isinstance(process, ForkedProgram) else process.poll()
        assert code is None, "it has ended"
        return max(steps_of(output), default=0) == step

    wait_until(is_there, "waited in vain")


def rank_of(process: ForkedProgram, rank: int) -> psutil.Process:
    return next(each for each in psutil.Process(process.pid).children(recursive=True) if each.name() == f"rank {rank}")


@pytest.mark.parametrize(("settings", "wanted"), MESHES)
def test_replicas_go_first(settings: dict[str, Any], wanted: list[str]) -> None:
    config = configured(min_ranks=1, **settings)
    for number, size in zip(range(8, 0, -1), wanted, strict=False):
        if " " in size or "." in size:
            with pytest.raises(SlipstreamError, match=size):
                mesh_of_processes(config, number)
        elif size:
            mesh = mesh_of_processes(config, number)
            assert f"{mesh.pipeline.num_ranks}x{mesh.parallel.data}x{mesh.parallel.tensor}" == size


def test_microbatches_keep_their_rows() -> None:
    config = configured(data=4, num_microbatches=2, min_ranks=2)  # two rows, of one microbatch each
    found = [mesh_of_processes(config, number).pipeline.num_microbatches for number in (8, 6, 4, 2, 1)]
    assert found == [2, 2, 4, 8, 8]  # of three replicas, two have three rows and one has two
    assert mesh_of_processes(configured(data=4, min_ranks=2), 2).pipeline.num_microbatches == 4  # of two rows each
    flushed = configured(data=4, num_microbatches=2, num_flushes=2, min_ranks=2)
    assert mesh_of_processes(flushed, 2).pipeline.num_microbatches == 8


def test_a_step_of_the_mesh_before_is_compared_where_the_planner_knows_it() -> None:
    config = configured()
    settings = {"settings": {"pipeline": {"num_microbatches": 1}}}
    shared = with_mesh_of(config, settings | {"mesh": {"pp": 1, "dp": 2, "cp": 2, "tp": 1, "ep": 2}})
    assert (shared.parallel.context, shared.parallel.experts, shared.num_processes) == (2, 2, 4)
    model_config = load_model_config(config.model)
    assert simulated_ratio(shared, config, model_config) is None  # it has no experts
    for mesh, share in (({"pp": 1}, 1), ({"pp": 1, "dp": 8}, 8), ({"pp": 2, "dp": 2}, 2)):
        ratio = simulated_ratio(with_mesh_of(config, settings | {"mesh": mesh}), config, model_config)
        assert ratio is not None
        # Two stages of equal operations take half as long, but for the first slice and the last ones' head.
        assert ratio == pytest.approx((0.62 if mesh["pp"] == 1 else 1) * share, rel=0.01)
    cut = with_mesh_of(config, settings | {"mesh": {"pp": 1, "dp": 1, "cp": 2, "tp": 1}})
    assert simulated_ratio(cut, config, model_config) is None  # whose exchanges take a time that no count tells


def test_each_row_has_one_replica() -> None:
    sequences = sequences_of([TokenisedText.join([np.arange(640, dtype=np.int32)])], "fixed", 8, seed=1)
    for size, replicas in ((8, 3), (7, 4), (5, 5), (12, 4)):
        shares = [sequences.share(16, size, replica, replicas) for replica in range(replicas)]
        assert [index for share in shares for index in share] == list(range(16, 16 + size))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "more than there are": ({"data": 2, "min_ranks": 5}, r"min_ranks=5 is more than the 4 processes of --pp=2 --dp=2"),
    "given layers": ({"data": 2, "partition": [4, 4], "min_ranks": 1}, r"would do is 2: give --training.min_ranks=2"),
    "ranks that share layers": ({"tensor": 2, "data": 2, "min_ranks": 1}, r"with 1 of 8 .* would do is 2"),
    "optimizer": ({"name": "adafactor", "shard": "optimizer", "data": 2, "min_ranks": 2}, "shard=optimizer"),
    "parts": ({"name": "adafactor", "shard": "optimizer", "context": 2}, "shard=optimizer"),
    "weights": ({"num_ranks": 4, "limit": 2.5e5, "min_ranks": 1}, "would do is 4: give --training.min_ranks=4"),
    "activations": ({"num_ranks": 4, "limit": 1.5e6, "min_ranks": 1}, "the fullest rank of .* would hold"),
    "routers": ({"data": 4, "router_loss": "per_layer", "min_ranks": 2}, "depends on the microbatches"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_could_not_go_on_is_refused_at_the_first_start(tmp_path: Path, case: str) -> None:
    settings, reason = REFUSED[case]
    config = configured(tmp_path, **settings)
    check = check_optimizer if "name" in settings else check_smaller_meshes
    with pytest.raises(SlipstreamError, match=reason):
        check(config, load_model_config(config.model))


ELASTIC = {"TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_USE_AGENT_STORE": "False", "WORLD_SIZE": "3", "RANK": "0"}
LAUNCHERS: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "srun": ({"SLURM_PROCID": "0", "WORLD_SIZE": "4"}, {}, "srun starts a fixed number of processes"),
    "another one": ({"WORLD_SIZE": "4"}, {}, "this launcher starts a fixed number"),
    "one store": (
        ELASTIC | {"TORCHELASTIC_USE_AGENT_STORE": "True"},
        {},
        "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
    ),
    "no resuming": (ELASTIC, {"resume": "no"}, "give --checkpoint.resume=last-good"),
    "too few": (ELASTIC | {"WORLD_SIZE": "1"}, {}, "started 1 process, fewer than training.min_ranks=2; .*=1$"),
}


@pytest.mark.parametrize("case", LAUNCHERS)
def test_a_launcher_that_could_not_go_on_is_refused(case: str) -> None:
    environment, checkpoint, reason = LAUNCHERS[case]
    config = configured(data=2, min_ranks=2)
    config = config.model_copy(
        update={"checkpoint": config.checkpoint.model_copy(update={"resume": "last-good"} | checkpoint)}
    )
    with pytest.raises(SlipstreamError, match=reason):
        mesh_of_those_there(config, environment)


def test_torchrun_says_how_many_there_are() -> None:
    config = configured(data=2, min_ranks=2)
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": "last-good"})})
    found = mesh_of_those_there(config, ELASTIC)
    assert found.mesh_text == "--pp=2 --dp=1 --tp=1"
    assert mesh_of_those_there(config, ELASTIC | {"WORLD_SIZE": "6"}) is config


@contextmanager
def running(folder: Path, held: str, *arguments: str | Path) -> Iterator[ForkedProgram]:
    """The command with ranks of its own, which end with it whatever happens."""
    folder.mkdir(exist_ok=True)
    process = ForkedProgram(folder, HELD_AT, held, "train", *arguments)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            process.communicate()


@pytest.mark.parametrize("rounds", ROUNDS)
def test_processes_are_lost_and_come_back(tmp_path: Path, rounds: int) -> None:
    """Under our own launcher: one of them, then two at once, and so on by turns."""
    config = write_config(tmp_path / "run", rounds)
    output = RunFolder(config.parent / "run")
    with running(tmp_path / "terminal", held(rounds), config) as process:
        for number in range(rounds):
            wait_for_step(output, 16 * number + 7, process)
            lost = [1, 2][: number % 2 + 1]
            for rank in [rank_of(process, each) for each in lost]:
                rank.kill()
            wait_for_step(output, 16 * number + 11, process)
            for place in lost:
                assert "was ended by SIGKILL" in (output.lost / str(place)).read_text()
                (output.lost / str(place)).unlink()
        text, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "with 2 of 4 processes as --pp=2 --dp=1 --tp=1; process 3 is without work; process 1 is lost" in text
    assert re.search(r"^  mesh +pp 2 x dp 2 x tp 1  pp 2 x dp 1 x tp 1$", text, re.MULTILINE)
    assert re.search(r"^  rows of a replica +2 +4$", text, re.MULTILINE)
    assert re.search(r"^  seconds of a step +[\d.e-]+, measured +[\d.e-]+, predicted$", text, re.MULTILINE)
    assert not output.lost.exists()
    check(config, output, rounds)


def check(config: Path, output: RunFolder, rounds: int) -> None:
    """Checks that every step is there once, what the records say, and the weights."""
    assert steps_of(output) == list(range(1, 16 * rounds + 1))
    lines = lines_of(output)
    starts = [line for line in lines if "started_after" in line]
    assert [start["mesh"]["dp"] for start in starts] == [2, *[1, 2] * rounds]
    phases = [(start["started_after"], start["mesh"]["dp"]) for start in starts]
    for number, (smaller, larger) in enumerate(zip(starts[1::2], starts[2::2], strict=True)):
        # The checkpoint of the step before may not have been complete.
        assert smaller["started_after"] in (16 * number + 4, 16 * number + 6)
        assert smaller["repeated_steps"] == 16 * number + 7 - smaller["started_after"]
        assert (larger["started_after"], larger["repeated_steps"]) == (16 * number + 12, 0)  # asked before it ended
    assert len([line for line in lines if "change_seconds" in line]) == 2 * rounds
    by_hand = RunFolder(half_of(output.path, config.parent / "by_hand", step=phases[1][0]))
    assert (output.model / "model.safetensors").read_bytes() == run_by_hand(config, by_hand, phases[1:])


def run_by_hand(config: Path, output: RunFolder, phases: list[tuple[int, int]]) -> bytes:
    """The weights of a run that is resumed after these steps, each time with so many replicas, and stopped before the
    next."""
    for number, (after, replicas) in enumerate(phases):
        settings = [f"--training.output={output.path}", "--training.min_ranks=null", f"--dp={replicas}"]
        settings += [f"--pipeline.num_microbatches={4 // replicas}"]
        settings += [f"--checkpoint.resume={after}"]
        end = phases[number + 1][0] if number + 1 < len(phases) else None
        waits = "0:0" if end is None else f"{2 * replicas}:{end}"
        with running(config.parent / f"terminal-{number}", waits, config, *settings) as process:
            if end is not None:
                wait_for_step(output, end - 1, process)
                process.send_signal(signal.SIGTERM)
            _, errors = process.communicate()
        assert process.returncode == (0 if end is None else 75), errors
    return (output.model / "model.safetensors").read_bytes()


@contextmanager
def agent(config: Path, port: int, name: str, rounds: int) -> Iterator[subprocess.Popen[bytes]]:
    """A torchrun of two processes, as on a node of its own, all of which are killed at the end if they run."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=9"]
    launcher += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=7", "--local-addr=127.0.0.1"]
    launcher += [f"--rdzv-conf=is_host={int(name == 'first')},last_call_timeout=5", str(HELD_AT), held(rounds)]
    environment = with_path(ROOT / "src", TESTS) | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "SLIPSTREAM_LOG_LEVEL": "info"}
    with (config.parent / name).open("wb") as text:
        arguments = [*launcher, "train", str(config)]
        started = subprocess.Popen(arguments, env=environment, stdout=text, stderr=subprocess.STDOUT)
    try:
        yield started
    finally:
        kill_all(started)


def kill_all(started: subprocess.Popen[bytes]) -> None:
    if started.poll() is None:
        process = psutil.Process(started.pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                each.kill()
    started.wait(LIMIT)


@pytest.mark.grid
@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_node_goes_and_comes_back_under_torchrun(tmp_path: Path, rounds: int) -> None:
    """Two real agents on this machine, of which the one that doesn't keep the rendezvous is killed with its ranks."""
    config = write_config(tmp_path / "run", rounds, resume="last-good")
    output = RunFolder(config.parent / "run")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with agent(config, port, "first", rounds) as stays, ExitStack() as nodes:
        node = nodes.enter_context(agent(config, port, "node-0", rounds))
        for number in range(rounds):
            wait_for_step(output, 16 * number + 7, stays)
            kill_all(node)
            wait_for_step(output, 16 * number + 11, stays)
            node = nodes.enter_context(agent(config, port, f"node-{number + 1}", rounds))
        codes = stays.wait(LIMIT), node.wait(LIMIT)
    assert codes == (0, 0), (config.parent / "first").read_text()
    check(config, output, rounds)
