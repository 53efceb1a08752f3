"""The Transformer T(L, H, A) of GPipe's section 5, encoder and decoder, and the Transformer-L of its table 1.

    (source, target) -> Embed -> stash target -> encoder layers -> pop target -> CutTokens -> decoder layers -> logits

The embedded target goes from the first layer to the decoder as a Skip; the source's encoding, which every decoder layer
reads, travels with the decoder's tuple. The decoder's tokens can be cut into slices: it looks back only.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream import CutTokens, Skip, causal_attention

PADDING = 0  # this token id pads source and target


class Embed(nn.Module):
    """Token ids and their sinusoidal positions; one table for source and target, as they share a vocabulary."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.table.weight, std=width**-0.5)

    def embed(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids)  # (b, T, width)
        return hidden * math.sqrt(hidden.shape[2]) + _positions(ids.shape[1], hidden)

    def forward(self, ids: Tensor) -> tuple[Tensor]:
        return (self.embed(ids),)


class EmbedBoth(Embed):
    """(source ids (b, S), target ids (b, T)) -> both embedded, and which source tokens are no padding (b, S)."""

    def forward(self, ids: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        source, target = ids
        return self.embed(source), self.embed(target), source != PADDING


def _positions(length: int, like: Tensor) -> Tensor:
    """Sines and cosines of Vaswani et al. 2017: (length, width)."""
    width = like.shape[-1]
    place = torch.arange(length, dtype=like.dtype, device=like.device)[:, None]
    rate = torch.exp(torch.arange(0, width, 2, dtype=like.dtype, device=like.device) * (-math.log(10000) / width))
    return torch.cat([torch.sin(place * rate), torch.cos(place * rate)], dim=1)


class Attention(nn.Module):
    """Multi-head attention of (b, T, width) over (b, S, width), with heads of `head_width` channels."""

    def __init__(self, width: int, num_heads: int, head_width: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        channels = num_heads * head_width
        self.query, self.key, self.value = (nn.Linear(width, channels) for _ in range(3))
        self.output = nn.Linear(channels, width)

    def forward(self, hidden: Tensor, over: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        query, key, value = self._heads(self.query(hidden)), self._heads(self.key(over)), self._heads(self.value(over))
        if causal:
            attended = causal_attention(query, key, value)
        else:
            attended = functional.scaled_dot_product_attention(query, key, value, mask)
        return self.output(attended.transpose(1, 2).flatten(2))

    def _heads(self, hidden: Tensor) -> Tensor:
        return hidden.unflatten(2, (self.num_heads, -1)).transpose(1, 2)  # (b, heads, T, head_width)


class EncoderAttention(nn.Module):
    """Norm, attention over the source, residual: (x, is a token) -> the same."""

    def __init__(self, width: int, num_heads: int, head_width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, head_width)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, is_token = inputs
        normed = self.norm(hidden)
        return hidden + self.attention(normed, normed, is_token[:, None, None]), is_token


class CausalAttention(nn.Module):
    """Norm, attention over the tokens so far, residual: (y, ...) -> the same."""

    def __init__(self, width: int, num_heads: int, head_width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, head_width)

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *others = inputs
        normed = self.norm(hidden)
        return hidden + self.attention(normed, normed, causal=True), *others


class CrossAttention(nn.Module):
    """Norm, attention over the encoding, residual: (y, encoding, is a token) -> the same."""

    def __init__(self, width: int, num_heads: int, head_width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, head_width)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden, encoding, is_token = inputs
        return hidden + self.attention(self.norm(hidden), encoding, is_token[:, None, None]), encoding, is_token


class FeedForward(nn.Module):
    """Norm, two linear layers, residual: (x, ...) -> the same.

    Deep models train only with initial weights scaled down by the number of layers (GPipe, section 5).
    """

    def __init__(self, width: int, hidden_width: int, num_layers: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, hidden_width)
        self.reduce = nn.Linear(hidden_width, width)
        with torch.no_grad():
            self.expand.weight /= num_layers
            self.reduce.weight /= num_layers

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *others = inputs
        return hidden + self.reduce(torch.relu(self.expand(self.norm(hidden)))), *others


class EndOfEncoder(nn.Module):
    """The encoder's last norm: (x, is a token) -> (encoding, is a token)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.norm(inputs[0]), inputs[1]


class Pick(nn.Module):
    """Elements of a tuple, in the order given."""

    def __init__(self, *places: int) -> None:
        super().__init__()
        self.places = places

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(inputs[i] for i in self.places)


class Predict(nn.Module):
    """(y, ...) -> logits (b, T, vocabulary), held within +-`clip` (GPipe, section 5: peaky predictions destroy
    training of deep models)."""

    def __init__(self, width: int, vocabulary: int, clip: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.linear.weight, std=width**-0.5)
        self.clip = clip

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return self.linear(self.norm(inputs[0])).clamp(-self.clip, self.clip)


def transformer(
    num_layers: int = 6,
    hidden_width: int = 8192,
    num_heads: int = 16,
    *,
    vocabulary: int = 64_000,
    width: int = 1024,
    head_width: int = 64,
    clip: float = 20.0,
) -> nn.Sequential:
    """Returns T(L, H, A): L encoder and L decoder layers, H feed-forward channels, A heads.

    (source ids (b, S), target ids (b, T) from its start token on) -> logits (b, T, vocabulary) of the target's next
    tokens. `width` is Transformer Big's; with more heads there are more attention channels, as in the paper.
    """
    attention = (width, num_heads, head_width)
    feed_forward = (width, hidden_width, num_layers)
    target = Skip("target")
    layers: dict[str, nn.Module] = {"embed": EmbedBoth(vocabulary, width)}
    layers |= {"stash_target": target.stash(1), "source": Pick(0, 2)}
    for i in range(num_layers):
        layers[f"encoder{i}_attention"] = EncoderAttention(*attention)
        layers[f"encoder{i}_feed_forward"] = FeedForward(*feed_forward)
    layers |= {"encoding": EndOfEncoder(width), "pop_target": target.pop(), "target": Pick(2, 0, 1)}
    layers["cut"] = CutTokens()
    for i in range(num_layers):
        layers[f"decoder{i}_attention"] = CausalAttention(*attention)
        layers[f"decoder{i}_cross_attention"] = CrossAttention(*attention)
        layers[f"decoder{i}_feed_forward"] = FeedForward(*feed_forward)
    return nn.Sequential(OrderedDict(layers | {"predict": Predict(width, vocabulary, clip)}))


def transformer_l(
    num_layers: int = 48,
    hidden_width: int = 8192,
    num_heads: int = 32,
    *,
    vocabulary: int = 32_000,
    width: int = 2048,
    clip: float = 20.0,
) -> nn.Sequential:
    """Returns the Transformer-L of GPipe's tables 1 to 3, with the sizes of a language model: token ids (b, T) ->
    logits (b, T, vocabulary)."""
    layers: dict[str, nn.Module] = {"embed": Embed(vocabulary, width), "cut": CutTokens()}
    for i in range(num_layers):
        layers[f"layer{i}_attention"] = CausalAttention(width, num_heads, width // num_heads)
        layers[f"layer{i}_feed_forward"] = FeedForward(width, hidden_width, num_layers)
    return nn.Sequential(OrderedDict(layers | {"predict": Predict(width, vocabulary, clip)}))
