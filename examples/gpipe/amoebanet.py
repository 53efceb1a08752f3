"""AmoebaNet-D (L, D) as a sequence of layers: Real et al. 2019, as GPipe scales it (section 3).

A cell combines the outputs of the two cells before it. Its five combinations are separate layers, so that a
pipeline can split inside a cell; between them goes a tuple of those states that are still needed:

    (h, g) -> stash h -> Enter -> Combine x 5 -> Concat -> pop h -> (cell's output, h)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream import Skip

Operation = Callable[[int, int], nn.Module]  # (channels, stride) -> a layer that keeps the channels


def conv(inputs: int, outputs: int, kernel: tuple[int, int] = (1, 1), stride: tuple[int, int] = (1, 1)) -> nn.Module:
    """Returns ReLU, convolution and batch norm: the order of all convolutions of AmoebaNet."""
    padding = (kernel[0] // 2, kernel[1] // 2)
    return nn.Sequential(
        nn.ReLU(), nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False), nn.BatchNorm2d(outputs)
    )


def conv_1x1(channels: int, stride: int) -> nn.Module:
    return conv(channels, channels, stride=(stride, stride))


def conv_3x3(channels: int, stride: int) -> nn.Module:
    """Returns a 3x3 convolution through a bottleneck of a quarter of the channels."""
    quarter = channels // 4
    return nn.Sequential(
        conv(channels, quarter), conv(quarter, quarter, (3, 3), (stride, stride)), conv(quarter, channels)
    )


def conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    """Returns 1x7 and 7x1 convolutions through a bottleneck of a quarter of the channels."""
    quarter = channels // 4
    return nn.Sequential(
        conv(channels, quarter),
        conv(quarter, quarter, (1, 7), (1, stride)),
        conv(quarter, quarter, (7, 1), (stride, 1)),
        conv(quarter, channels),
    )


def avg_pool_3x3(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def max_pool_3x3(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride, padding=1)


def max_pool_2x2(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(2, stride, ceil_mode=True)


def none(channels: int, stride: int) -> nn.Module:
    """Passes its input on. Where a cell halves the image it isn't applied to the cell's inputs."""
    return nn.Identity()


@dataclass(frozen=True)
class Genotype:
    """What evolution found: states 0 and 1 are the outputs of the cell before and of the one before that; combination
    i adds two operations' outputs to form state i + 2; the states in `concat` are the cell's output."""

    combinations: tuple[tuple[tuple[int, Operation], tuple[int, Operation]], ...]
    concat: tuple[int, ...]


# Real et al. 2019, figure 5 of the appendix; `concat` of the normal cell as in their published code, which has the
# parameter counts of GPipe's table 1.
NORMAL = Genotype(
    (
        ((1, conv_1x1), (1, max_pool_3x3)),
        ((1, none), (0, conv_1x7_7x1)),
        ((0, conv_1x1), (0, conv_1x7_7x1)),
        ((2, max_pool_3x3), (2, none)),
        ((1, avg_pool_3x3), (5, conv_1x1)),
    ),
    concat=(0, 3, 4, 6),
)
REDUCTION = Genotype(
    (
        ((0, max_pool_2x2), (0, max_pool_3x3)),
        ((2, none), (1, conv_3x3)),
        ((2, conv_1x7_7x1), (2, max_pool_3x3)),
        ((3, none), (1, max_pool_2x2)),
        ((2, avg_pool_3x3), (3, conv_1x1)),
    ),
    concat=(4, 5, 6),
)


class Stem(nn.Module):
    """The first convolution, (b, 3, H, W) -> its output twice: the first cell has no two cells before it."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(self.conv(images))
        return hidden, hidden


class FactorizedReduction(nn.Module):
    """Half the height and width without losing every other pixel: two strided convolutions, one shifted by a pixel."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs - outputs // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = torch.relu(hidden)  # (b, c, h, w)
        shifted = nn.functional.pad(hidden, (0, 1, 0, 1))[:, :, 1:, 1:]
        return self.norm(torch.cat([self.even(hidden), self.odd(shifted)], dim=1))


class Enter(nn.Module):
    """The outputs of the two cells before, brought to the shape that this cell computes in: its states 0 and 1."""

    def __init__(self, newer: nn.Module, older: nn.Module) -> None:
        super().__init__()
        self.newer, self.older = newer, older

    def forward(self, cells: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.newer(cells[0]), self.older(cells[1])


class Combine(nn.Module):
    """Adds two operations' outputs and passes the sum on after those states that later layers need."""

    def __init__(self, operations: list[nn.Module], places: list[int], kept: list[int]) -> None:
        """`places` of the two inputs, and of what is `kept`, in the tuple that comes in."""
        super().__init__()
        self.left, self.right = operations
        self.places, self.kept = places, kept

    def forward(self, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        left, right = self.places
        return (*(states[i] for i in self.kept), self.left(states[left]) + self.right(states[right]))


class Concat(nn.Module):
    """The cell's output: its states as channels of one tensor."""

    def forward(self, states: tuple[Tensor, ...]) -> Tensor:
        return torch.cat(states, dim=1)


class Classify(nn.Module):
    """(the last cell's output, the one before) -> logits (b, classes)."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, num_classes)

    def forward(self, cells: tuple[Tensor, Tensor]) -> Tensor:
        return self.linear(torch.relu(cells[0]).mean(dim=(2, 3)))


def _combinations(genotype: Genotype, channels: int, stride: int) -> list[Combine]:
    """Returns the five layers; each hands on the states that a later combination or the concatenation reads."""
    layers, live = [], [0, 1]
    for i, combination in enumerate(genotype.combinations):
        read_later = {state for pair in genotype.combinations[i + 1 :] for state, _ in pair} | set(genotype.concat)
        operations = [make(channels, stride if state < 2 else 1) for state, make in combination]
        kept = [place for place, state in enumerate(live) if state in read_later]
        layers.append(Combine(operations, [live.index(state) for state, _ in combination], kept))
        live = [live[place] for place in kept] + [i + 2]
    return layers


class _Cells:
    """Appends cells to a dictionary of layers, and knows the channels of the last two."""

    def __init__(self, stem_channels: int) -> None:
        self.layers: dict[str, nn.Module] = {}
        self.num_cells = 0
        self.newer = self.older = stem_channels  # channels of the last two cells' outputs
        self.halved = False  # whether the last cell halved the image, so that `older` is twice as wide and high

    def add(self, channels: int, genotype: Genotype) -> None:
        name, skip = f"cell{self.num_cells}", Skip(f"cell{self.num_cells}")
        self.layers[f"{name}_stash"] = skip.stash(0)
        self.layers[f"{name}_enter"] = Enter(conv(self.newer, channels), self._older_to(channels))
        for i, layer in enumerate(_combinations(genotype, channels, stride=2 if genotype is REDUCTION else 1)):
            self.layers[f"{name}_combine{i}"] = layer
        self.layers[f"{name}_concat"] = Concat()
        self.layers[f"{name}_pop"] = skip.pop()
        self.newer, self.older = channels * len(genotype.concat), self.newer
        self.halved = genotype is REDUCTION
        self.num_cells += 1

    def _older_to(self, channels: int) -> nn.Module:
        if self.halved:
            return FactorizedReduction(self.older, channels)
        return nn.Identity() if self.older == channels else conv(self.older, channels)


def amoebanet_d(
    num_normal_cells: int = 18, num_filters: int = 208, num_classes: int = 1000, *, small_images: bool = False
) -> nn.Sequential:
    """Returns AmoebaNet-D (L, D): images (b, 3, H, W) -> logits (b, classes).

    L normal cells in three groups, of D, 2D and 4D filters, with a reduction cell between two groups. Before them two
    more reduction cells, of D/2 and D filters, and a strided convolution, or with `small_images`, as Real et al. for
    CIFAR-10, one convolution that keeps the size.

    Raises ValueError where L isn't a multiple of 3 or D not of 16.
    """
    if num_normal_cells % 3 or num_normal_cells < 3:
        raise ValueError(f"num_normal_cells={num_normal_cells}: they form three equal groups; give a multiple of 3.")
    if num_filters % 16 or num_filters < 16:
        raise ValueError(f"num_filters={num_filters}: bottlenecks take a quarter of a quarter; give a multiple of 16.")
    stem_channels = num_filters if small_images else num_filters // 4
    cells = _Cells(stem_channels)
    cells.layers["stem"] = Stem(stem_channels, stride=1 if small_images else 2)
    if not small_images:
        cells.add(num_filters // 2, REDUCTION)
        cells.add(num_filters, REDUCTION)
    for group in range(3):
        channels = num_filters * 2**group
        if group:
            cells.add(channels, REDUCTION)
        for _ in range(num_normal_cells // 3):
            cells.add(channels, NORMAL)
    cells.layers["classify"] = Classify(cells.newer, num_classes)
    return nn.Sequential(OrderedDict(cells.layers))
