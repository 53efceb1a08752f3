"""Images that are drawn when they are needed: which of six shapes is it, at any place, size, angle and colour?"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SHAPES = ("disc", "ring", "square", "triangle", "cross", "bars")
SIZE = 32  # pixels, both ways


def draw(num_images: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns images (n, 3, 32, 32), with noise, and the numbers of their shapes (n,)."""
    labels = torch.randint(len(SHAPES), (num_images,), generator=generator)
    x, y = _own_coordinates(num_images, generator)
    inside = torch.stack(_masks(x, y))[labels, torch.arange(num_images)]  # (n, 32, 32)
    shape, ground = torch.rand(2, num_images, 3, 1, 1, generator=generator) * 0.5  # colours: the shape is brighter
    images = torch.where(inside[:, None], shape + 0.5, ground)
    return 2 * images - 1 + 0.2 * torch.randn(images.shape, generator=generator), labels


def _own_coordinates(num_images: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns every pixel's x and y, (n, 32, 32), where the shape is upright, its centre (0, 0) and its radius 1."""
    radius = 6 + 5 * torch.rand(num_images, 1, 1, generator=generator)  # pixels
    centre = radius + (SIZE - 2 * radius) * torch.rand(2, num_images, 1, 1, generator=generator)
    angle = math.pi / 6 * (2 * torch.rand(num_images, 1, 1, generator=generator) - 1)
    pixels = torch.arange(SIZE, dtype=torch.float32)
    x, y = (pixels[None, None, :] - centre[0]) / radius, (pixels[None, :, None] - centre[1]) / radius
    return x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()


def _masks(x: Tensor, y: Tensor) -> list[Tensor]:
    """Returns which pixels each of SHAPES covers, for all images."""
    square_of_radius, farther = x**2 + y**2, torch.maximum(x.abs(), y.abs())
    return [
        square_of_radius < 1,
        (square_of_radius < 1) & (square_of_radius > 0.3),
        farther < 0.8,
        (y < 0.7) & (y > 1.9 * x.abs() - 1),
        (farther < 1) & (torch.minimum(x.abs(), y.abs()) < 0.3),
        (farther < 0.9) & (y.abs() > 0.3),
    ]
