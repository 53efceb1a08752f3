"""A run on a machine that flips a bit, becomes slow or has too little memory says which rank it is, and what to do."""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from slipstream.extras.run_page import write_run_page
from slipstream.planner.joint import JointPlan
from slipstream.planner.plan import Plan
from slipstream.schedule import make_schedule
from slipstream.train.config.config_values import parse_config
from slipstream.train.corruption import find_differences, fingerprint, lone_places
from slipstream.train.metrics.stragglers import cut_advice
from support.forked import COMMAND, launch, run_alone
from support.parameters import first_of
from support.paths import WORKERS
from support.plain_costs import PlainCosts
from support.tiny_training import TEXT, metrics_of, steps_of, tiny_training, with_settings

FLIPPED, SLOW, MEMORY = (WORKERS / "training" / f"{name}.py" for name in ("flipped_bit", "slow_rank", "gpu_memory"))
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
REPLICAS = {"pipeline": {"num_ranks": 1, "slices": 2}, "parallel.data": 2, "training.batch_size": 6}
LARGE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8, "max_position_embeddings": 256}
BETTER = "put PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the command"


def write_config(folder: Path, settings: dict[str, Any], changes: dict[str, Any], text: str = TEXT) -> Path:
    """A run on that text, which is in the folder too, as is what the run writes."""
    (folder / "text.txt").write_text(text)
    places = {"data.files": [str(folder / "text.txt")], "training.output": str(folder / "run")}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(with_settings(settings, places | changes)))
    return path


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two that are compared every four steps."""
    settings = tiny_training(8, 0, **SMALL, max_position_embeddings=32, tie_word_embeddings=True)
    changes = REPLICAS | {"training.check_replicas_every": 4, "training.overwrite": True, "training.seq_len": 32}
    return write_config(tmp_path_factory.mktemp("flipped"), settings, changes)


def last_step(config: Path) -> int:
    return max(line.get("step", 0) for line in metrics_of(config.parent / "run"))


@pytest.mark.parametrize("what", [*first_of(["model."], 0), *first_of(["optimizer.exp_avg_sq."], 0, "grid")])
def test_copies_that_differ_end_the_run_within_the_period(replicas: Path, what: str) -> None:
    ended = launch(2, FLIPPED, "1", "2", what, "train", replicas)
    assert ended.returncode == 1
    assert last_step(replicas) == 3  # the check after the fourth step
    host = socket.gethostname()
    assert f"the two copies of {what}" in ended.stderr
    assert f", on ranks 0 ({host}), 1 ({host}), differ, so that neither can be trusted" in ended.stderr
    assert "--checkpoint.resume=last-good" in ended.stderr


@pytest.mark.grid
def test_the_copies_are_compared_before_a_checkpoint_counts(replicas: Path) -> None:
    no_period = ["--training.check_replicas_every=0", "--checkpoint.every=3"]
    ended = launch(2, FLIPPED, "0", "5", "model.", "train", replicas, *no_period)
    assert ended.returncode == 1
    assert "the two copies of model." in ended.stderr
    steps = [path.name for path in (replicas.parent / "run/checkpoints").glob("step-????????")]
    assert steps == ["step-00000003"]


@pytest.mark.more
def test_what_one_rank_alone_holds_is_checked_between_updates(replicas: Path) -> None:
    ended = launch(2, FLIPPED, "1", "5", "optimizer.exp_avg.", "train", replicas, "--parallel.shard=optimizer")
    assert ended.returncode == 1
    assert last_step(replicas) == 4
    assert f"on rank 1 ({socket.gethostname()}) changed between two updates" in ended.stderr
    assert "optimizer.exp_avg." in ended.stderr


@pytest.mark.grid
def test_the_majority_puts_a_copy_right_to_the_bit(replicas: Path) -> None:
    three = ["--parallel.data=3", "--training.corrupt_replicas=majority"]
    weights = []
    for step in ("-4", "99"):  # flipped after the fourth update, and never
        ended = launch(3, FLIPPED, "2", step, "model.", "train", replicas, *three)
        assert ended.returncode == 0, ended.stderr
        is_repaired = "of rank 2 (" in ended.stdout and "it has the others' copy now" in ended.stdout
        assert is_repaired == (step == "-4")
        weights.append(load_file(replicas.parent / "run/model/model.safetensors"))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.more
@pytest.mark.parametrize(
    ("mesh", "options"),
    first_of(
        [
            ({"tensor": 2, "data": 1, "sequence_parallel": True}, []),
            ({"tensor": 1, "data": 1}, ["--pp=2"]),  # the tied embedding is on both
            ({"tensor": 2, "data": 1}, []),
        ],
        1,
        "grid",
    ),
)
def test_what_ranks_share_stays_the_same_to_the_bit(replicas: Path, mesh: dict[str, Any], options: list[str]) -> None:
    changes = [f"--parallel.{name}={json.dumps(value)}" for name, value in mesh.items()]
    ended = launch(2, COMMAND, "train", replicas, *changes, *options, "--training.check_replicas_every=1")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_every_bit_counts(dtype: torch.dtype) -> None:
    tensor = torch.arange(40).to(dtype).view(5, 8)
    before = fingerprint(tensor)
    seen = {before}
    for bit in range(8 * tensor.element_size()):
        changed = tensor.clone()
        changed.view(-1).view(torch.uint8)[3 * tensor.element_size() + bit // 8] ^= 1 << bit % 8
        seen.add(fingerprint(changed))
    assert len(seen) == 8 * tensor.element_size() + 1
    assert fingerprint(tensor.clone()) == before


def test_the_majority_of_three_or_more_is_right() -> None:
    found = [{"a": 1, "b": 5}, {"a": 2, "b": 6}, {"a": 1}, {"c": 7}]
    first, second = find_differences(found)
    assert (first.place, first.wrong, first.right) == ("a", (1,), 0)
    assert (second.place, second.holders, second.wrong) == ("b", (0, 1), ())
    assert lone_places([list(each) for each in found]) == {"c"}


@pytest.mark.grid
def test_a_rank_that_has_become_slow(tmp_path: Path) -> None:
    """The run, which has planned itself, says which cut would make up for it."""
    changes = {"pipeline": {"num_ranks": 2, "num_microbatches": 2}, "training.seq_len": 256}
    config = write_config(tmp_path, tiny_training(24, 24, **LARGE), changes, TEXT * 3)
    ended = launch(2, SLOW, "train", config)
    assert ended.returncode == 0, ended.stderr
    said = [line for record in metrics_of(tmp_path / "run") for line in record.get("stragglers") or []]
    slow = next(line for line in said if line.startswith("rank 1 computes"))
    found = re.fullmatch(
        r"rank 1 computes ([\d.]+) times as slowly: the cut ([\d.,]+) would take (0\.\d\d) of the step's time; "
        r"to go on with it from a checkpoint, type (--checkpoint.resume=latest .* --pipeline.partition=\[\2\])",
        slow,
    )
    assert found, said
    assert float(found[1]) >= 1.3
    assert sum(map(float, found[2].split(","))) == 8
    assert "rank 1 computes" in ended.stdout
    resumed = launch(2, COMMAND, "train", config, *found[4].split(), "--training.steps=25")
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed after step 24" in resumed.stdout


@pytest.mark.parametrize(("slowness", "end"), [(1.01, "no other cut would save 3% of the step's time"), (1.6, "]")])
def test_a_cut_is_named_only_where_it_saves_time(tmp_path: Path, slowness: float, end: str) -> None:
    schedule, slices = make_schedule("1f1b", 2, 2, 3), (48, 32, 48)
    files = {"data.files": ["text.txt"], "training.output": str(tmp_path), "training.seq_len": 128}
    config = parse_config(with_settings(tiny_training(1, 0, **LARGE), {"pipeline": {}} | files))
    assert cut_advice(config, None, 1, 1, slowness) == []  # no plan, no costs
    decided = Plan().closed(schedule=schedule, partition=(6, 6), slices=slices)
    plan = JointPlan(decided, seconds=1.0, bound=1.0, ideal=1.0, costs=PlainCosts())
    (line,) = cut_advice(config, plan, 1, 1, slowness)
    assert line.startswith(f"rank 1 computes {slowness:.2g} times as slowly: ")
    assert line.endswith(end)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose allocator has no settings."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return write_config(tmp_path, tiny_training(4, 4), {"training.device": "cpu"})


def said_in(ended: CompletedProcess[str]) -> str:
    return " ".join((ended.stdout + ended.stderr).split())


@pytest.mark.more
def test_metrics_page_and_log_of_a_run_whose_memory_is_fragmented(config: Path) -> None:
    ended = launch(2, MEMORY, "fragmented", "train", config)
    assert ended.returncode == 0, ended.stderr[-3000:]
    first, *_, last = (record["gpu_memory"] for record in steps_of(config.parent / "run"))
    assert [rank["reserved"] for rank in first] == [11e9, 11e9]
    held = {"allocated": 10_000_000_000, "reserved": 15_000_000_000, "between": 4_000_000_000}
    assert last[1] == held | {"retries": 3, "failures": 0}
    said = said_in(ended)
    reserved = "tensors held 10.0 GB of the GPU at most, and PyTorch's allocator had reserved 15.0 GB"
    assert said.count(f"step 2: on rank 1 {reserved}: 5.00 GB in pieces") == 1
    assert said.count("step 2: on rank 1 the GPU's memory ran out 2 times") == 1  # the first was before the run
    assert said.count(BETTER) == 2
    page = write_run_page(config.parent / "run")[0].read_text()
    assert "<td>rank 1</td><td>10.0 GB</td><td>15.0 GB</td><td>4.00 GB</td><td>3</td><td>0</td>" in page


@pytest.mark.grid
def test_what_is_set_already_stays(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:False")
    said = said_in(launch(2, MEMORY, "fragmented", "train", config, "--training.steps=2"))
    assert said.count("put PYTORCH_ALLOC_CONF=max_split_size_mb:64,expandable_segments:True before the command") == 2
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # which is read in place of the other
    said = said_in(launch(2, MEMORY, "fragmented", "train", config, "--training.steps=2", "--training.overwrite=true"))
    assert "before the command" not in said
    assert "expandable_segments:True is set already" in said
    assert "--memory.recompute=full or more slices" in said


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")
@pytest.mark.parametrize("started_by", first_of(["itself", "torchrun"], 0))
def test_a_rank_that_runs_out(config: Path, started_by: str) -> None:
    """The last line of a command that starts its ranks itself also has the planner's account of each change."""
    command = MEMORY, "out", "train", config
    ended = run_alone(*command) if started_by == "itself" else launch(2, *command)
    assert ended.returncode == 1
    said = said_in(ended)
    assert "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.00 GiB. In this process tensors" in said
    assert "reserved 15.0 GB, and it had given back all that was unused 3 times; 4.00 GB lay free" in said
    assert BETTER in said
    assert "PYTORCH_ALLOC_CONF" not in said  # PyTorch's own advice, in other words
    assert "--pipeline.slices=8 (now 4)" in said
    if started_by == "itself":
        assert "To need less memory, try in this order: " in ended.stderr.splitlines()[-1]
        assert BETTER in ended.stderr.splitlines()[-1]


@pytest.mark.more
def test_building_the_model_may_take_longer_than_a_wait(tmp_path: Path) -> None:
    """As where PEFT is imported, or weights are read, on a busy machine."""
    changes = {"training.stall_limit": 2, "checkpoint.every": 0}
    config = write_config(tmp_path, tiny_training(1, 0, **SMALL), changes)
    ended = run_alone(WORKERS / "training" / "slow_building.py", "5", "train", config)
    assert ended.returncode == 0, ended.stderr
    assert "hangs" not in ended.stderr
