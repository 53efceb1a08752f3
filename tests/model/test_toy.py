"""The reference that exactness is measured against stays in float64 throughout."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

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
    with full_precision(), torch.device("meta"):
        assert torch.full((2,), 1.0).is_meta


def test_full_precision_leaves_other_threads_alone() -> None:
    wide = torch.rand(2, 3, dtype=torch.float64)
    with full_precision(), ThreadPoolExecutor(1) as thread:
        assert thread.submit(wide.float).result().dtype == torch.float32
