"""A bit that flips in a real run is found within the period, and named by rank, host and tensor."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from slipstream.train.corruption import find_differences, fingerprint, lone_places
from support.forked import COMMAND, launch
from support.parameters import first_of
from support.paths import WORKERS

WORKER = WORKERS / "training/flipped_bit.py"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flipped")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    model = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model |= {"num_attention_heads": 2, "vocab_size": 300, "max_position_embeddings": 32, "tie_word_embeddings": True}
    values = {
        "model": {"config": model},
        "data": {"files": [str(folder / "text.txt")], "validation_fraction": 0},
        "pipeline": {"num_ranks": 1, "slices": 2},
        "parallel": {"data": 2},
        "runtime": {"self_check": False},
        "training": {"output": str(folder / "output"), "seq_len": 32, "batch_size": 6, "steps": 8}
        | {"check_replicas_every": 4, "overwrite": True},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def last_step(config: Path) -> int:
    lines = (config.parent / "output/metrics.jsonl").read_text().splitlines()
    return max(json.loads(line).get("step", 0) for line in lines)


@pytest.mark.parametrize("what", [*first_of(["model."], 0), *first_of(["optimizer.exp_avg_sq."], 0, "grid")])
def test_copies_that_differ_end_the_run_within_the_period(config: Path, what: str) -> None:
    ended = launch(2, WORKER, "1", "2", what, "train", str(config))
    assert ended.returncode == 1
    assert last_step(config) == 3  # the check after the fourth step
    host = socket.gethostname()
    assert f"the two copies of {what}" in ended.stderr
    assert f", on ranks 0 ({host}), 1 ({host}), differ, so that neither can be trusted" in ended.stderr
    assert "--checkpoint.resume=last-good" in ended.stderr


@pytest.mark.grid
def test_the_copies_are_compared_before_a_checkpoint_counts(config: Path) -> None:
    no_period = ["--training.check_replicas_every=0", "--checkpoint.every=3"]
    ended = launch(2, WORKER, "0", "5", "model.", "train", str(config), *no_period)
    assert ended.returncode == 1
    assert "the two copies of model." in ended.stderr
    steps = [path.name for path in (config.parent / "output/checkpoints").glob("step-????????")]
    assert steps == ["step-00000003"]


@pytest.mark.more
def test_what_one_rank_alone_holds_is_checked_between_updates(config: Path) -> None:
    ended = launch(2, WORKER, "1", "5", "optimizer.exp_avg.", "train", str(config), "--parallel.shard=optimizer")
    assert ended.returncode == 1
    assert last_step(config) == 4
    assert f"on rank 1 ({socket.gethostname()}) changed between two updates" in ended.stderr
    assert "optimizer.exp_avg." in ended.stderr


@pytest.mark.grid
def test_the_majority_puts_a_copy_right_to_the_bit(config: Path) -> None:
    three = ["--parallel.data=3", "--training.corrupt_replicas=majority", "--sample.prompt=null"]
    weights = []
    for step in ("-4", "99"):  # flipped after the fourth update, and never
        ended = launch(3, WORKER, "2", step, "model.", "train", str(config), *three)
        assert ended.returncode == 0, ended.stderr
        is_repaired = "of rank 2 (" in ended.stdout and "it has the others' copy now" in ended.stdout
        assert is_repaired == (step == "-4")
        weights.append(load_file(config.parent / "output/model/model.safetensors"))
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
def test_what_ranks_share_stays_the_same_to_the_bit(config: Path, mesh: dict[str, object], options: list[str]) -> None:
    changes = [f"--parallel.{name}={json.dumps(value)}" for name, value in mesh.items()]
    ended = launch(2, COMMAND, "train", str(config), *changes, *options, "--training.check_replicas_every=1")
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
