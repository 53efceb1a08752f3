"""The reference that exactness is measured against stays in float64 throughout."""

from __future__ import annotations

import torch
from torch.utils._device import _device_constructors

from slipstream.model.toy import full_precision


def test_float64_stays_float64() -> None:
    wide, narrow = torch.rand(2, 3, dtype=torch.float64), torch.rand(3, 2)
    with full_precision():
        kept = (
            wide.float(),
            wide.to(torch.float32),
            wide.to(dtype=torch.float32),
            torch.nn.functional.softmax(wide, dim=-1, dtype=torch.float32),
            wide @ narrow,
            narrow @ wide,
            torch.sum(wide, dim=0, dtype=torch.float32),
        )
        assert narrow.float().dtype == (narrow @ narrow.T).dtype == torch.float32
    assert {tensor.dtype for tensor in kept} == {torch.float64}
    assert torch.equal(kept[4], wide @ narrow.double())
    assert wide.float().dtype == torch.float32


def test_full_precision_leaves_devices_alone() -> None:
    _device_constructors.cache_clear()  # as in a process that hasn't made a tensor on another device yet
    with full_precision(), torch.device("meta"):
        assert torch.full((2,), 1.0).is_meta
    with torch.device("meta"):
        assert torch.full((2,), 1.0).is_meta
