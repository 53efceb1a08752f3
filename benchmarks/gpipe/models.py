"""GPipe's two models as the benchmarks run them: how they are built, and a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from examples.gpipe.amoebanet import amoebanet_d
from examples.gpipe.transformer import transformer_l
from torch import Tensor, nn

from slipstream.model import cross_entropy
from slipstream.pipeline.pipeline_options import LossFunction

NUM_CLASSES = 1000


@dataclass(frozen=True)
class Case:
    """A model and the shape of its batches."""

    build: Callable[[], nn.Sequential]
    batch: Callable[[int], tuple[Tensor, Tensor]]  # rows -> (inputs, targets)
    loss: LossFunction

    def model(self) -> nn.Sequential:
        """Builds the model with equal weights in every process."""
        torch.manual_seed(0)
        return self.build()


def amoebanet(num_cells: int, num_filters: int, image_size: int) -> Case:
    def batch(rows: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(rows, 3, image_size, image_size, generator=generator)
        return images, torch.randint(NUM_CLASSES, (rows,), generator=generator)

    return Case(lambda: amoebanet_d(num_cells, num_filters, NUM_CLASSES), batch, cross_entropy)


def transformer(num_layers: int, width: int, num_heads: int, vocabulary: int, length: int) -> Case:
    """Returns a Transformer-L, its feed-forward layers four times as wide as the model, as in the paper."""

    def batch(rows: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(vocabulary, (rows, length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def build() -> nn.Sequential:
        model = transformer_l(num_layers, 4 * width, num_heads, vocabulary=vocabulary, width=width)
        del model.cut  # microbatches only, as in the paper: a layer less that does nothing
        return model

    return Case(build, batch, token_loss)


def token_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (sum, count) of logits (b, T, vocabulary) and targets (b, T)."""
    total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, torch.tensor(targets.numel())


# Next to each, the rows of a microbatch: a step of many takes two processes a second or two.
SMALL = {
    "AmoebaNet-D (6, 64), 64x64 images": (amoebanet(6, 64, 64), 4),
    "Transformer-8, width 256, 128 tokens": (transformer(8, 256, 4, 4000, 128), 1),
}
