"""A loop of one's own goes on from a checkpoint as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from slipstream import Pipeline
from slipstream.checkpoint import CheckpointFolder
from slipstream.checkpoint.encoded_values import decode, encode
from slipstream.errors import NonFiniteError, SlipstreamError
from support.adapters import adapted, lora
from support.architectures import labels_of, llama, tokens, with_dropout
from support.parameters import first_of
from support.pipelines import make_pipe
from support.refusals import refused

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 3, 3], gamma=0.1),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, 5)], [2]
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5),
    "cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10),
    "ratio": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
}


class Loop:
    """A pipeline with dropout, its optimizer and scheduler."""

    def __init__(self, num_ranks: int, seed: int = 0, scheduler: str = "steps", model: Any = None) -> None:
        options: dict[str, Any] = {"seed": seed, "dtype": torch.float64} if model is None else {}
        self.pipe = make_pipe(model or with_dropout("llama", 0.1), slices=2, num_ranks=num_ranks, **options)
        trained = [parameter for parameter in self.pipe.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)

    def train(self, *steps: int) -> list[float]:
        losses = []
        for step in steps:
            self.optimizer.zero_grad()
            loss = float(self.pipe.step(tokens(seed=step), labels_of(tokens(seed=step))))
            self.optimizer.step()
            is_by_loss = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)
            self.scheduler.step(*[loss] if is_by_loss else [])
            losses.append(loss)
        return losses

    def save(self, folder: Path, step: int, **options: Any) -> None:
        self.pipe.save(folder, step, optimizer=self.optimizer, scheduler=self.scheduler, **options)

    def load(self, folder: Path) -> tuple[int, dict[str, Any]]:
        return self.pipe.load(folder, optimizer=self.optimizer, scheduler=self.scheduler)


@pytest.mark.parametrize("scheduler", first_of(SCHEDULERS))
def test_a_loop_goes_on_to_the_bit_and_with_its_rates(scheduler: str, tmp_path: Path) -> None:
    loop = Loop(2, scheduler=scheduler)
    loop.train(1, 2)
    loop.save(tmp_path, 2, facts={"samples": 4, "seen": (1, 2), 3: "three"})
    expected = loop.train(3, 4)
    again = Loop(1, seed=1, scheduler=scheduler)
    assert again.load(tmp_path) == (2, {"samples": 4, "seen": (1, 2), 3: "three"})
    assert again.train(3, 4) == expected
    here = again.pipe.state_dict()
    assert all(tensor.equal(here[name]) for name, tensor in loop.pipe.state_dict().items())
    assert again.optimizer.param_groups[0]["lr"] == loop.optimizer.param_groups[0]["lr"]


def test_an_adapter_is_saved_alone(tmp_path: Path) -> None:
    loop = Loop(2, model=adapted(lora()))
    loop.train(1)
    loop.save(tmp_path, 1)
    expected = loop.train(2)
    again = Loop(1, model=adapted(lora()))
    again.load(tmp_path)
    assert again.train(2) == expected


def layers(number: int = 3) -> nn.Sequential:
    torch.manual_seed(number)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(number)))


def sequence(model: nn.Sequential, num_ranks: int = 1) -> Pipeline:
    cut = {"partition": [4, 2]} if num_ranks == 2 else {}
    return Pipeline(model, num_ranks=num_ranks, **cut, loss_fn=lambda y, t: ((y - t).square().sum(), len(t)))


def test_buffers_of_layers_are_saved(tmp_path: Path) -> None:
    pipe = sequence(layers(), num_ranks=2)
    pipe.step(torch.randn(8, 4), torch.randn(8, 4))
    pipe.save(tmp_path, 1)
    again = sequence(layers())
    before = again.state_dict()["0.1.running_mean"].clone()
    again.load(tmp_path)
    here = again.state_dict()
    assert not here["0.1.running_mean"].equal(before)
    assert int(here["0.1.num_batches_tracked"]) == 1
    assert all(tensor.equal(here[name]) for name, tensor in pipe.state_dict().items())


def test_fewer_layers_than_were_saved_are_refused(tmp_path: Path) -> None:
    sequence(layers(3)).save(tmp_path, 1)
    with pytest.raises(SlipstreamError, match=r"has 2\.\S+ and 6 more tensors, which this model doesn't have"):
        sequence(layers(2)).load(tmp_path)


def test_a_step_that_is_there_is_not_replaced_unasked(tmp_path: Path) -> None:
    pipe = sequence(layers())
    pipe.save(tmp_path, 5)
    for step in (5, 4):
        with pytest.raises(SlipstreamError, match=f"has a checkpoint of step 5 already, and step {step} is"):
            pipe.save(tmp_path, step)
    pipe.save(tmp_path, 4, replace=True)
    assert CheckpointFolder(tmp_path).steps() == [4]


def test_nothing_to_load_is_said(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"there is no checkpoint in .*; pipe\.save\(folder, step"):
        sequence(layers()).load(tmp_path)


def test_a_save_that_fails_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SlipstreamError, match="no checkpoints can be written to"):
        sequence(layers()).save(tmp_path / "file", 1)
    pipe = sequence(layers())
    with torch.no_grad():
        next(pipe.parameters()).fill_(torch.nan)
    with pytest.raises(NonFiniteError, match=r"0\.weight has elements that are infinite"):
        pipe.save(tmp_path / "folder", 1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Loop, Path]:
    """A loop, and the folder with its checkpoint."""
    loop, folder = Loop(1), tmp_path_factory.mktemp("saved")
    loop.save(folder, 1)
    return loop, folder


def test_weights_may_be_loaded_alone(saved: tuple[Loop, Path]) -> None:
    loop, folder = saved
    assert loop.pipe.load(folder)[0] == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda loop: {"scheduler": None}, "has a scheduler, without which .. give pipe.load scheduler="),
        (
            lambda loop: {"optimizer": torch.optim.SGD(loop.pipe.parameters(), lr=1.0)},
            "has the state of a AdamW, and optimizer= is a SGD",
        ),
        (
            lambda loop: {"optimizer": torch.optim.AdamW([nn.Parameter(torch.ones(7))])},
            "updates a tensor of shape (7,) that isn't of pipe.parameters()",
        ),
        (
            lambda _: {"pipe": make_pipe(llama(rms_norm_eps=0.5)), "optimizer": None, "scheduler": None},
            "is a checkpoint of another model: .. rms_norm_eps",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change: Any, words: str, saved: tuple[Loop, Path]) -> None:
    loop, folder = saved
    given = {"pipe": loop.pipe, "optimizer": loop.optimizer, "scheduler": loop.scheduler} | change(loop)
    with refused(words):
        given.pop("pipe").load(folder, **given)


def test_what_a_checkpoint_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"facts\['a'\]\[1\] is a builtins.object, which a checkpoint can't hold"):
        sequence(layers()).save(tmp_path, 1, facts={"a": [1, object()]})
    assert not CheckpointFolder(tmp_path).steps()
    values = {"t": torch.ones(2, 3), "i": float("inf"), "n": None, (1, 2): {1: {2}}}
    back = decode(encode(values, "values"))
    assert back.pop("t").equal(values.pop("t"))
    assert back == values
