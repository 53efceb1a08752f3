"""On a GPU, flash attention and masked math in slices equal plain attention; skipped without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.attention import AttentionSite, ContextStore, KeyRanges, fused_cuda, kernel_choice, slice_attention
from slipstream.attention.flex import FlexCUDA
from slipstream.attention.fused_cuda import FusedCUDA
from slipstream.attention.kernel_passes import _PLAIN, _passes, _tried
from slipstream.attention.kernels import HeadsApart
from support.attention import distance, make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # of torch.compile
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTH = 700
POSITION = torch.arange(LENGTH)
MASKS = {
    "causal": torch.zeros(1, LENGTH, dtype=torch.int64),
    "window": (POSITION - 255).clamp(min=0)[None],
    "chunks": (POSITION // 128 * 128)[None],
    "rows": torch.stack([POSITION // 128 * 128, POSITION // 300 * 300]),
    "irregular": torch.maximum((POSITION - 255).clamp(min=0), POSITION // 300 * 300)[None],
}


@pytest.mark.parametrize("first_key", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("widths", [(64, 64), (72, 40), (20, 20)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_flash(first_key: Tensor, widths: tuple[int, int], dtype: torch.dtype) -> None:
    case = make_case((2, 4, 2, LENGTH, *widths), first_key, [0, 1, 20, 350, LENGTH], dtype, "cuda", sinks=True)
    site = AttentionSite(ContextStore(LENGTH), "layer", KeyRanges(first_key, 0), scale=0.3)
    backend = next(kind for kind in slice_attention.BACKENDS if kind.takes(case.query, case.value, site))
    assert backend is (FlexCUDA if first_key is MASKS["irregular"] else FusedCUDA)
    assert distance(case.sliced(), case.reference()) < (2e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("first_key", [MASKS["causal"], MASKS["irregular"]], ids=["causal", "irregular"])
def test_soft_caps_take_a_compiled_kernel(first_key: Tensor) -> None:
    shape, cuts = (2, 4, 2, LENGTH, 64, 64), [0, 20, 350, LENGTH]
    case = make_case(shape, first_key, cuts, torch.bfloat16, "cuda", sinks=True, softcap=5.0)
    site = AttentionSite(ContextStore(LENGTH), "layer", KeyRanges(first_key, 0), scale=0.3, softcap=5.0)
    assert next(kind for kind in slice_attention.BACKENDS if kind.takes(case.query, case.value, site)) is FlexCUDA
    assert distance(case.sliced(), case.reference()) < 2e-2


KERNELS = kernel_choice.KERNELS | {"flash, heads apart": HeadsApart(kernel_choice.KERNELS["flash"])}


@pytest.mark.parametrize("kernel", sorted(KERNELS))
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("width", [64, 128])
def test_each_fused_kernel(kernel: str, rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On slices of lengths for which all of them are tried."""
    shape, first_key = (rows, 4, 2, 704, width, width), torch.zeros(1, 704, dtype=torch.int64)
    case = make_case(shape, first_key, [0, 64, 320, 704], torch.bfloat16, "cuda")
    monkeypatch.setattr(fused_cuda, "choose_kernel", lambda *_: KERNELS[kernel])
    assert distance(case.sliced(), case.reference()) < 2e-2


def test_what_surrounds_kernels_is_compiled() -> None:
    device = torch.device("cuda")
    passes = _passes(device)
    assert passes is not _PLAIN
    assert distance(_tried(passes, device), [each.double() for each in _tried(_PLAIN, device)]) < 2e-2


def test_the_fastest_kernel_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("_known", "_measured"):
        monkeypatch.setattr(kernel_choice, name, {})
    kernel_choice._choose.cache_clear()
    query = torch.zeros(1, 4, 128, 64, dtype=torch.bfloat16, device="cuda")
    mask = KeyRanges.causal(128, 256).regular
    assert mask is not None
    chosen = kernel_choice.choose_kernel(query, 2, mask)
    monkeypatch.setattr(kernel_choice, "_measured", {})
    kernel_choice._choose.cache_clear()
    monkeypatch.setattr(kernel_choice, "_milliseconds", None)  # must not be called again
    assert kernel_choice.choose_kernel(query, 2, mask) is chosen
    assert list(kernel_choice.chosen_kernels()) == ["bfloat16 4/2 heads of 64, 128 tokens, 256 keys"]


@pytest.mark.parametrize("first_key", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-4)], ids=str)
def test_masked_math(first_key: Tensor, softcap: float | None, dtype: torch.dtype, bound: float) -> None:
    shape = (2, 4, 2, LENGTH, 16, 12)
    case = make_case(shape, first_key, [0, 20, 350, LENGTH], dtype, "cuda", sinks=True, softcap=softcap)
    assert distance(case.sliced(), case.reference()) < bound


def test_dropout_replays() -> None:
    case = make_case((1, 2, 2, 100, 8, 8), MASKS["causal"][:, :100], [0, 40, 100], torch.float32, "cuda", dropout=0.5)
    assert all(torch.equal(a, b) for a, b in zip(case.sliced(), case.sliced(), strict=True))
