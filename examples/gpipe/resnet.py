"""ResNet with bottlenecks as a sequence of layers (He et al. 2016), ResNet-50 by default."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


def conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions next to a shortcut; the 3x3 one has the stride (known as v1.5)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        quarter = outputs // 4
        self.reduce = conv_norm(inputs, quarter, 1)
        self.conv = conv_norm(quarter, quarter, 3, stride)
        self.expand = conv_norm(quarter, outputs, 1)
        same_shape = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same_shape else conv_norm(inputs, outputs, 1, stride)

    def forward(self, hidden: Tensor) -> Tensor:
        inside = torch.relu(self.conv(torch.relu(self.reduce(hidden))))  # (b, outputs / 4, h, w)
        return torch.relu(self.expand(inside) + self.shortcut(hidden))  # (b, outputs, h, w)


def resnet(
    depths: Sequence[int] = (3, 4, 6, 3),
    widths: Sequence[int] = (256, 512, 1024, 2048),
    stem_channels: int = 64,
    num_classes: int = 1000,
    *,
    small_images: bool = False,
) -> nn.Sequential:
    """Images (b, 3, H, W) -> logits (b, classes): `depths` blocks of `widths` channels, the image halved between two
    groups, and at the stem to a quarter, or with `small_images` not at all."""
    stem: dict[str, nn.Module] = {"stem": conv_norm(3, stem_channels, 7, 2), "stem_relu": nn.ReLU()}
    if small_images:
        stem["stem"] = conv_norm(3, stem_channels, 3)
    else:
        stem["stem_pool"] = nn.MaxPool2d(3, stride=2, padding=1)
    blocks: dict[str, nn.Module] = {}
    channels = stem_channels
    for group, (depth, width) in enumerate(zip(depths, widths, strict=True)):
        for i in range(depth):
            blocks[f"block{group}_{i}"] = Bottleneck(channels, width, stride=2 if group and i == 0 else 1)
            channels = width
    head = {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "classify": nn.Linear(channels, num_classes)}
    return nn.Sequential(OrderedDict(stem | blocks | head))


_PARTS = {
    "convolution": "0",
    "normalization": "1",
    "layer.0": "reduce",
    "layer.1": "conv",
    "layer.2": "expand",
    "shortcut": "shortcut",
}


def from_transformers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state_dict of transformers' ResNetForImageClassification under the names of `resnet`."""
    return {_name(name): tensor for name, tensor in weights.items()}


def _name(name: str) -> str:
    """Renames e.g. resnet.encoder.stages.1.layers.0.layer.2.convolution.weight to block1_0.expand.0.weight."""
    parts = name.split(".")
    if parts[0] == "classifier":
        return f"classify.{parts[-1]}"
    kind = _PARTS[parts[-2]]  # the convolution or its norm
    if parts[1] == "embedder":
        return f"stem.{kind}.{parts[-1]}"
    group, block, path = parts[3], parts[5], ".".join(parts[6:-2])
    return f"block{group}_{block}.{_PARTS[path]}.{kind}.{parts[-1]}"
