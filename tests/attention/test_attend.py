"""Attention in slices gives the outputs and gradients of plain masked softmax attention over the whole sequence."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.attention import (
    AttentionSite,
    ContextStore,
    KeyRanges,
    attend,
    flash_cpu,
    fused_cuda,
    masked_math,
    slice_attention,
)
from slipstream.attention import masks as key_ranges
from slipstream.attention.backend import QueryState
from slipstream.attention.fused_cuda import PartlyFusedCUDA
from slipstream.attention.kernel_passes import KeyGradients
from slipstream.attention.key_blocks import context_on_host
from slipstream.attention.masked_math import MaskedMath
from slipstream.attention.masks import RegularMask
from slipstream.errors import SlipstreamError
from slipstream.keyed_draws import PlaceSeed
from slipstream.options import tokens_on_host
from support.attention import distance, make_case
from support.examples import examples
from support.parameters import each_once


@pytest.fixture(scope="module")
def small_tiles() -> Iterator[None]:
    """Sizes at which short sequences have every kind of tile, part and block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_ranges, "SHORTEST_RUN", 3)
        patch.setattr(key_ranges, "MASKED_ROWS", 6)
        patch.setattr(key_ranges, "SQUARE", 5)
        patch.setattr(flash_cpu, "KEYS_AT_ONCE", 7)
        patch.setattr(flash_cpu, "ROWS_AT_ONCE", 7)
        patch.setattr(masked_math, "SCORES_AT_ONCE", 100)
        yield


def only_masked_math(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(slice_attention, "BACKENDS", (MaskedMath,))


def causal(length: int) -> Tensor:
    return torch.zeros(1, length, dtype=torch.int64)


def window(length: int, size: int) -> Tensor:
    return (torch.arange(length) - size + 1).clamp(min=0)[None]


def documents(length: int, starts: list[int]) -> Tensor:
    return torch.tensor([[max([0, *(s for s in starts if s <= q)]) for q in range(length)]])


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    length, batch, key_heads = draw(st.integers(2, 40)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    positions = st.sets(st.integers(1, length - 1), max_size=5).map(sorted)
    masks = [causal(length), window(length, draw(st.integers(1, length)))]
    size = draw(st.integers(1, length))
    masks.append((torch.arange(length) // size * size)[None])  # chunked attention
    masks.append(documents(length, draw(positions)))
    masks.append(torch.maximum(masks[1], masks[3]))  # documents under a window
    masks.append(torch.cat([documents(length, draw(positions)) for _ in range(batch)]))  # of each row its own
    return {
        "shape": (
            batch,
            key_heads * draw(st.integers(1, 3)),
            key_heads,
            length,
            draw(st.integers(1, 9)),
            draw(st.integers(1, 9)),
        ),
        "first_key": draw(st.sampled_from(masks)),
        "cuts": [0, *draw(positions), length],
        "sinks": draw(st.booleans()),
        "scale": draw(st.floats(0.05, 2.0)),
    }


@pytest.mark.usefixtures("small_tiles")
class TestExact:
    @examples(150)
    @given(cases())
    def test_flash_parts_equal_plain_attention(self, case: dict[str, Any]) -> None:
        case = make_case(**case)
        assert distance(case.sliced(), case.reference()) < 1e-12

    @examples(100)
    @given(cases(), st.none() | st.floats(0.5, 20.0))
    def test_masked_math_equals_plain_attention(self, case: dict[str, Any], softcap: float | None) -> None:
        with pytest.MonkeyPatch.context() as patch:
            only_masked_math(patch)
            case = make_case(**case, softcap=softcap)
            assert distance(case.sliced(), case.reference()) < 1e-12

    @examples(150)
    @given(cases(), st.none() | st.floats(0.5, 20.0), st.none() | st.floats(0, 1))
    def test_blocks_on_the_host_equal_plain_attention(
        self, case: dict[str, Any], softcap: float | None, share: float | None
    ) -> None:
        """By the kernel's parts, or with a soft cap by formulas: block after block, each with its sums; all of them, or
        a share beside buffers on the device."""
        case = make_case(**case, **({} if softcap is None else {"softcap": softcap}))
        slices = [after - before for before, after in pairwise(case.cuts)]
        num_on_host = None if share is None else tokens_on_host(slices, share)
        store = ContextStore(sum(slices), context_on_host(torch.device("cpu")), num_on_host=num_on_host)
        assert distance(case.sliced(store), case.reference()) < 1e-12
        assert store.host_bytes == 0


class PlainKernel:
    """A fused kernel by its formulas, where every head of queries has its own of keys."""

    def __init__(self) -> None:
        self.num_calls = 0

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: RegularMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        self.num_calls += 1
        scores = self._scores(query, key, mask, scale)
        return scores.softmax(-1) @ value, scores.logsumexp(-1)

    def backward(
        self, queries: QueryState, key: Tensor, value: Tensor, mask: RegularMask, scale: float
    ) -> tuple[Tensor, list[KeyGradients]]:
        self.num_calls += 1
        query, output, logsumexp, grad = queries
        probabilities = (self._scores(query, key, mask, scale) - logsumexp[..., None]).exp()
        change = probabilities * (grad @ value.mT - (grad * output).sum(-1, keepdim=True))
        return scale * change @ key, [KeyGradients(0, scale * change.mT @ query, probabilities.mT @ grad)]

    def _scores(self, query: Tensor, key: Tensor, mask: RegularMask, scale: float) -> Tensor:
        assert key.shape[2] == mask.past + query.shape[2]  # from the first key that any query sees
        place, keys = mask.past + torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])
        seen = (keys <= place) & (keys > place - (mask.window or key.shape[2]))
        return (scale * query @ key.mT).masked_fill(~seen, -torch.inf)


@pytest.mark.parametrize(("mask", "num_whole"), [("causal", 6), ("window", 6), ("documents", 4)])
def test_a_fused_kernel_takes_slices_whole(mask: str, num_whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: a slice with a regular mask in one call forward and one backward, others tile by tile."""
    whole = PlainKernel()
    monkeypatch.setattr(PartlyFusedCUDA, "takes", lambda *_: True)
    monkeypatch.setattr(slice_attention, "BACKENDS", (PartlyFusedCUDA,))
    monkeypatch.setattr(fused_cuda, "choose_kernel", lambda *_: whole)
    monkeypatch.setitem(fused_cuda.KERNELS, "flash", PlainKernel())  # of tiles
    first_key = {"causal": causal(48), "window": window(48, 10), "documents": documents(48, [20, 30])}[mask]
    case = make_case((2, 2, 2, 48, 16, 16), first_key, [0, 13, 32, 48], sinks=True)
    assert distance(case.sliced(), case.reference()) < 1e-12
    assert whole.num_calls == num_whole


LENGTH = 700  # with cuts that need several squares and a long past
MASKS = {
    "causal": causal(LENGTH),
    "window": window(LENGTH, 256),
    "narrow window": window(LENGTH, 60),
    "documents": documents(LENGTH, [90, 100, 330, 600]),
}


@pytest.mark.parametrize(
    ("mask", "dtype", "bound"),
    each_once(MASKS, [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]),
    ids=str,
)
def test_every_dtype_at_real_tile_sizes(mask: str, dtype: torch.dtype, bound: float) -> None:
    for softcap in (None, 5.0):  # with one, by masked math
        shape, cuts = (1, 4, 2, LENGTH, 16, 16), [0, 20, 350, LENGTH]
        case = make_case(shape, MASKS[mask], cuts, dtype, sinks=True, softcap=softcap)
        sliced = case.sliced()
        assert {t.dtype for t in sliced} == {dtype}
        assert distance(sliced, case.reference()) < bound


def test_inputs_and_gradients_may_have_any_layout() -> None:
    case = make_case((2, 4, 2, 60, 8, 8), causal(60), [0, 30, 60])
    reference = case.reference()
    for name in ("query", "key", "value"):
        transposed = getattr(case, name).transpose(1, 2).contiguous().transpose(1, 2)  # as models give them
        setattr(case, name, transposed)
    case.grad = case.grad[:, :, :1, :1].expand_as(case.grad)  # as a sum's gradient: no strides at all
    reference = case.reference()
    assert distance(case.sliced(), reference) < 1e-12


@pytest.mark.parametrize("frozen", [["query"], ["key"], ["value"], ["key", "value"], ["query", "key"]])
def test_frozen_inputs_leave_the_other_gradients_alone(frozen: list[str]) -> None:
    def run(frozen: list[str]) -> dict[str, Tensor | None]:
        generator = torch.Generator().manual_seed(0)
        inputs = {
            name: torch.randn(1, 2, 20, 4, generator=generator, dtype=torch.float64).requires_grad_(name not in frozen)
            for name in ("query", "key", "value")
        }
        store = ContextStore(20)
        outputs = [
            attend(*(t[:, :, a:b] for t in inputs.values()), AttentionSite(store, 0, KeyRanges.causal(a, b), scale=1.0))
            for a, b in ((0, 8), (8, 20))
        ]
        for output in reversed(outputs):
            output.square().sum().backward()
        assert not store.num_bytes
        return {name: t.grad for name, t in inputs.items()}

    whole, partial = run([]), run(frozen)
    for name in whole:
        assert partial[name] is None if name in frozen else torch.equal(partial[name], whole[name])


def test_autocast_computes_in_its_dtype() -> None:
    query, key = (torch.randn(1, 2, 12, 4, requires_grad=True) for _ in range(2))
    value = torch.randn(1, 2, 12, 4, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        site = AttentionSite(ContextStore(12), 0, KeyRanges.causal(0, 12), scale=1.0, softcap=5.0)
        output = attend(query, key, value, site)
        assert output.dtype == torch.bfloat16
        output.sum().backward()
    assert [t.grad.dtype for t in (query, key, value)] == [torch.float32, torch.float32, torch.bfloat16]


class TestDropout:
    @staticmethod
    def attend(query: Tensor, key: Tensor, value: Tensor, seed: int = 1) -> list[Tensor]:
        store, length = ContextStore(query.shape[2]), query.shape[2]
        return [
            attend(
                *(t[:, :, a:b] for t in (query, key, value)),
                AttentionSite(store, 0, KeyRanges.causal(a, b), scale=0.5, dropout=0.25, seed=PlaceSeed(seed, (a,))),
            )
            for a, b in ((0, length // 3), (length // 3, length))
        ]

    def test_weights_are_dropped_at_the_rate_and_the_rest_scaled(self) -> None:
        query, key = (torch.randn(2, 2, 90, 4) for _ in range(2))
        weights = torch.cat(self.attend(query, key, torch.eye(90).expand(2, 2, 90, 90)), 2)  # O = P
        full = ((query @ key.mT) * 0.5).masked_fill(~torch.ones(90, 90).tril().bool(), -torch.inf).softmax(-1)
        kept = weights != 0
        assert torch.allclose(weights[kept], (full / 0.75)[kept], rtol=1e-4)
        assert abs(kept.sum() / (full != 0).sum() - 0.75) < 0.02

    def test_backward_replays_the_same_mask(self) -> None:
        """The directional derivative by finite differences, which repeat the forward's draws."""
        inputs = [torch.randn(2, 4, 30, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        directions = [torch.randn_like(t) for t in inputs]

        def loss(step: float) -> Tensor:
            moved = (t + step * d for t, d in zip(inputs, directions, strict=True))
            return torch.cat(self.attend(*moved), 2).pow(2).sum()

        grads = torch.autograd.grad(loss(0.0), inputs)
        exact = sum((g * d).sum() for g, d in zip(grads, directions, strict=True))
        with torch.no_grad():
            measured = (loss(1e-5) - loss(-1e-5)) / 2e-5
        assert torch.isclose(exact, measured, rtol=1e-7)


class LargestStorage(TorchDispatchMode):
    """The bytes of the largest storage that an operator allocates."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.known = {t.untyped_storage().data_ptr() for t in known}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in self.known:
                self.bytes = max(self.bytes, each.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize(("first_key", "key_heads"), each_once([causal(4096), window(4096, 2000)], [1, 4]))
def test_no_prefix_is_copied(first_key: Tensor, key_heads: int) -> None:
    """A slice of 32 tokens after 4000: what it allocates is the size of the slice, not of the prefix."""
    generator = torch.Generator().manual_seed(0)
    spans = [slice(0, 2000), slice(2000, 4064), slice(4064, 4096)]
    store = ContextStore(4096)
    slices = [
        [
            torch.randn(1, heads, s.stop - s.start, 16, generator=generator, requires_grad=True)
            for heads in (4, key_heads, key_heads)
        ]
        for s in spans
    ]
    keys = [KeyRanges(first_key[:, s], s.start) for s in spans]
    for inputs, seen in zip(slices[:2], keys[:2], strict=True):
        attend(*inputs, AttentionSite(store, 0, seen, scale=0.25))
    context = store._contexts[0]
    one_slice = slices[2][0].nbytes
    with LargestStorage([*context.buffers, first_key]) as forward:
        output = attend(*slices[2], AttentionSite(store, 0, keys[2], scale=0.25))
    assert forward.bytes <= 2 * one_slice  # the prefix has 128 slices
    grad = torch.ones_like(output)
    with torch.no_grad():
        store.key_gradients(0, keys[2], keys[2])  # allocates the gradient buffers, once for the microbatch
    with LargestStorage([*context.buffers, first_key]) as backward:
        output.backward(grad)
    assert backward.bytes <= 2 * one_slice + flash_cpu.ROWS_AT_ONCE * 16 * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": (1, 3, 6, 4)}, "H a multiple of Hkv"),
        ({"key": (1, 2, 6, 5)}, r"give \(B,H,T,D\)"),
        ({"value": (1, 2, 5, 4)}, r"give \(B,H,T,D\)"),
        ({"query": (1, 4, 5, 4), "key": (1, 2, 5, 4), "value": (1, 2, 5, 4)}, r"\[2, 8\)"),
        ({"sinks": (3,)}, "one logit per head"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, tuple[int, ...]], message: str) -> None:
    shapes = {"query": (1, 4, 6, 4), "key": (1, 2, 6, 4), "value": (1, 2, 6, 4)} | change
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    with pytest.raises(SlipstreamError, match=message):
        attend(**tensors, site=AttentionSite(ContextStore(8), 0, KeyRanges.causal(2, 8), scale=1.0))


def test_mixed_dtypes_are_refused() -> None:
    tensors = [torch.zeros(1, 2, 8, 4, dtype=dtype) for dtype in (torch.float32, torch.float32, torch.float64)]
    with pytest.raises(SlipstreamError, match="give one dtype"):
        attend(*tensors, AttentionSite(ContextStore(8), 0, KeyRanges.causal(0, 8), scale=1.0))


def test_blocks_on_the_host_draw_different_dropout() -> None:
    """Four keys alike in each of two blocks, whose values tell from which block they are."""
    store = ContextStore(12, context_on_host(torch.device("cpu")))
    for start in (0, 4, 8):
        query = key = torch.zeros(1, 2, 4, 8)
        value = torch.zeros(1, 2, 4, 8)
        value[..., start // 4] = 1
        site = AttentionSite(store, 0, KeyRanges.causal(start, start + 4), 1.0, dropout=0.5, seed=PlaceSeed(1))
        output = attend(query, key, value, site)
    assert not torch.equal(output[..., 0], output[..., 1])
