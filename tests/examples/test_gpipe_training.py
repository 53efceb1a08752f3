"""The scripts of examples/gpipe learn: the loss falls and more held-out samples are right, under torchrun too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from examples.gpipe.image_task import SHAPES, draw
from examples.gpipe.translation_task import END, decode, encode, sentences, translate

from support.forked import launch, run_alone
from support.paths import ROOT

FOLDER = ROOT / "examples" / "gpipe"


def run(num_ranks: int, script: str, *arguments: str) -> tuple[list[float], list[float]]:
    """Runs a script in that many ranks, or with 0 without a launcher.

    Returns the losses that it prints, and the held-out samples that are right before and after, in percent.
    """
    ended = launch(num_ranks, FOLDER / script, *arguments) if num_ranks else run_alone(FOLDER / script, *arguments)
    assert ended.returncode == 0, ended.stderr[-3000:]
    right = re.findall(r"^(?:before|after): ([\d.]+)%", ended.stdout, re.MULTILINE)
    losses = re.findall(r"loss ([\d.]+)", ended.stdout)
    return [float(loss) for loss in losses], [float(share) for share in right]


@pytest.mark.grid
def test_images_are_learned() -> None:
    arguments = ["--model", "resnet", "--steps", "40", "--recompute", "full", "--microbatches", "2", "--width", "8"]
    losses, (before, after) = run(2, "train_images.py", *arguments)
    assert len(losses) == 20
    assert losses[-1] < 0.85 * losses[0]
    assert after > before + 15


@pytest.mark.more
def test_translation_is_learned_in_token_slices() -> None:
    """As without them: the losses that are printed are the same."""
    arguments = ["--steps", "20", "--layers", "1", "--microbatches", "2", "--schedule", "1f1b", "--width", "32"]
    whole, _ = run(0, "train_translation.py", *arguments)
    sliced, _ = run(2, "train_translation.py", *arguments, "--slices", "3")
    assert len(sliced) == 20
    assert sliced[-1] < 0.8 * sliced[0]
    assert sliced == pytest.approx(whole, abs=0.02)  # in float32


@pytest.mark.grid
def test_amoebanet_learns_images(tmp_path: Path) -> None:
    picture = tmp_path / "timeline.png"
    losses, (before, after) = run(2, "train_images.py", "--steps", "60", "--timeline", str(picture))
    assert losses[-1] < 0.6 * losses[0]
    assert after > before + 40
    assert picture.stat().st_size > 10_000


@pytest.mark.grid
def test_a_vit_learns_images() -> None:
    losses, (before, after) = run(0, "train_images.py", "--model", "vit", "--steps", "200", "--ranks", "2")
    assert losses[-1] < 0.7 * losses[0]
    assert after > before + 25


@pytest.mark.grid
def test_most_names_are_translated_to_the_last_letter() -> None:
    _, (before, after) = run(2, "train_translation.py", "--steps", "250", "--schedule", "1f1b")
    assert before == 0
    assert after > 50


def test_translations_are_right() -> None:
    names = sentences()
    assert len(set(names)) == len(names) > 1000
    assert translate("open_code_page") == "openCodePage"
    (source, target), predicted = encode(["open_code_page", "a_b"])
    assert source.shape == (2, 14)
    assert target.shape == predicted.shape == (2, 13)
    assert [decode(row) for row in predicted] == ["openCodePage", "aB"]
    assert torch.equal(target[0, 1:], predicted[0, :-1])  # what is to be predicted is the target's next letter
    assert predicted[1].tolist() == [3, 30, END, *[-100] * 10]


def test_each_image_shows_its_shape() -> None:
    """Disc and ring differ in the middle, and a square fills more than a cross, whatever the colours."""
    images, labels = draw(600, torch.Generator().manual_seed(0))
    assert images.shape == (600, 3, 32, 32)
    assert set(labels.tolist()) == set(range(len(SHAPES)))
    bright = {shape: images[labels == i].mean() for i, shape in enumerate(SHAPES)}
    assert bright["ring"] < bright["disc"]
    assert bright["cross"] < bright["square"]
    again, _ = draw(600, torch.Generator().manual_seed(0))
    assert torch.equal(images, again)
