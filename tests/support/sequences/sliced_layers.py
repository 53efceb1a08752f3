"""Sequences whose tokens can be cut from some layer on."""

from __future__ import annotations

import torch
from examples.gpipe.transformer import transformer, transformer_l
from torch import Tensor, nn

from slipstream import CutTokens, Skip, causal_attention
from slipstream.model import causal_cross_entropy
from support.sequences.case import Inputs, SequenceCase

ROWS, SOURCE, TARGET, VOCABULARY, WIDTH = 8, 5, 9, 11, 8


class Begin(nn.Module):
    """(source (b, S, width), target ids (b, T)) -> (encoding, hidden, mask (b, S))."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.embed = nn.Linear(WIDTH, WIDTH), nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        source, target = inputs
        return self.encode(source), self.embed(target), source[..., 0] > -1


class Encode(nn.Module):
    """Mixes all source tokens, ahead and behind; (encoding, hidden, mask) -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        encoding, hidden, mask = inputs
        return self.linear(encoding).tanh() + encoding.mean(1, keepdim=True), hidden, mask


class TakeSkip(nn.Module):
    """(encoding, hidden, mask, first encoding) -> (hidden, encoding, mask)."""

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        encoding, hidden, mask, first = inputs
        return hidden, encoding + first.sin(), mask


class Decode(nn.Module):
    """Twice causal attention and once attention to the encoding; (hidden, encoding, mask) -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.inwards, self.read = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden, encoding, mask = inputs
        query, key, value = self.inwards(hidden).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)  # (b, 2, T, width / 2)
        attended = causal_attention(query, key, value) + causal_attention(key, query[:, :1], value[:, :1], scale=0.3)
        scores = (hidden @ self.read(encoding).mT).masked_fill(~mask[:, None], -torch.inf)
        return hidden + attended.transpose(1, 2).flatten(2) + scores.softmax(2) @ encoding, encoding, mask


class Refine(nn.Module):
    """Hands on an encoding of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        return inputs[0] * 2, self.linear(inputs[1]).tanh(), inputs[2]


class RectifyInPlace(nn.Module):
    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        return nn.functional.silu(inputs[0], inplace=True), inputs[1], inputs[2]


class Turn(nn.Module):
    """The whole tensors come first: (hidden, encoding, mask, earlier hidden) -> (mask, encoding, encoding, hidden)."""

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return inputs[2], inputs[1], inputs[1], inputs[0] + 2 * inputs[3].sin()


class TurnBack(nn.Module):
    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        return inputs[3], inputs[1].sin() + inputs[2], inputs[0]


class Predict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return self.linear(inputs[0] + inputs[1].mean(1, keepdim=True) + inputs[3].sin().mean(1, keepdim=True))


def mixed() -> nn.Sequential:
    """Skips before and after the cut, one of a whole tensor; wholes that are dropped, doubled, moved and replaced."""
    before, after, whole = Skip("before"), Skip("after"), Skip("whole")
    encoder = [Begin(), before.stash(), Encode(), Encode(), before.pop(), TakeSkip()]
    decoder = [RectifyInPlace(), Decode(), RectifyInPlace(), after.stash(), Decode(), whole.stash(1), after.pop()]
    rest = [Turn(), TurnBack(), Refine(), Decode(), whole.pop(), Predict()]
    return nn.Sequential(*encoder, CutTokens(), *decoder, *rest)


def _mixed_batch() -> tuple[Inputs, Tensor]:
    generator = torch.Generator().manual_seed(3)
    source = torch.randn(ROWS, SOURCE, WIDTH, generator=generator, dtype=torch.float64)
    source[..., 0, 0] = 1  # at least one is seen
    target, labels = torch.randint(0, VOCABULARY, (2, ROWS, TARGET), generator=generator)
    labels[1::2, 4:] = -100
    return (source, target), labels


def _translation() -> tuple[Inputs, Tensor]:
    generator = torch.Generator().manual_seed(2)
    source = torch.randint(1, VOCABULARY, (ROWS, SOURCE), generator=generator)
    source[::3, 3:] = 0  # padding
    target, labels = torch.randint(1, VOCABULARY, (2, ROWS, TARGET), generator=generator)
    labels[1::2, 4:] = -100
    return (source, target), labels


def _sizes(num_heads: int) -> dict[str, int | float]:
    return {"vocabulary": VOCABULARY, "width": 8 * num_heads, "clip": 0.8}


CASES = {
    "transformer": SequenceCase(
        lambda: transformer(2, 32, 2, head_width=8, **_sizes(2)),  # type: ignore[arg-type]
        _translation,
        causal_cross_entropy,
    ),
    "language model": SequenceCase(
        lambda: transformer_l(3, 24, 2, **_sizes(2)),  # type: ignore[arg-type]
        lambda: (_translation()[0][1], _translation()[1]),
        causal_cross_entropy,
    ),
    "mixed": SequenceCase(mixed, _mixed_batch, causal_cross_entropy),
}
