"""The four models of examples/gpipe at toy size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from examples.gpipe.amoebanet import amoebanet_d
from examples.gpipe.resnet import resnet
from examples.gpipe.transformer import transformer
from examples.gpipe.translation_task import PADDING
from examples.gpipe.vit import vit
from torch import Tensor

from slipstream.model import causal_cross_entropy, cross_entropy
from support.sequences.case import SequenceCase

ROWS = 17  # no number of microbatches but 1 divides it
_CLASSES, _VOCABULARY = 5, 23


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
    "amoebanet": SequenceCase(lambda: amoebanet_d(3, 16, _CLASSES, small_images=True), _images(8), cross_entropy),
    "resnet": SequenceCase(
        lambda: resnet((1, 2, 1), (16, 32, 64), 8, _CLASSES, small_images=True), _images(12), cross_entropy
    ),
    "vit": SequenceCase(lambda: vit(3, 24, 48, 3, 8, 4, _CLASSES), _images(8), cross_entropy),
    "transformer": SequenceCase(
        lambda: transformer(2, 40, 2, vocabulary=_VOCABULARY, width=24, head_width=16, clip=0.8),
        _sentences,
        causal_cross_entropy,
    ),
}
