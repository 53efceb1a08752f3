"""The Vision Transformer as a sequence of layers (Dosovitskiy et al. 2021), ViT-B/16 by default."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

_EPSILON = 1e-12  # of all norms, as in the published weights


class Embed(nn.Module):
    """Images (b, 3, H, W) -> patches after a class token, with positions (b, 1 + patches, width)."""

    def __init__(self, image_size: int, patch_size: int, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch_size, stride=patch_size)
        self.class_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 1 + (image_size // patch_size) ** 2, width) * 0.02)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)  # (b, patches, width)
        return torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1) + self.positions


class Attention(nn.Module):
    """Norm, self-attention, residual; (b, T, width) in and out."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(width, eps=_EPSILON)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        query, key, value = (self._heads(project(normed)) for project in (self.query, self.key, self.value))
        attended = functional.scaled_dot_product_attention(query, key, value)  # (b, heads, T, width / heads)
        return hidden + self.output(attended.transpose(1, 2).flatten(2))

    def _heads(self, hidden: Tensor) -> Tensor:
        return hidden.unflatten(2, (self.num_heads, -1)).transpose(1, 2)


class FeedForward(nn.Module):
    """Norm, two linear layers, residual; (b, T, width) in and out."""

    def __init__(self, width: int, hidden_width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=_EPSILON)
        self.expand = nn.Linear(width, hidden_width)
        self.reduce = nn.Linear(hidden_width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.reduce(functional.gelu(self.expand(self.norm(hidden))))


class Classify(nn.Module):
    """Logits (b, classes) from the class token."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=_EPSILON)
        self.linear = nn.Linear(width, num_classes)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(self.norm(hidden[:, 0]))


def vit(
    num_layers: int = 12,
    width: int = 768,
    hidden_width: int = 3072,
    num_heads: int = 12,
    image_size: int = 224,
    patch_size: int = 16,
    num_classes: int = 1000,
) -> nn.Sequential:
    """Images (b, 3, image_size, image_size) -> logits (b, classes). A transformer layer is two layers of the sequence,
    so that a pipeline can split between attention and feed-forward."""
    layers: dict[str, nn.Module] = {"embed": Embed(image_size, patch_size, width)}
    for i in range(num_layers):
        layers[f"attention{i}"] = Attention(width, num_heads)
        layers[f"feed_forward{i}"] = FeedForward(width, hidden_width)
    layers["classify"] = Classify(width, num_classes)
    return nn.Sequential(OrderedDict(layers))


# transformers' names and, as in files written by older versions, those before 5.
_OUTSIDE = {
    r"vit\.embeddings\.cls_token": "embed.class_token",
    r"vit\.embeddings\.position_embeddings": "embed.positions",
    r"vit\.embeddings\.patch_embeddings\.projection": "embed.patches",
    r"vit\.layernorm": "classify.norm",
    r"classifier": "classify.linear",
}
_INSIDE = {
    r"layernorm_before": "attention{i}.norm",
    r"attention\.(q_proj|attention\.query)": "attention{i}.query",
    r"attention\.(k_proj|attention\.key)": "attention{i}.key",
    r"attention\.(v_proj|attention\.value)": "attention{i}.value",
    r"attention\.(o_proj|output\.dense)": "attention{i}.output",
    r"layernorm_after": "feed_forward{i}.norm",
    r"(mlp\.fc1|intermediate\.dense)": "feed_forward{i}.expand",
    r"(mlp\.fc2|output\.dense)": "feed_forward{i}.reduce",
}
_LAYER = re.compile(r"vit\.(?:encoder\.)?layers?\.(\d+)\.(.*)")


def from_transformers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state_dict of transformers' ViTForImageClassification under the names of `vit`."""
    return {_name(name): tensor for name, tensor in weights.items()}


def _name(name: str) -> str:
    layer = _LAYER.fullmatch(name)
    names, rest, i = (_INSIDE, layer[2], layer[1]) if layer else (_OUTSIDE, name, "")
    for theirs, ours in names.items():
        match = re.fullmatch(rf"{theirs}((?:\.(?:weight|bias))?)", rest)
        if match:
            return ours.format(i=i) + match.groups()[-1]
    raise KeyError(f"{name} is no parameter of a ViTForImageClassification without a mask token")
