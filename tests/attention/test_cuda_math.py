"""What surrounds a GPU's fused kernels is exact, on a CPU in float64: the store, parts and merges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.attention import fused_cuda, kernel_choice, kernels, slice_attention, store
from slipstream.attention.fused_cuda import FusedCUDA
from slipstream.attention.kernels import KeyGradients, add_gradients
from support.attention import distance, make_case

LENGTH = 40
POSITION = torch.arange(LENGTH)
CAUSAL, WINDOW = torch.zeros(1, LENGTH, dtype=torch.int64), (POSITION - 9).clamp(min=0)[None]


def scores(query: Tensor, key: Tensor, scale: float, seen: Tensor) -> Tensor:
    """Returns the scores (B,H,T,S) of queries (B,H,T,D) and keys (B,Hkv,S,D)."""
    found = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT * scale
    return found.masked_fill(~seen, -torch.inf)


def forward(query: Tensor, key: Tensor, value: Tensor, scale: float, seen: Tensor) -> tuple[Tensor, Tensor]:
    found = scores(query, key, scale, seen)
    output = found.softmax(-1) @ value.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return output.transpose(1, 2).contiguous().transpose(1, 2), found.logsumexp(-1)


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float, seen: Tensor
) -> tuple[Tensor, ...]:
    """Returns the gradients by the formulas of `slipstream.attention.backend`."""
    group = query.shape[1] // key.shape[1]
    probs = (scores(query, key, scale, seen) - lse[..., None]).exp()
    of_scores = probs * (grad @ value.repeat_interleave(group, 1).mT - (grad * out).sum(-1, keepdim=True))
    grads = scale * of_scores.mT @ query, probs.mT @ grad
    of_keys = (each.unflatten(1, (-1, group)).sum(2) for each in grads)
    return scale * of_scores @ key.repeat_interleave(group, 1), *of_keys


class InFloat64:
    """Stands for `torch.ops.aten`, with the signatures and alignments of its attention kernels."""

    @staticmethod
    def seen(query: Tensor, key: Tensor, past: int, window: int | None) -> Tensor:
        own, seen = torch.arange(query.shape[2])[:, None] + past, torch.arange(key.shape[2])
        return (seen <= own) & (window is None or seen >= own - window)

    def _flash_attention_forward(self, *tensors: Tensor, scale: float, **settings: Any) -> Any:
        query, key, value = (each.transpose(1, 2) for each in tensors)
        seen = self.seen(query, key, key.shape[2] - query.shape[2], settings["window_size_left"])
        output, lse = forward(query, key, value, scale, seen)
        return output.transpose(1, 2), lse

    def _flash_attention_backward(self, *tensors: Tensor, scale: float, **settings: Any) -> Any:
        grad, query, key, value, out = (each.transpose(1, 2) for each in tensors[:5])
        seen = self.seen(query, key, key.shape[2] - query.shape[2], settings["window_size_left"])
        return [each.transpose(1, 2) for each in backward(grad, query, key, value, out, tensors[5], scale, seen)]

    def _scaled_dot_product_cudnn_attention(self, *tensors: Any, scale: float) -> Any:
        query, key, value, *_, is_causal, _ = tensors
        output, lse = forward(query, key, value, scale, self.upper_left(query, key, is_causal))
        return output, lse[..., None]

    def _scaled_dot_product_cudnn_attention_backward(self, *tensors: Any, scale: float) -> Any:
        grad, query, key, value, out, lse = tensors[:6]
        return backward(grad, query, key, value, out, lse[..., 0], scale, self.upper_left(query, key, tensors[-1]))

    def upper_left(self, query: Tensor, key: Tensor, is_causal: bool) -> Tensor:
        return self.seen(query, key, 0 if is_causal else key.shape[2], None)


@pytest.mark.parametrize(
    ("name", "first_key"),
    [("flash", CAUSAL), ("flash", WINDOW), ("cudnn", CAUSAL)],
    ids=["flash", "flash, window", "cudnn"],
)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.bfloat16, 3e-2)], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_slices_equal_the_whole(
    name: str, first_key: Tensor, batch: int, dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_aten", InFloat64())
    monkeypatch.setattr(FusedCUDA, "takes", lambda *_: True)
    monkeypatch.setattr(slice_attention, "BACKENDS", (FusedCUDA,))
    monkeypatch.setattr(fused_cuda, "choose_kernel", lambda *_: kernel_choice.KERNELS[name])
    monkeypatch.setattr(store, "_buffer", buffer_of_a_gpu)
    case = make_case((batch, 4, 2, LENGTH, 16, 16), first_key, [0, 1, 12, 29, LENGTH], dtype, sinks=True)
    assert distance(case.sliced(), case.reference()) < bound


def buffer_of_a_gpu(part: Tensor, length: int) -> Tensor:
    batch, heads, _, width = part.shape
    return part.new_empty(batch, length, heads, width).transpose(1, 2)


class Counted(TorchDispatchMode):
    """Counts what launches a kernel of a GPU: operations that write."""

    def __init__(self) -> None:
        super().__init__()
        self.writing: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("add", "add_", "copy_", "_to_copy"):
            self.writing.append(name)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_own_gradients_are_added_and_rounded_in_one_pass(dtype: torch.dtype) -> None:
    """To the bit what adding in float32 and copying gives, from one part and from two."""
    past, own = 5, 3
    keys, values = torch.randn(2, 1, 2, past + own, 4).to(dtype)
    whole = [KeyGradients(0, keys, values)]
    cut = [
        KeyGradients(past, keys[:, :, past:], values[:, :, past:]),
        KeyGradients(0, keys[:, :, :past], values[:, :, :past]),
    ]
    for parts in (whole, cut):
        totals = [torch.randn(1, 2, past + own, 4) for _ in range(2)]
        wanted = [total + each for total, each in zip(totals, (keys, values), strict=True)]
        with Counted() as counted:
            found = add_gradients(parts, past, *totals)
        assert sorted(counted.writing) == ["add", "add", "add_", "add_"]
        for total, mine, want in zip(totals, found, wanted, strict=True):
            assert torch.equal(total[:, :, :past], want[:, :, :past])
            assert torch.equal(mine, want[:, :, past:].to(dtype))
            assert mine.transpose(1, 2).is_contiguous()
