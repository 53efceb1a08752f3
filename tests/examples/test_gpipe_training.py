"""GPipe's models in a pipeline have the gradients of the sequence, and learn images and translations."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from examples.gpipe.image_task import SHAPES, draw
from examples.gpipe.translation_task import END, decode, encode, sentences, translate
from torch import Tensor

from slipstream import Layers, Memory, Pipeline
from slipstream.schedule import SCHEDULES
from support.architectures import BOUND, gradient_error, gradients
from support.forked import launch, run_alone
from support.parameters import each_once
from support.paths import ROOT
from support.sequences.gpipe_models import CASES

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


def step(
    name: str, schedule: str, num_ranks: int, num_microbatches: int, recompute: str
) -> tuple[Tensor, dict[str, Tensor]]:
    case = CASES[name]
    inputs, targets = case.batch()
    pipe = Pipeline(
        case.model(),
        schedule=schedule,
        num_microbatches=num_microbatches,
        stages_per_rank=2 if 2 in SCHEDULES[schedule].stages_per_rank else 1,
        memory=Memory(recompute=recompute),
        layers=Layers(example=inputs),
        num_ranks=num_ranks,
        loss_fn=case.loss_fn,
    )
    return pipe.step(inputs, targets), gradients(pipe)


@cache
def unsplit(name: str, num_microbatches: int) -> tuple[Tensor, dict[str, Tensor]]:
    return CASES[name].unsplit(num_microbatches)


def check(name: str, schedule: str, num_ranks: int, num_microbatches: int, recompute: str) -> None:
    loss, expected = unsplit(name, num_microbatches)
    found_loss, found = step(name, schedule, num_ranks, num_microbatches, recompute)
    assert abs(found_loss - loss) < BOUND
    assert found.keys() == expected.keys()
    assert gradient_error(expected, found) < BOUND


# One row for each K, M and schedule at least once, in each model with and without re-materialisation.
SELECTION = [
    ("gpipe", 1, 3, "none"),
    ("gpipe", 2, 8, "full"),
    ("1f1b", 2, 5, "none"),
    ("1f1b", 3, 7, "full"),
    ("zb-h1", 3, 4, "none"),
    ("interleaved-1f1b", 2, 2, "selective"),
    ("zb-v", 2, 6, "none"),
    ("breadth-first", 4, 1, "full"),
]


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "num_microbatches", "recompute", "name"), each_once(SELECTION, CASES, 4)
)
def test_gradients_are_those_of_the_sequence(
    name: str, schedule: str, num_ranks: int, num_microbatches: int, recompute: str
) -> None:
    check(name, schedule, num_ranks, num_microbatches, recompute)


@pytest.mark.grid
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_gradients_are_those_of_the_sequence_in_every_way(name: str, schedule: str, num_ranks: int) -> None:
    for num_microbatches in range(1, 9):
        for recompute in ("none", "full"):
            check(name, schedule, num_ranks, num_microbatches, recompute)


@pytest.mark.parametrize(
    ("recompute", "name"), each_once(["none", "full"], ["vit", "transformer", "resnet", "amoebanet"], 1)
)
def test_bits_do_not_depend_on_the_number_of_ranks(name: str, recompute: str) -> None:
    loss, expected = step(name, "1f1b", 1, 4, recompute)
    for num_ranks in (2, 3):
        found_loss, found = step(name, "1f1b", num_ranks, 4, recompute)
        assert torch.equal(found_loss, loss)
        assert all(torch.equal(gradient, found[key]) for key, gradient in expected.items())


def test_batch_norm_sees_microbatches() -> None:
    """With another number of them the gradients are others, far above the bound of the comparisons here."""
    _, expected = unsplit("resnet", 4)
    _, found = step("resnet", "1f1b", 2, 3, "none")
    assert gradient_error(expected, found) > 1e-4
