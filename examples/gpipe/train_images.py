"""Teaches AmoebaNet-D, a ResNet or a ViT to tell six shapes apart, on one process or several:

python examples/gpipe/train_images.py --model amoebanet
torchrun --nproc-per-node=2 examples/gpipe/train_images.py --model resnet --microbatches 8 --recompute stage
"""

from __future__ import annotations

import argparse

import torch
from amoebanet import amoebanet_d
from image_task import SHAPES, SIZE, draw
from loop import Batch, add_arguments, run
from resnet import resnet
from torch import nn
from vit import vit


def main() -> None:
    arguments = _arguments()
    generator = torch.Generator().manual_seed(arguments.seed)
    images, labels = draw(512, torch.Generator().manual_seed(12345))

    def next_batch() -> Batch:
        return draw(arguments.batch, generator)

    def accuracy(model: nn.Sequential) -> str:
        right = (model(images).argmax(dim=1) == labels).float().mean()
        return f"{right:.1%} of {len(labels)} held-out images right"

    run(lambda: _build(arguments), next_batch, accuracy, None, arguments)


def _build(arguments: argparse.Namespace) -> nn.Sequential:
    """Returns the model at the size asked for, with a stem for small images."""
    num_layers, width, num_classes = arguments.layers, arguments.width, len(SHAPES)
    if arguments.model == "amoebanet":
        return amoebanet_d(num_layers or 3, width or 16, num_classes, small_images=True)
    if arguments.model == "resnet":
        width = width or 16
        depths = [(num_layers or 4) // 4] * 4
        return resnet(depths, [width * 2, width * 4, width * 8, width * 16], width, num_classes, small_images=True)
    return vit(num_layers or 4, width or 64, 4 * (width or 64), 4, SIZE, 8, num_classes)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="amoebanet", choices=["amoebanet", "resnet", "vit"])
    parser.add_argument("--layers", type=int, metavar="L", help="normal cells, residual blocks or transformer layers")
    parser.add_argument("--width", type=int, metavar="D", help="filters, channels of the stem, or hidden channels")
    add_arguments(parser, steps=200, batch=32, lr=3e-3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
