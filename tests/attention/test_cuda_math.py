"""What surrounds a GPU's fused kernels is exact, on a CPU in float64: the store, parts and merges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch._inductor.metrics
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.attention import fused_cuda, kernel_choice, kernel_passes, kernels, slice_attention, store
from slipstream.attention.fused_cuda import FusedCUDA
from slipstream.attention.kernel_passes import KeyGradients, add_gradients
from slipstream.attention.kernels import HeadsApart
from support.attention import AttentionCase, distance, make_case

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


class Rounding(InFloat64):
    """Rounds as FlashAttention-2 does: gradients of keys for each query head, and then the sum of a group's."""

    def _flash_attention_forward(self, *tensors: Tensor, **settings: Any) -> Any:
        output, lse = super()._flash_attention_forward(*(each.double() for each in tensors), **settings)
        return output.to(tensors[0].dtype), lse

    def _flash_attention_backward(self, *tensors: Tensor, **settings: Any) -> Any:
        grad, query, key, value, out, lse = (each.double() for each in tensors)
        group = query.shape[2] // key.shape[2]
        wide = (each.repeat_interleave(group, 2) for each in (key, value))
        of_query, *of_heads = super()._flash_attention_backward(grad, query, *wide, out, lse, **settings)
        dtype = tensors[0].dtype
        return of_query.to(dtype), *(each.to(dtype).unflatten(2, (-1, group)).sum(3) for each in of_heads)


def run_on_kernel(
    kernel: kernels.FusedKernel, aten: InFloat64, monkeypatch: pytest.MonkeyPatch, case: AttentionCase
) -> list[Tensor]:
    """Returns output and gradients of slices, computed as on a GPU."""
    monkeypatch.setattr(kernels, "_aten", aten)
    monkeypatch.setattr(FusedCUDA, "takes", lambda *_: True)
    monkeypatch.setattr(slice_attention, "BACKENDS", (FusedCUDA,))
    monkeypatch.setattr(fused_cuda, "choose_kernel", lambda *_: kernel)
    monkeypatch.setattr(store, "_buffer", buffer_of_a_gpu)
    return case.sliced()


@pytest.mark.parametrize("apart", [False, True], ids=["", "heads apart"])
@pytest.mark.parametrize(
    ("name", "first_key"),
    [("flash", CAUSAL), ("flash", WINDOW), ("cudnn", CAUSAL)],
    ids=["flash", "flash, window", "cudnn"],
)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.bfloat16, 3e-2)], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_slices_equal_the_whole(
    name: str,
    first_key: Tensor,
    batch: int,
    dtype: torch.dtype,
    bound: float,
    apart: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = kernel_choice.KERNELS[name]
    case = make_case((batch, 4, 2, LENGTH, 16, 16), first_key, [0, 1, 12, 29, LENGTH], dtype, sinks=True)
    found = run_on_kernel(HeadsApart(kernel) if apart else kernel, InFloat64(), monkeypatch, case)
    assert distance(found, case.reference()) < bound


@pytest.mark.more
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch.compile
def test_slices_equal_the_whole_with_compiled_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merges and sums of heads, compiled as on a GPU, are those uncompiled; one kernel for each, whatever the slice."""
    compiled = kernel_passes._Passes(*(torch.compile(each, dynamic=True) for each in kernel_passes._PLAIN))  # type: ignore[arg-type]
    monkeypatch.setattr(kernel_passes, "_passes", lambda device: compiled)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    case = make_case((1, 4, 2, LENGTH, 16, 16), CAUSAL, [0, 3, 12, 29, LENGTH], sinks=True)
    kernel = HeadsApart(kernel_choice.KERNELS["cudnn"])
    torch._inductor.metrics.reset()
    assert distance(run_on_kernel(kernel, InFloat64(), monkeypatch, case), case.reference()) < 1e-12
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 3 <= graphs <= 6  # far from as many as are compiled at most
    assert torch._inductor.metrics.generated_kernel_count <= 2 * graphs  # merged outputs, and log-sum-exps
    device = torch.device("cpu")
    for mine, plain in zip(
        kernel_passes._tried(compiled, device), kernel_passes._tried(kernel_passes._PLAIN, device), strict=True
    ):
        torch.testing.assert_close(mine, plain, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("apart", [False, True], ids=["together", "heads apart"])
def test_slices_round_gradients_of_keys_as_often_as_the_whole(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the heads of a group apart: else a slice's share is rounded once more than in one piece."""
    shape, length = (1, 8, 2, 256, 16, 16), 256
    whole, cut = (
        make_case(shape, torch.zeros(1, length, dtype=torch.int64), cuts, torch.bfloat16)
        for cuts in ([0, length], list(range(0, length + 1, 32)))
    )
    flash = kernel_choice.KERNELS["flash"]
    exact = whole.reference()[2:]

    def errors(kernel: kernels.FusedKernel, case: AttentionCase) -> list[float]:
        found = run_on_kernel(kernel, Rounding(), monkeypatch, case)[2:]
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]

    for sliced, unsliced in zip(errors(HeadsApart(flash) if apart else flash, cut), errors(flash, whole), strict=True):
        assert (sliced < 1.02 * unsliced) == apart, (sliced, unsliced)


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
