"""Compiled masks and soft caps, on a CPU without their compiler: the same code with PyTorch's plain computation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from slipstream.attention import AttentionSite, ContextStore, KeyRanges, flex
from slipstream.attention.backend import KeySums, QueryState
from slipstream.attention.masked_math import MaskedMath

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")


def dense(query: Tensor, key: Tensor, value: Tensor, *, score_mod: Any, block_mask: Any, **options: Any) -> Any:
    """What flex_attention returns, by autograd's own operations, which a CPU can differentiate."""
    group, size = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
    scores = query @ key.repeat_interleave(group, 1).mT * options["scale"]
    if score_mod is not None:
        scores = score_mod(scores, None, None, None, None)
    places = torch.arange(size[0])[:, None], torch.arange(size[1])[None]
    rows = [block_mask.mask_mod(torch.tensor(row), None, *places) for row in range(query.shape[0])]
    scores = scores.masked_fill(~torch.stack(rows)[:, None], -torch.inf)
    output = scores.softmax(-1) @ value.repeat_interleave(group, 1)
    return output, type("Aux", (), {"lse": scores.logsumexp(-1)})


@st.composite
def slices(draw: Any) -> tuple[KeyRanges, int]:
    """A slice of a sequence with documents and a window, the same in both rows or not, and its batch size."""
    length = draw(st.integers(2, 500))
    start = draw(st.integers(0, length - 1))
    end = draw(st.integers(start + 1, length))
    window = draw(st.integers(1, length))
    documents = [draw(st.integers(1, length)) for _ in range(draw(st.integers(1, 2)))]
    position = torch.arange(length)
    first_key = torch.stack([torch.maximum(position // each * each, position - window + 1) for each in documents])
    return KeyRanges(first_key[:, start:end].clamp(min=0), start), 2


def inputs(ranges: KeyRanges, batch: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    length, num_keys = ranges.end - ranges.start, ranges.end - ranges.first
    sizes = (4, length), (2, num_keys), (2, num_keys), (4, length)
    return [torch.randn(batch, *size, 16, generator=generator, dtype=torch.float64) for size in sizes]


@pytest.mark.more
@given(slices(), st.sampled_from([None, 5.0]), st.integers(0, 1000))
def test_the_mask_has_the_blocks_that_are_seen(case: tuple[KeyRanges, int], softcap: float | None, seed: int) -> None:
    """By flex_attention itself, which reads only the blocks that it is given."""
    ranges, batch = case
    query, key, value, _ = inputs(ranges, batch, seed)
    site = AttentionSite(ContextStore(ranges.end), 0, ranges, 0.3, softcap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "_compiled", lambda: flex_attention)
        output, _ = flex.FlexCUDA(site).attend(query, key, value)
    wanted, _ = MaskedMath(site).attend(query, key, value)
    assert torch.allclose(output, wanted, atol=1e-12)
    blocks = flex._block_mask(ranges, torch.device("cpu")).to_dense()[:, 0]
    own = torch.arange(ranges.start, ranges.end)[:, None]
    keys = torch.arange(ranges.first, ranges.end)
    seen = (keys <= own) & (keys >= ranges.first_key[..., None])
    for row, query_block, key_block in (~blocks.bool()).nonzero().tolist():
        part = seen[row, query_block * 128 : query_block * 128 + 128, key_block * 128 : key_block * 128 + 128]
        assert not part.any()


@given(slices(), st.sampled_from([None, 5.0]), st.booleans(), st.integers(0, 1000))
def test_gradients_with_a_sink(case: tuple[KeyRanges, int], softcap: float | None, sink: bool, seed: int) -> None:
    """Where a sink takes probability, the slice's log-sum-exp isn't the kernel's."""
    ranges, batch = case
    query, key, value, grad = inputs(ranges, batch, seed)
    site = AttentionSite(ContextStore(ranges.end), 0, ranges, 0.3, softcap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "_compiled", lambda: dense)
        output, logsumexp = flex.FlexCUDA(site).attend(query, key, value)
        leaves = [each.clone().requires_grad_() for each in (query, key, value)]
        found, lse = dense(
            *leaves,
            score_mod=None if softcap is None else flex._capped(softcap),
            block_mask=flex._block_mask(ranges, torch.device("cpu")),
            scale=0.3,
            return_aux=AuxRequest(lse=True),
        )
        with_sink = found * torch.sigmoid(lse.lse - 0.5)[..., None] if sink else found
        if sink:
            output = output * torch.sigmoid(logsumexp - 0.5)[..., None]
            logsumexp = torch.logaddexp(logsumexp, torch.full((), 0.5, dtype=torch.float64))
        sums = KeySums(torch.zeros_like(key), torch.zeros_like(value))
        queries = QueryState(query, output, logsumexp, grad)
        (grad_query,) = flex.FlexCUDA(site).differentiate(queries, key, value, sums)
    wanted = torch.autograd.grad(with_sink, leaves, grad)
    for ours, theirs in zip((grad_query, *sums), wanted, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)  # `differentiate` weighs gradients in float32
