"""Fused norms and activations are exact in any slices, compile once for all of them, and apply only where safe."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream import Op, SlipstreamError
from slipstream.model import (
    CausalLMStage,
    LayerRange,
    check_compiler,
    compiled_region,
    find_anatomy,
    fuse_kernels,
    fusion,
    random_model,
)
from slipstream.profile import count_model
from slipstream.profile.stage_bench import StageBench
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    LENGTH,
    build,
    gradient_error,
    gradients,
    labels_of,
    tokens,
    unsplit_step,
)
from support.fusing import COMPILING, compiles, in_slices
from support.parameters import first_of
from support.weights import undeferred_weights

pytestmark = COMPILING
ATTENTION = "self_attn"  # for its rotary embeddings
NORMS = ["input_layernorm", "post_attention_layernorm"]
FIRST_LAYER = {  # what is fused of it
    "llama": [ATTENTION, "mlp", *NORMS],
    "qwen3": [ATTENTION, "self_attn.q_norm", "self_attn.k_norm", "mlp", *NORMS],
    "qwen2_moe": [ATTENTION, "mlp.shared_expert", *NORMS],  # experts take tokens and their routes
    "gpt2": ["mlp"],  # PyTorch's layer norm is one kernel
    "mixtral": [ATTENTION, *NORMS],
    "gemma2": [ATTENTION, "mlp", *NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm"],
    "phi3, longrope": [ATTENTION, "mlp", *NORMS],
    "gpt_neox": ["attention"],  # and so is its GeLU
    "llama4_text": [  # experts are one product of 3-D tensors, and rotary embeddings one of complex numbers
        "self_attn.qk_norm",
        "feed_forward.shared_expert",
        *NORMS,
    ],
}


@pytest.mark.parametrize("name", FIRST_LAYER)
def test_what_is_fused(name: str) -> None:
    names = fuse_kernels(build(ARCHITECTURES[name]))
    prefix = {"gpt2": "transformer.h.0.", "gpt_neox": "gpt_neox.layers.0."}.get(name, "model.layers.0.")
    assert [each.removeprefix(prefix) for each in names if each.startswith(prefix)] == FIRST_LAYER[name]
    assert ("model.norm" in names) == bool(NORMS[0] in FIRST_LAYER[name])


@compiles
@pytest.mark.more
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", first_of(["llama", "qwen3", "gpt2", "gemma2"], 1, "grid"))
def test_gradients_are_those_of_the_unsplit_model(
    name: str, compiled: list[str], by_torch_compile: Callable[[], int]
) -> None:
    """With and without recomputation, whole backwards and split ones, in slices of many lengths: compiled once."""
    model = build(ARCHITECTURES[name])
    whole = copy.deepcopy(model)
    unsplit_step(whole, tokens(batch=4), labels_of(tokens(batch=4)))
    wanted = gradients(whole)
    fuse_kernels(model)
    for recompute in ("selective", "none"):  # neither compiled nor not before the first forward that is repeated
        pipe = in_slices(model, [5, 30, 17, 12], recompute=recompute)
        assert gradient_error(wanted, gradients(pipe)) < BOUND
    assert (after := len(compiled))
    for schedule in ("1f1b", "zb-h1"):
        for recompute in ("none", "selective", "full", 1):
            pipe = in_slices(model, [20, 9, 33, 2], schedule=schedule, recompute=recompute)
            assert gradient_error(wanted, gradients(pipe)) < BOUND
            # Under 1F1B backwards stay whole where layers are recomputed one by one: W would hold what they recompute.
            splits = schedule == "zb-h1" or recompute in ("none", "selective")
            assert any(span.action.op is Op.W for span in pipe.timeline().spans) == splits
    assert len(compiled) == after
    assert not by_torch_compile()


@compiles
@pytest.mark.more
def test_equal_layers_share_their_kernels(compiled: list[str], by_torch_compile: Callable[[], int]) -> None:
    """Eight norms and a last one are one kernel, four activations another, and four rotary embeddings, forward and
    backward, for any length."""
    model = build(ARCHITECTURES["llama"])
    fuse_kernels(model)
    for length in (64, 7, 30):
        model(tokens(length=length)).logits.sum().backward()
    assert len(compiled) == 6
    model(tokens(batch=1, length=1))  # a single token isn't compiled for
    assert len(compiled) == 6
    assert not by_torch_compile()


@compiles
@pytest.mark.more
def test_what_the_table_does_not_describe_is_left_to_torch_compile(
    compiled: list[str], by_torch_compile: Callable[[], int]
) -> None:
    """Autocast, and inputs that aren't stored in order; neither counts as the other kind, whichever came first."""
    model = nn.Sequential(build(ARCHITECTURES["llama"]).model.norm.float())
    plain = copy.deepcopy(model)
    fuse_kernels(model)
    x = torch.randn(2, 8, 32)
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    for given, autocasts in ((x, False), (x, True), (turned, False), (x, False)):
        results = []
        for each in (plain, model):
            leaf = given.clone(memory_format=torch.preserve_format).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
                output = each(leaf)
            output.sum().backward()
            results.append((output, leaf.grad, each[0].weight.grad))
            each.zero_grad()
        for wanted, found in zip(*results, strict=True):
            assert found.dtype == wanted.dtype
            assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert len(compiled) == 2
    assert by_torch_compile() == 2


@compiles
@pytest.mark.more
def test_frozen_weights_and_second_derivatives(compiled: list[str]) -> None:
    model = nn.Sequential(build(ARCHITECTURES["llama"]).model.norm)
    plain = copy.deepcopy(model)
    fuse_kernels(model)
    for frozen in (False, True):
        grads = []
        for each in (plain, model):
            each.requires_grad_(not frozen)
            x = torch.linspace(-1, 1, 2 * 8 * 32, dtype=torch.float64).view(2, 8, 32).requires_grad_()
            each(x).square().sum().backward()
            grads.append(x.grad)
            assert (each[0].weight.grad is None) == frozen
            each.zero_grad()
        # A norm rounds to float32, and its gradient here is what is left of numbers that cancel.
        assert torch.allclose(*grads, atol=1e-5)
    assert len(compiled) == 3  # one forward, two backwards
    (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


class WidthNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def norm_and_gradients(model: nn.Module, length: int) -> list[Tensor]:
    x = torch.randn(1, length, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    model.zero_grad()
    output = model(x)
    output.square().sum().backward()
    return [output.detach(), x.grad, model[0].weight.grad]


@compiles
@pytest.mark.more
def test_a_kernel_is_not_used_for_sizes_that_it_was_not_compiled_for(compiled: list[str]) -> None:
    """Inductor adds up 4096 rows in another way than more: the backward of a norm is compiled for both."""
    model = nn.Sequential(WidthNorm())
    plain = copy.deepcopy(model)
    fuse_kernels(model)
    counts = []
    for length in (8, 4096, 5000, 9000, 30):
        for wanted, found in zip(norm_and_gradients(plain, length), norm_and_gradients(model, length), strict=True):
            assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)
        counts.append(len(compiled))
    assert counts == [2, 2, 3, 3, 3]


@compiles
@pytest.mark.more
def test_what_can_not_be_compiled_so_is_left_to_torch_compile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, by_torch_compile: Callable[[], int]
) -> None:
    def fails(*_: object) -> None:
        raise AttributeError("another PyTorch")

    monkeypatch.setattr(compiled_region, "compile_graph", fails)
    model = nn.Sequential(WidthNorm())
    wanted = norm_and_gradients(model, 8)
    fuse_kernels(model)
    for _ in range(2):
        for found, each in zip(norm_and_gradients(model, 8), wanted, strict=True):
            assert torch.allclose(found, each, rtol=1e-4, atol=1e-4)
    assert by_torch_compile() == 1
    assert [record.message for record in caplog.records if "another PyTorch" in record.message] == [
        "a kernel is left to torch.compile: AttributeError: another PyTorch"
    ]


@compiles
@pytest.mark.more
def test_dropout_draws_the_same_numbers() -> None:
    config = copy.deepcopy(ARCHITECTURES["gpt2"])
    config.resid_pdrop = config.attn_pdrop = config.embd_pdrop = 0.3
    model, results = build(config), []
    for change in (lambda model: [], fuse_kernels):
        change(model)
        torch.manual_seed(7)
        results.append(gradients(in_slices(model, [5, 30, 17, 12], recompute="full")))
    assert gradient_error(*results) < BOUND


@compiles
def test_hooks_see_every_module() -> None:
    model = build(ARCHITECTURES["llama"])
    fuse_kernels(model)
    assert not undeferred_weights(model)  # W still has all matrices
    seen = []
    for name in ("input_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp"):
        module = model.model.layers[0].get_submodule(name)
        module.register_forward_hook(lambda *_, name=name: seen.append(name))
    model(tokens(batch=1, length=1))
    assert seen == ["input_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp"]


def test_the_parameters_may_be_replaced_later() -> None:
    model = build(ARCHITECTURES["llama"])
    fuse_kernels(model)
    twin = copy.deepcopy(model)
    norm = twin.model.norm
    norm.weight = nn.Parameter(2 * norm.weight.detach())
    x = torch.randn(1, 1, 32, dtype=torch.float64)
    assert torch.equal(norm(x), 2 * model.model.norm(x))


def test_what_a_user_compiles_stays_as_it_is() -> None:
    model = build(ARCHITECTURES["llama"])
    model.model.layers[1].compile()
    model.model.layers[2].mlp.compile()
    names = fuse_kernels(model)
    assert not any(name.startswith("model.layers.1.") for name in names)
    assert "model.layers.2.mlp" not in names
    assert "model.layers.2.input_layernorm" in names


class GatedHalf(nn.Module):
    """Cuts its input before any matrix: operations that need no kernel, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(4, 4), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        value, gate = x.chunk(2, -1)
        return self.act(self.up(value)) * gate


def test_operations_without_a_kernel_may_follow_each_other() -> None:
    model, x = nn.Sequential(GatedHalf()), torch.randn(1, 8)
    expected = model(x)
    assert fuse_kernels(model) == ["0"]
    assert torch.equal(model(x), expected)


class GatedNorm(nn.Module):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return x * x.sum() if gate is None else x * gate.sum()


class NoisyNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5) * x * 2


class TrainingNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x * 2 if self.training else x * x


class ChangingNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * x).mul_(2)


class ShortNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x * 2 if x.shape[1] > 4 else x * x


class ProjectingNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (x @ x.transpose(-1, -2)).sum() * 2


@pytest.mark.parametrize("kind", [GatedNorm, NoisyNorm, TrainingNorm, ChangingNorm, ShortNorm, ProjectingNorm])
def test_what_one_trace_does_not_show_stays_as_it_is(kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind())
    assert fuse_kernels(model) == []
    assert "forward" not in vars(model[0])


class TestRefusals:
    @pytest.mark.parametrize(
        ("device", "compiler", "message"),
        [
            ("cpu", None, r"needs a compiler, but (clan)?g\+\+ is not on the PATH.*CXX.*runtime\.fused: false"),
            ("cpu", "mine -O2", "but mine is not on the PATH"),
            ("cuda", None, r"made by Triton. Install it: pip install triton|but gcc or clang or cc is not"),
        ],
    )
    def test_no_compiler(
        self, device: str, compiler: str | None, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        for variable in ("CC", "CXX"):
            monkeypatch.setenv(variable, compiler) if compiler else monkeypatch.delenv(variable, raising=False)
        with pytest.raises(SlipstreamError, match=message):
            check_compiler(device)

    def test_no_headers(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "mine").touch(mode=0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setenv("CXX", "mine")
        monkeypatch.setattr(fusion.sysconfig, "get_path", lambda _: str(tmp_path))
        with pytest.raises(SlipstreamError, match=r"Python's headers, but .*Python\.h is not there.*python3-dev"):
            check_compiler("cpu")


@pytest.mark.more
def test_few_kinds_of_inputs_are_remembered() -> None:
    """Documents have ever new lengths; what is forgotten is found again."""
    ways: dict[object, Any] = dict.fromkeys(range(4096))
    kernel = compiled_region.compiled_region(lambda x: (2 * x + 1,), ways)
    for length, num_ways in ((2, 4097), (3, 1), (2, 2)):
        x = torch.randn(length, 8)
        torch.testing.assert_close(kernel(x)[0], 2 * x + 1)
        assert len(ways) == num_ways


@compiles
@pytest.mark.more
@pytest.mark.parametrize("name", first_of(["llama", "gpt2"], 1, "grid"))
def test_a_plan_counts_what_a_fused_layer_saves(name: str) -> None:
    config = ARCHITECTURES[name]
    anatomy = find_anatomy(config)

    def per_token(owned: range) -> float:
        model = random_model(config, 0, anatomy, owned, torch.float32).train()
        fuse_kernels(model)
        stage = CausalLMStage(model, anatomy, LayerRange(owned.start, owned.stop), torch.device("cpu"))
        bench = StageBench(stage, 1, LENGTH)
        return (bench.activation_bytes(48) - bench.activation_bytes(16)) / 32

    real = per_token(range(1, 3)) - per_token(range(1, 2))
    count = count_model(config, LENGTH, torch.float32, fused=True)
    assert count.layers[count.kinds[2]].activation_bytes == real
