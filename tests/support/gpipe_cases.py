"""The four models of examples/gpipe at toy size, and a step of each as nn.Sequential runs it by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from examples.gpipe.amoebanet import amoebanet_d
from examples.gpipe.resnet import resnet
from examples.gpipe.transformer import transformer
from examples.gpipe.translation_task import PADDING
from examples.gpipe.vit import vit
from torch import Tensor, nn

from slipstream.pipeline.families import causal_cross_entropy
from slipstream.pipeline.families.layer_sequence import cross_entropy
from support.architectures import gradients

ROWS = 17  # no number of microbatches but 1 divides it
_CLASSES, _VOCABULARY = 5, 23
Inputs = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A model, a batch, and the loss of a piece of that batch as (sum, number of targets)."""

    build: Callable[[], nn.Sequential]
    batch: Callable[[], tuple[Inputs, Tensor]]
    loss_fn: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    def model(self) -> nn.Sequential:
        torch.manual_seed(1)
        return self.build().double()


def _images(size: int) -> Callable[[], tuple[Tensor, Tensor]]:
    def batch() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(2)
        images = torch.randn(ROWS, 3, size, size, generator=generator, dtype=torch.float64)
        return images, torch.randint(_CLASSES, (ROWS,), generator=generator)

    return batch


def _sentences() -> tuple[tuple[Tensor, Tensor], Tensor]:
    """With padding in every third row's source, and labels that don't count."""
    generator = torch.Generator().manual_seed(2)
    source = torch.randint(1, _VOCABULARY, (ROWS, 7), generator=generator)
    source[::3, 5:] = PADDING
    target, labels = torch.randint(1, _VOCABULARY, (2, ROWS, 6), generator=generator)
    labels[1::2, 4:] = -100
    return (source, target), labels


CASES = {
    "amoebanet": Case(lambda: amoebanet_d(3, 16, _CLASSES, small_images=True), _images(8), cross_entropy),
    "resnet": Case(lambda: resnet((1, 2, 1), (16, 32, 64), 8, _CLASSES, small_images=True), _images(12), cross_entropy),
    "vit": Case(lambda: vit(3, 24, 48, 3, 8, 4, _CLASSES), _images(8), cross_entropy),
    "transformer": Case(
        lambda: transformer(2, 40, 2, vocabulary=_VOCABULARY, width=24, head_width=16, clip=0.8),
        _sentences,
        causal_cross_entropy,
    ),
}


def unsplit_step(case: Case, num_microbatches: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the nn.Sequential itself, microbatch by microbatch, as batch norm normalises them."""
    model = copy.deepcopy(case.model())
    inputs, targets = case.batch()
    num_valid, loss = (targets != -100).sum(), torch.zeros((), dtype=torch.float64)
    for rows in torch.arange(ROWS).tensor_split(num_microbatches):
        piece = tuple(tensor[rows] for tensor in inputs) if isinstance(inputs, tuple) else inputs[rows]
        total, _ = case.loss_fn(model(piece), targets[rows])
        (total / num_valid).backward()
        loss += total.detach() / num_valid
    return loss, gradients(model.named_parameters())
