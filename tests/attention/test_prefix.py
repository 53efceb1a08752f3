"""Keys and values of all tokens so far, slice by slice, have the gradients of those of the whole sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.attention import ContextError, ContextStore, KeyRanges, read_prefix

CUTS = [(0, 3), (3, 4), (4, 9), (9, 12)]
LENGTH = 12


def attention(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    return (query @ keys.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ values


def whole_mask(first_keys: Tensor) -> Tensor:
    """Which keys each query sees: (rows, 1, queries, keys)."""
    keys = torch.arange(LENGTH)
    return ((keys >= first_keys[..., None]) & (keys <= keys[:, None]))[:, None]


def make() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, LENGTH, 4), (2, 3, LENGTH, 4), (2, 3, LENGTH, 5)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


CAUSAL = torch.zeros(1, LENGTH, dtype=torch.int64)
DOCUMENTS = torch.tensor([[0] * 4 + [4] * 8, [0] * 5 + [5] * 7])


@pytest.mark.parametrize("first_keys", [CAUSAL, DOCUMENTS], ids=["causal", "documents"])
def test_gradients_are_those_of_the_whole_sequence(first_keys: Tensor) -> None:
    query, key, value = make()
    seen, weights = whole_mask(first_keys), torch.linspace(-1, 1, 2 * 3 * LENGTH * 5).view(2, 3, LENGTH, 5).double()
    expected = torch.autograd.grad((attention(query, key, value, seen) * weights).sum(), (query, key, value))
    store, outputs = ContextStore(LENGTH), []
    for a, b in CUTS:
        ranges = KeyRanges(first_keys[:, a:b], a)
        keys, values = read_prefix(key[:, :, a:b], value[:, :, a:b], store, "call", ranges)
        assert torch.equal(keys[:, :, ranges.first :], key[:, :, ranges.first : b])
        outputs.append(attention(query[:, :, a:b], keys, values, seen[:, :, a:b, :b]))
    for (a, b), output in reversed(list(zip(CUTS, outputs, strict=True))):
        (output * weights[:, :, a:b]).sum().backward()
    for tensor, gradient in zip((query, key, value), expected, strict=True):
        torch.testing.assert_close(tensor.grad, gradient, rtol=1e-12, atol=1e-12)
    assert store.num_bytes == 0


def test_slices_of_other_documents_may_run_in_any_order() -> None:
    """What comes before a slice's documents needn't be there."""
    _, key, value = make()
    keys, _ = read_prefix(key[:, :, 4:], value[:, :, 4:], ContextStore(LENGTH), "call", KeyRanges(DOCUMENTS[:1, 4:], 4))
    assert torch.equal(keys[:, :, 4:], key[:, :, 4:])
    assert not keys[:, :, :4].any()


def test_an_order_against_the_rules_is_an_error() -> None:
    _, key, value = make()
    store = ContextStore(LENGTH)
    first, _ = read_prefix(key[:, :, :5], value[:, :, :5], store, "call", KeyRanges.causal(0, 5))
    read_prefix(key[:, :, 5:], value[:, :, 5:], store, "call", KeyRanges.causal(5, LENGTH))
    with pytest.raises(ContextError, match="runs backward before the slice"):
        first.sum().backward()
    with pytest.raises(ContextError, match="0 isn't written yet"):
        read_prefix(key[:, :, 5:], value[:, :, 5:], ContextStore(LENGTH), "call", KeyRanges.causal(5, LENGTH))
