"""A training on documents of their own lengths, from text to an exported model, resumed and on replicas."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml

from slipstream.planner.ragged import StageRates
from slipstream.schedule import Op, Schedule
from slipstream.train.data import TokenisedText, WholeDocuments
from support.parameters import first_of
from support.tiny_training import exported_loss, half_of, metrics_of, run_training, steps_of, tiny_llama

SETTINGS: dict[str, Any] = {
    "model": {"config": tiny_llama(initializer_range=0.1)},
    "data": {"packing": "none", "vocab_size": 300, "validation_fraction": 0.2},
    "pipeline": {"num_ranks": 2, "slices": 3, "num_microbatches": 2, "schedule": "1f1b"},
    "runtime": {"self_check": False},
    "optimizer": {"lr": 0.01},
    "training": {"seq_len": 64, "batch_size": 4, "steps": 6, "eval_every": 6},
    "checkpoint": {"every": 3},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 5 to 150 tokens."""
    folder = tmp_path_factory.mktemp("text")
    for index in range(40):
        (folder / f"{index:02}.txt").write_text(f"{index}: the quick brown fox jumps over it. " * (1 + index**2 // 100))
    return folder


def train(
    num_processes: int, output: Path, text: Path, *more: str, settings: dict[str, Any] = SETTINGS
) -> CompletedProcess[str]:
    return run_training(num_processes, output, settings, f"--data.files=[{text}]", *more)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    output = tmp_path_factory.mktemp("finished") / "run"
    train(2, output, text)
    return output


@pytest.mark.more
def test_the_export_has_the_loss_that_was_measured(finished: Path) -> None:
    """On the held-out documents, each alone, by transformers."""
    (measured,) = [line["validation_loss"] for line in metrics_of(finished) if "validation_loss" in line]
    sequences = WholeDocuments(TokenisedText.load(finished / "inputs", "validation"), 64, None)
    loss = exported_loss(finished, sequences.batch(0, sequences.num_sequences))
    assert measured == pytest.approx(loss, rel=1e-4)


@pytest.mark.grid
def test_a_resumed_run_is_the_same_to_the_bit(finished: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "half"
    half_of(finished, output)
    train(2, output, text, "--checkpoint.resume=latest")
    assert same_steps(steps_of(output), steps_of(finished)[3:])


@pytest.mark.more
@pytest.mark.parametrize(
    ("num_processes", "changes"),
    first_of(
        [
            (4, ["--dp=2"]),
            (1, ["--pp=1"]),
            (4, ["--tp=2"]),
            (2, ["--pipeline.schedule=zb-v", "--pipeline.stages_per_rank=2"]),
        ],
        1,
        "grid",
    ),
    ids=["two replicas", "one process", "two tensor ranks", "zb-v"],
)
def test_other_meshes_have_the_same_losses(
    num_processes: int, changes: list[str], finished: Path, text: Path, tmp_path: Path
) -> None:
    train(num_processes, tmp_path / "run", text, *changes)
    for step, wanted in zip(steps_of(tmp_path / "run"), steps_of(finished), strict=True):
        assert step["loss"] == pytest.approx(wanted["loss"], rel=1e-3)
        assert step["tokens"] == wanted["tokens"]
        assert math.isfinite(step["grad_norm"])


def same_steps(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> bool:
    names = ("step", "loss", "grad_norm", "tokens")
    return [[step[name] for name in names] for step in found] == [[step[name] for name in names] for step in wanted]


FREE = SETTINGS | {"pipeline": {"num_ranks": 2}}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory, text: Path, compiled_search: None) -> Path:
    """A run that measured what its stages cost, and planned each step by that."""
    output = tmp_path_factory.mktemp("planned") / "run"
    ended = train(2, output, text, settings=FREE)
    assert "stages on ranks" in ended.stdout
    return output


@pytest.mark.more
def test_where_nothing_is_named_each_step_is_planned_by_measured_costs(planned: Path) -> None:
    ran, found = (Schedule.parse((planned / name).read_text()) for name in ("schedule.txt", "plan.txt"))
    assert ran.placement == found.placement
    assert not any("trial" in step for step in steps_of(planned))
    plan = yaml.safe_load((planned / "plan.yaml").read_text())
    rates = StageRates.from_json(plan["plan"]["rates"])
    assert rates.num_stages == len(plan["pipeline"]["partition"])
    assert 0 < rates.rates[Op.F].sum() < 1  # seconds of a slice and of a token, not multiplications


@pytest.mark.more
def test_a_resumed_run_plans_the_same_without_measuring(planned: Path, text: Path, tmp_path: Path) -> None:
    half_of(planned, tmp_path / "half")
    ended = train(2, tmp_path / "half", text, "--checkpoint.resume=latest", settings=FREE)
    assert "measuring" not in ended.stdout
    assert "stages on ranks" not in ended.stdout
    assert same_steps(steps_of(tmp_path / "half"), steps_of(planned)[3:])


@pytest.mark.more
def test_another_run_starts_from_the_plan_file(planned: Path, text: Path, tmp_path: Path) -> None:
    file = yaml.safe_load((planned / "plan.yaml").read_text())
    settings = {name: SETTINGS[name] for name in ("runtime", "optimizer", "checkpoint")} | file
    settings["data"] = SETTINGS["data"] | file["data"]
    settings["training"] = SETTINGS["training"] | file["training"]
    shutil.copy(planned / "plan.txt", tmp_path)
    ended = train(2, tmp_path / "run", text, settings=settings)
    assert "stages on ranks" not in ended.stdout
    assert same_steps(steps_of(tmp_path / "run"), steps_of(planned))


@pytest.mark.grid
def test_a_checkpoint_without_costs_is_resumed_by_multiplications(
    finished: Path, text: Path, tmp_path: Path, compiled_search: None
) -> None:
    half_of(finished, tmp_path / "half")
    ended = train(2, tmp_path / "half", text, "--checkpoint.resume=latest", settings=FREE)
    said = " ".join(ended.stdout.split())
    assert "the checkpoint has no measured costs, so steps are planned by multiplications" in said
    for step, wanted in zip(steps_of(tmp_path / "half"), steps_of(finished)[3:], strict=True):
        assert step["loss"] == pytest.approx(wanted["loss"], rel=1e-3)


@pytest.fixture(scope="module")
def by_tokens(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """An epoch whose steps have as many documents as fit into 200 tokens."""
    output = tmp_path_factory.mktemp("by_tokens") / "run"
    train(2, output, text, settings=BY_TOKENS)
    return output


BY_TOKENS = SETTINGS | {"training": {"seq_len": 64, "batch_tokens": 200, "epochs": 1, "eval_every": 6}}


@pytest.mark.more
def test_a_step_has_as_many_documents_as_fit(by_tokens: Path) -> None:
    sequences = WholeDocuments(TokenisedText.load(by_tokens / "inputs", "train"), 64, 0)
    steps, taken = steps_of(by_tokens), 0
    for step in steps:
        number = sequences.num_fitting(taken, 200)
        lengths = sequences.lengths(taken, number)
        assert step["tokens"] == sum(lengths) <= 200
        assert step["tokens_per_second"] == pytest.approx(sum(lengths) / step["step_seconds"])
        assert step["model_flops"] == model_flops(lengths)
        taken += number
    assert len({step["tokens"] for step in steps}) > 2
    assert 0 <= sum(sequences.lengths(0, sequences.num_sequences)) - sum(step["tokens"] for step in steps) <= 200


def model_flops(lengths: Sequence[int]) -> float:
    """The FLOPs of a step of the Llama of four layers: of each token's products, and of the scores in its document."""
    products = sum(lengths) * (4 * (4 * 32 * 32 + 3 * 32 * 64) + 32 * 300)
    scores = 4 * 4 * (8 + 8) * sum(length * (length + 1) // 2 for length in lengths)
    return 3 * 2.0 * (products + scores)


@pytest.mark.grid
def test_replicas_share_the_documents_of_a_step(by_tokens: Path, text: Path, tmp_path: Path) -> None:
    train(4, tmp_path / "run", text, "--dp=2", settings=BY_TOKENS)
    for step, wanted in zip(steps_of(tmp_path / "run"), steps_of(by_tokens), strict=True):
        assert step["loss"] == pytest.approx(wanted["loss"], rel=1e-3)
        assert step["tokens"] == wanted["tokens"]
