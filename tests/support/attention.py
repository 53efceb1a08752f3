"""Attention over a whole sequence, and the same in slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slipstream.attention import AttentionSite, ContextStore, KeyRanges, attend


@dataclass
class AttentionCase:
    """One attention over a whole sequence, and how it is cut."""

    query: Tensor  # (B,H,L,D)
    key: Tensor  # (B,Hkv,L,D)
    value: Tensor  # (B,Hkv,L,Dv)
    grad: Tensor  # (B,H,L,Dv)
    first_key: Tensor  # (rows, L)
    cuts: Sequence[int]  # 0 .. L
    options: dict[str, Any] = field(default_factory=lambda: {"scale": 0.3})

    @property
    def inputs(self) -> list[Tensor]:
        sinks = self.options.get("sinks")
        return [self.query, self.key, self.value, *([] if sinks is None else [sinks])]

    def reference(self) -> list[Tensor]:
        """Output and gradients of dense masked softmax attention in float64."""
        q, k, v, *sinks = (t.detach().double().requires_grad_() for t in self.inputs)
        group = q.shape[1] // k.shape[1]
        scores = q @ k.repeat_interleave(group, 1).mT * self.options["scale"]
        if cap := self.options.get("softcap"):
            scores = cap * torch.tanh(scores / cap)
        position = torch.arange(q.shape[2], device=q.device)
        first_key = self.first_key.to(q.device)
        seen = (position >= first_key[..., None]) & (position <= position[:, None])  # (rows,L,L)
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        if sinks:
            column = sinks[0][:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, column], -1)
        output = scores.softmax(-1)[..., : q.shape[2]] @ v.repeat_interleave(group, 1)
        return [output.detach(), *torch.autograd.grad(output, [q, k, v, *sinks], self.grad.double())]

    def sliced(self, store: ContextStore | None = None) -> list[Tensor]:
        """Output and gradients with every slice on its own, backward in reverse."""
        store = store or ContextStore(self.query.shape[2])
        inputs = [t.detach().requires_grad_() for t in self.inputs]
        options = {name: value for name, value in self.options.items() if name != "sinks"}
        spans = [slice(a, b) for a, b in zip(self.cuts, self.cuts[1:], strict=False)]
        outputs = [
            attend(
                *(t[:, :, span] for t in inputs[:3]),
                AttentionSite(store, "layer", KeyRanges(self.first_key[:, span], span.start), **options),
                *inputs[3:],
            )
            for span in spans
        ]
        for span, output in reversed(list(zip(spans, outputs, strict=True))):
            output.backward(self.grad[:, :, span])
        assert not store.num_bytes
        return [torch.cat(outputs, 2).detach(), *(t.grad for t in inputs)]


def distance(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest difference of any tensor, relative to that tensor's largest number.

    Some gradients are zero in theory (a query that sees one key): a hundredth of the largest of all is the least
    that a difference is compared with.
    """
    assert [t.shape for t in ours] == [t.shape for t in theirs]
    sizes = [float(t.abs().max()) for t in theirs]
    pairs = zip(ours, theirs, sizes, strict=True)
    return max(float((a.double() - b).abs().max()) / max(size, max(sizes) / 100) for a, b, size in pairs)


def make_case(
    shape: tuple[int, int, int, int, int, int],
    first_key: Tensor,
    cuts: Sequence[int],
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    sinks: bool = False,
    **options: Any,
) -> AttentionCase:
    """Random inputs of shape (B, H, Hkv, L, D, Dv)."""
    batch, heads, key_heads, length, width, value_width = shape
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(device, dtype)

    options = {"scale": 0.3} | options | ({"sinks": draw(heads)} if sinks else {})
    return AttentionCase(
        draw(batch, heads, length, width),
        draw(batch, key_heads, length, width),
        draw(batch, key_heads, length, value_width),
        draw(batch, heads, length, value_width),
        first_key,
        cuts,
        options,
    )
