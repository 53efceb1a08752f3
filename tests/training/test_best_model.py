"""A run keeps its best checkpoint, ends when validations don't improve, and exports what is asked for."""

from __future__ import annotations

import shutil
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from safetensors.torch import load_file

from slipstream.checkpoint import CheckpointFolder, Manifest, find_best
from slipstream.checkpoint.files import read_record, write_record
from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.train.export import choose_checkpoint, opened_model
from slipstream.train.run_folder import RunFolder
from support.forked import slipstream_command
from support.tiny_training import metrics_of, run_training, tiny_llama

MORE = 100  # steps that the run doesn't take
SETTINGS: dict[str, Any] = {
    "model": {"config": tiny_llama(num_hidden_layers=2, num_attention_heads=2)},
    "data": {"vocab_size": 300},
    "pipeline": {"num_ranks": 2, "slices": 2, "schedule": "1f1b"},
    "runtime": {"self_check": False},
    "optimizer": {"lr": 0.005, "schedule": "constant", "warmup_steps": 1},
    "training": {"seq_len": 32, "batch_size": 2, "steps": MORE, "eval_every": 2, "patience": 3},
    "checkpoint": {"keep_best": True, "every": 2},
}


def train(folder: Path, *changes: str) -> CompletedProcess[str]:
    """Trains on a text that says nothing of the one that is held out, so that the loss on it soon rises."""
    texts = folder.parent / "texts"
    if not texts.exists():
        texts.mkdir()
        (texts / "train.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
        (texts / "other.txt").write_text(" ".join(f"{n} is {n * n % 97} more than {n % 13}?" for n in range(40)))
    places = f"--data.files=[{texts / 'train.txt'}]", f"--data.validation={texts / 'other.txt'}"
    return run_training(2, folder, SETTINGS, *places, *changes)


def validations(folder: Path) -> dict[int, float]:
    lines = metrics_of(folder)
    return {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("runs") / "run"
    return RunFolder(folder), train(folder)


def best_of(losses: dict[int, float]) -> int:
    return min(losses, key=lambda step: losses[step])


def test_it_ends_by_patience_and_keeps_the_best(run: tuple[RunFolder, CompletedProcess[str]]) -> None:
    folder, ended = run
    losses = validations(folder.path)
    best, last = best_of(losses), max(losses)
    assert last == best + 2 * 3 < MORE
    assert CheckpointFolder(folder.checkpoints).steps() == [last, last - 2, best]
    assert find_best(CheckpointFolder(folder.checkpoints)) == (best, losses[best])
    assert f"the run ends after step {last}: no improvement in 3 validations (training.patience=3)" in ended.stdout
    assert f"best validation loss: {losses[best]:.4f} nats per token, after step {best}" in ended.stdout
    assert choose_checkpoint(folder.path, best=True).read(print).step == best


def test_it_is_finished_and_left_as_it_is(run: tuple[RunFolder, CompletedProcess[str]]) -> None:
    folder, _ = run
    before = {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")}
    ended = train(folder.path, "--checkpoint.resume=latest")
    assert "nothing is left to do. To train further, give a larger --training.patience" in ended.stdout
    assert {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")} == before


@pytest.mark.more
def test_it_goes_on_counting_and_exports_the_best(run: tuple[RunFolder, CompletedProcess[str]], tmp_path: Path) -> None:
    """From the middle of its patience; the model is the one that `slipstream export --best` writes."""
    folder, _ = run
    losses = validations(folder.path)
    best, last = best_of(losses), max(losses)
    again = tmp_path / "again"
    for step in (best, last - 2):
        name = f"step-{step:08}"
        shutil.copytree(folder.checkpoints / name, again / "checkpoints" / name)
    shutil.copytree(folder.path.parent / "texts", tmp_path / "texts")
    ended = train(again, "--checkpoint.resume=latest", "--training.export=best")
    assert f"the run ends after step {last}: no improvement in 3 validations" in ended.stdout
    assert f"the model of step {best}, the best that is saved, is exported" in ended.stdout
    assert validations(again) == {last: losses[last]}
    facts = [Manifest.read(each / f"step-{last:08}").facts for each in (folder.checkpoints, again / "checkpoints")]
    assert facts[0]["validation"] == facts[1]["validation"]
    assert facts[1]["validation"]["num_without_improvement"] == 3
    written = slipstream_command("export", folder.path, "--best", "--output", tmp_path / "best")
    assert written.stdout.endswith(f"exported step {best} of {folder.path} to {tmp_path / 'best'}\n"), written.stderr
    models = [load_file(each / "model.safetensors") for each in (tmp_path / "best", again / "model", folder.model)]
    assert all(weight.equal(models[1][name]) for name, weight in models[0].items())
    assert not all(weight.equal(models[2][name]) for name, weight in models[0].items())


@pytest.mark.grid
def test_a_validation_that_a_signal_left_out_is_made_up_for(
    run: tuple[RunFolder, CompletedProcess[str]], tmp_path: Path
) -> None:
    """A run that is asked to stop saves at the end of its step, without the validation that is due there."""
    folder, _ = run
    losses = validations(folder.path)
    best, last = best_of(losses), max(losses)
    again = tmp_path / "again"
    shutil.copytree(folder.checkpoints, again / "checkpoints")
    shutil.rmtree(again / "checkpoints" / f"step-{last:08}")
    file = again / "checkpoints" / f"step-{last - 2:08}" / "manifest.json"
    record = read_record(file)
    record["facts"]["validation"] |= {"num_without_improvement": 1, "last_step": last - 4}
    write_record(file, record)
    shutil.copytree(folder.path.parent / "texts", tmp_path / "texts")
    train(again, "--checkpoint.resume=latest")
    assert validations(again) == {last - 2: losses[last - 2], last: losses[last]}
    facts = [Manifest.read(each / f"step-{last:08}").facts for each in (folder.checkpoints, again / "checkpoints")]
    assert facts[0]["validation"] == facts[1]["validation"]
    assert find_best(CheckpointFolder(again / "checkpoints")) == (best, losses[best])


def test_commands_take_the_best(run: tuple[RunFolder, CompletedProcess[str]], tmp_path: Path) -> None:
    folder, _ = run
    with opened_model(str(folder.path), False, Progress(None)) as last:
        assert last.path == str(folder.model)
        final = load_file(folder.model / "model.safetensors")
    with opened_model(str(folder.path), False, Progress(None), best=True) as best:
        weights = load_file(Path(best.path) / "model.safetensors")
    assert not all(weight.equal(final[name]) for name, weight in weights.items())
    with (
        pytest.raises(SlipstreamError, match=r"--best chooses a checkpoint of a run, and .* is a model"),
        opened_model(str(folder.model), False, Progress(None), best=True),
    ):
        pass
    one = folder.checkpoints / f"step-{max(validations(folder.path)):08}"
    with pytest.raises(SlipstreamError, match=r"--best chooses among the checkpoints of a run, .* leave --best out"):
        choose_checkpoint(one, best=True)
    with pytest.raises(SlipstreamError, match="--step=2 and --best both choose a checkpoint"):
        choose_checkpoint(folder.path, "2", best=True)
