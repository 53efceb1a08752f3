"""Kernels of packages compute what the masked math does, and the fastest one that is right is chosen, once."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.attention import kernel_choice
from slipstream.attention import kernels as flash_packages
from slipstream.attention.backend import QueryState
from slipstream.attention.kernels import FusedKernel
from slipstream.attention.masks import RegularMask

_OPTIONS = (
    "Tensor? k_new = None, Tensor? v_new = None, Tensor? q_v = None, Tensor? out = None, Tensor? cu_seqlens_q = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, int window_size_right = -1, "
    "int attention_chunk = 0, float softcap = 0.0, int num_splits = 0, int sm_margin = 0"
)
# A part of what the package declares; its order is the package's
_FORWARD = f"fwd(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)"
_BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq = None, "
    "Tensor(b!)? dk = None, Tensor(c!)? dv = None, float? softmax_scale = None, bool is_causal = False, "
    "int window_size_left = -1, int window_size_right = -1, float softcap = 0.0, bool deterministic = False, "
    "int sm_margin = 0) -> Tensor"
)


def attention(query: Tensor, key: Tensor, value: Tensor, left: int, scale: float) -> tuple[Tensor, Tensor]:
    """Returns output and log-sum-exp of (B,T,H,D), each query seeing `left` keys before its own, all if below 0."""
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    group = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(group, 1) for each in (key, value))
    ages = torch.arange(query.shape[2])[:, None] + key.shape[2] - query.shape[2] - torch.arange(key.shape[2])
    hidden = (ages < 0) | (ages > left if left >= 0 else torch.tensor(False))
    scores = (scale * query @ key.mT).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2), scores.logsumexp(-1)


def gradients(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, left: int, scale: float) -> tuple[Tensor, ...]:
    leaves = [each.detach().requires_grad_() for each in (query, key, value)]
    with torch.enable_grad():
        output, _ = attention(*leaves, left, scale)
    return torch.autograd.grad(output, leaves, grad)


@pytest.fixture
def flash_3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FusedKernel]:
    """FlashAttention-3's operators, by plain math."""
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define(_FORWARD)
    library.define(_BACKWARD)

    def forward(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, ...]:
        scale, is_causal, left, right = options[5:9]  # operators get them by position
        assert (is_causal, right) == (True, 0)
        found = attention(query, key, value, left, scale)
        return *found, query.new_empty(0), query.new_empty(0)

    def backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *given: Any) -> Tensor:
        totals, (scale, is_causal, left, right) = given[2:5], given[5:9]
        assert (is_causal, right) == (True, 0)
        for total, gradient in zip(totals, gradients(query, key, value, grad, left, scale), strict=True):
            total.copy_(gradient)
        return query.new_empty(0)

    library.impl("fwd", forward, "CPU")
    library.impl("bwd", backward, "CPU")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    yield flash_packages.Flash3Kernel(sys.modules["flash_attn_interface"])
    library._destroy()  # type: ignore[no-untyped-call]


@pytest.fixture
def flash_4() -> FusedKernel:
    """The functions of FlashAttention-4's module, by plain math."""
    module = ModuleType("flash_attn.cute.interface")

    def forward(
        q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, return_lse: bool, **window: int
    ) -> tuple[Tensor, Tensor]:
        assert causal
        assert return_lse
        return attention(q, k, v, window.get("window_size_left", -1), softmax_scale)

    def backward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        softmax_scale: float,
        causal: bool,
        **window: int,
    ) -> tuple[Tensor, ...]:
        assert causal
        assert out.shape == dout.shape
        assert lse.is_contiguous()
        return gradients(q, k, v, dout, window.get("window_size_left", -1), softmax_scale)

    vars(module).update(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    return flash_packages.Flash4Kernel(module)


@pytest.mark.parametrize("name", ["flash_3", "flash_4"])
@pytest.mark.parametrize("mask", [RegularMask(0, 5), RegularMask(0, 0), RegularMask(0, 7, window=3)], ids=str)
def test_kernels_of_packages_take_a_slice_in_one_call(
    name: str, mask: RegularMask, request: pytest.FixtureRequest
) -> None:
    kernel: FusedKernel = request.getfixturevalue(name)
    query, grad = (torch.randn(2, 4, 6, 8, dtype=torch.float64) for _ in range(2))
    key, value = (torch.randn(2, 2, mask.past + 6, 8, dtype=torch.float64) for _ in range(2))
    output, logsumexp = kernel.forward(query, key, value, mask, 0.3)
    left = -1 if mask.window is None else mask.window - 1
    inputs = [each.transpose(1, 2) for each in (query, key, value)]
    expected, expected_lse = attention(*inputs, left, 0.3)
    torch.testing.assert_close(output.transpose(1, 2), expected)
    torch.testing.assert_close(logsumexp, expected_lse)
    found, (keys,) = kernel.backward(QueryState(query, output, logsumexp, grad), key, value, mask, 0.3)
    wanted = [each.transpose(1, 2) for each in gradients(*inputs, grad.transpose(1, 2), left, 0.3)]
    for mine, theirs in zip([found, keys.key, keys.value], wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_packages_that_are_not_here_or_broken_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flash_packages._installed.cache_clear()
    assert flash_packages.package_kernels(9) == {}
    flash_packages._installed.cache_clear()
    (tmp_path / "flash_attn_interface.py").write_text("raise OSError('libcudart.so.12 is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    with caplog.at_level("INFO"):
        assert flash_packages.package_kernels(9) == {}
    assert "flash_attn_interface isn't used: OSError: libcudart.so.12 is missing" in caplog.text
    flash_packages._installed.cache_clear()


def test_kernels_that_the_gpu_cannot_run_or_not_twice_alike_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_packages, "_installed", lambda name: name)
    assert list(flash_packages.package_kernels(9)) == ["flash 3", "flash 4"]
    assert list(flash_packages.package_kernels(10)) == ["flash 4"]
    assert list(flash_packages.package_kernels(8)) == []
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert list(flash_packages.package_kernels(9)) == ["flash 3"]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is measured, with FlashAttention-3 as the fastest and cuDNN refusing."""
    names: list[str] = []
    milliseconds = {"Flash": 2.0, "Flash3": 1.0, "Cudnn": None}

    def measure(kernel: FusedKernel, *_: object) -> float | None:
        names.append(kernel_choice._name(kernel))
        return milliseconds[names[-1]]

    class Flash3Kernel: ...

    kernel = Flash3Kernel()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_choice, "_milliseconds", measure)
    monkeypatch.setattr(kernel_choice, "_capability", lambda device: 9)
    monkeypatch.setattr(kernel_choice, "_hardware", lambda device: "a GPU")
    monkeypatch.setattr(kernel_choice, "_cudnn_takes", lambda width, *lengths: lengths[0] % 64 == 0)
    monkeypatch.setattr(kernel_choice, "package_kernels", lambda capability: {"flash 3": kernel})
    for name in ("_known", "_measured"):
        monkeypatch.setattr(kernel_choice, name, {})
    kernel_choice._choose.cache_clear()
    yield names
    kernel_choice._choose.cache_clear()  # other tests on a GPU measure for themselves


def test_the_fastest_kernel_is_measured_once_for_each_shape(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(length: int, window: int | None = None) -> str:
        query = torch.empty(1, 4, length, 64, dtype=torch.bfloat16)
        return kernel_choice._name(kernel_choice.choose_kernel(query, 4, RegularMask(0, 64, window)))

    assert choose(60) == "Flash3"
    assert measured == ["Flash", "Flash3"]
    assert choose(64) == "Flash3"  # of the same shape, but cuDNN's turn too
    assert measured == ["Flash", "Flash3", "Cudnn"]
    assert choose(64, window=16) == "Flash3"
    assert measured[3:] == ["Flash", "Flash3"]
    kept = json.loads(kernel_choice.kept_file().read_text())["a GPU"]
    assert kept["bfloat16 4/4 heads of 64, 64 tokens, 128 keys"] == {"flash": 2.0, "flash 3": 1.0, "cudnn": None}
    monkeypatch.setattr(kernel_choice, "_measured", {})  # as in another process
    kernel_choice._choose.cache_clear()
    assert choose(64) == "Flash3"
    assert len(measured) == 5
    assert kernel_choice.chosen_kernels() == dict.fromkeys(kept, "flash 3")


@pytest.mark.parametrize(("milliseconds", "apart"), [(1.02, True), (1.04, False), (None, False)], ids=str)
def test_heads_stay_apart_where_that_takes_little_longer(
    milliseconds: float | None, apart: bool, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a few key heads for more query heads, unless the gradients of each would need too much memory."""
    times = {"Flash": 1.0, "Flash, heads apart": milliseconds}
    monkeypatch.setattr(kernel_choice, "_milliseconds", lambda kernel, *_: times[kernel_choice._name(kernel)])
    monkeypatch.setattr(kernel_choice, "package_kernels", lambda capability: {})
    monkeypatch.setattr(kernel_choice, "_cudnn_takes", lambda *_: False)
    query = torch.empty(1, 4, 64, 64, dtype=torch.bfloat16)
    chosen = kernel_choice.choose_kernel(query, 2, RegularMask(0, 64))
    assert kernel_choice._name(chosen) == ("Flash, heads apart" if apart else "Flash")
    long = RegularMask(0, kernel_choice._MOST_APART // (4 * 64))
    assert kernel_choice._name(kernel_choice.choose_kernel(query, 2, long)) == "Flash"


def test_a_file_of_another_version_is_measured_again(measured: list[str]) -> None:
    kernel_choice.kept_file().parent.mkdir()
    kernel_choice.kept_file().write_text(
        json.dumps({"a GPU": {"bfloat16 4/4 heads of 64, 64 tokens, 64 keys": "flash"}})
    )
    kernel_choice.choose_kernel(torch.empty(1, 4, 60, 64, dtype=torch.bfloat16), 4, RegularMask(0, 0))
    assert measured == ["Flash", "Flash3"]


def test_kernels_agree_but_for_rounding() -> None:
    expected = torch.randn(100)
    assert kernel_choice.agrees([expected.bfloat16()], [expected])
    assert not kernel_choice.agrees([expected, 1.1 * expected], [expected, expected])
    assert not kernel_choice.agrees([torch.full((3,), torch.nan)], [torch.ones(3)])


def test_a_kernel_that_is_wrong_or_fails_is_not_timed(
    flash_4: FusedKernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(flash_packages.Flash4Kernel):
        def forward(self, *given: Any) -> tuple[Tensor, Tensor]:
            output, logsumexp = super().forward(*given)
            return output.roll(1, 2), logsumexp

    class Failing(flash_packages.Flash4Kernel):
        def backward(self, *given: Any) -> Tensor:
            raise TypeError("no such head width")

    monkeypatch.setattr(kernel_choice, "KERNELS", {"flash": flash_4})
    monkeypatch.setattr(kernel_choice, "_timed", lambda run, device: 0.002)
    kernels = [flash_4, *(object.__new__(each) for each in (Wrong, Failing))]
    for each in kernels[1:]:
        vars(each).update(vars(flash_4))
    shape = kernel_choice.AttentionShape("float32", 4, 2, 16, 8, 32)
    with caplog.at_level("INFO"):
        found = [kernel_choice._milliseconds(each, shape, torch.device("cpu")) for each in kernels]
    assert found == [2.0, None, None]
    assert "by Wrong isn't used: it differs from FlashAttention" in caplog.text
    assert "can't be computed by Failing: no such head width" in caplog.text
