"""Code that looks across tokens, sequences, calls or layers, and hooks on single gradients."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from support.changes.change import EITHER, IN_PIECES, IN_SLICES, IN_STAGES, REFUSED, change, everywhere_in, noise
from support.changes.forwards import straight_through

_MIXING = everywhere_in(IN_SLICES)


class OwnAttention(nn.Module):
    """Attends by itself, not through transformers' interface."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = given.q_proj, given.k_proj, given.v_proj, given.o_proj

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        B, T, _ = hidden_states.shape

        def heads(linear: nn.Module) -> Tensor:
            return linear(hidden_states).view(B, T, -1, 8).transpose(1, 2)

        k, v = (heads(each).repeat_interleave(2, 1) for each in (self.k_proj, self.v_proj))
        found = F.scaled_dot_product_attention(heads(self.q_proj), k, v, is_causal=True)
        return self.o_proj(found.transpose(1, 2).reshape(B, T, -1)), None


@change(
    "attention replaced",
    "a `self_attn` that calls `scaled_dot_product_attention` itself",
    names="self_attn",
    save_pretrained=EITHER,
    **_MIXING,
)
def _(model: Any) -> None:
    model.model.layers[1].self_attn = OwnAttention(model.model.layers[1].self_attn)


class WithSums(nn.Module):
    """Adds to an MLP's inputs their sum over all tokens before."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs + 0.1 * inputs.cumsum(1))


@change("sum over tokens", "an MLP with a cumulative sum over tokens", names="mlp", save_pretrained=EITHER, **_MIXING)
def _(model: Any) -> None:
    model.model.layers[1].mlp = WithSums(model.model.layers[1].mlp)


def over_tokens(inputs: Tensor, weight: Tensor) -> Tensor:
    """A causal convolution of each channel over the last four tokens."""
    padded = F.pad(inputs.transpose(1, 2), (3, 0))
    return F.conv1d(padded, weight, groups=weight.shape[0]).transpose(1, 2)


@change("convolution in a hook", "a hook with a convolution over tokens", names="mlp|hook", **_MIXING)
def _(model: Any) -> None:
    weight = 0.2 * noise(32, 1, 4)
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output + over_tokens(output, weight))


@change(
    "scale over all tokens",
    "a hook with an activation scale over the whole tensor",
    names="mlp|hook",
    **everywhere_in(IN_PIECES),
)
def _(model: Any) -> None:
    def largest(module: nn.Module, args: object, output: Tensor) -> Tensor:
        step = output.detach().abs().max() / 7
        return straight_through(output, (output / step).round() * step)

    model.model.layers[1].mlp.register_forward_hook(largest)


@change("positions counted in a hook", "a hook that adds `torch.arange(tokens)`", names="mlp|hook", **_MIXING)
def _(model: Any) -> None:
    def with_positions(module: nn.Module, args: object, output: Tensor) -> Tensor:
        return output + 0.01 * torch.arange(output.shape[1], dtype=output.dtype)[:, None]

    model.model.layers[1].mlp.register_forward_hook(with_positions)


class GatedConvolution(nn.Module):
    """Adds a convolution over tokens to an MLP, behind a gate that is zero at first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.weight, self.gate = nn.Parameter(0.2 * noise(32, 1, 4)), nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) + self.gate.tanh() * over_tokens(inputs, self.weight)


@change(
    "gated convolution",
    "an MLP with a convolution over tokens behind a gate that is zero",
    names="mlp",
    save_pretrained=EITHER,
    **_MIXING,
)
def _(model: Any) -> None:
    model.model.layers[1].mlp = GatedConvolution(model.model.layers[1].mlp)


@change(
    "numbers drawn", "a hook that draws random numbers", names="mlp|hook", whole=REFUSED, **everywhere_in(IN_PIECES)
)
def _(model: Any) -> None:
    generator = torch.Generator().manual_seed(5)

    def noisy(module: nn.Module, args: object, output: Tensor) -> Tensor:
        return output + 0.1 * torch.randn(output.shape, generator=generator, dtype=output.dtype)

    model.model.layers[1].mlp.register_forward_hook(noisy)


@change("calls counted", "a hook that counts its calls", names="mlp|hook", whole=REFUSED, **everywhere_in(IN_PIECES))
def _(model: Any) -> None:
    calls = [0]

    def counted(module: nn.Module, args: object, output: Tensor) -> Tensor:
        calls[0] += 1
        return output * (1 + 0.1 * calls[0])

    model.model.layers[1].mlp.register_forward_hook(counted)


@change(
    "last output kept",
    "a hook that adds the output before",
    names="mlp|hook",
    whole=REFUSED,
    **everywhere_in(IN_PIECES),
)
def _(model: Any) -> None:
    kept: dict[str, Tensor] = {}

    def with_last(module: nn.Module, args: object, output: Tensor) -> Tensor:
        found = output + 0.1 * kept.get("sum", torch.ones(output.shape[-1], dtype=output.dtype))
        kept["sum"] = output.detach().mean((0, 1))
        return found

    model.model.layers[1].mlp.register_forward_hook(with_last)


@change("calls listed", "a hook that lists its calls", names="mlp|hook", **everywhere_in(IN_PIECES))
def _(model: Any) -> None:
    calls: list[float] = []

    def listed(module: nn.Module, args: object, output: Tensor) -> Tensor:
        calls.append(float(output.detach().abs().max()))
        return output * 1.1

    model.model.layers[1].mlp.register_forward_hook(listed)


@change(
    "output of another layer",
    "a layer that reads another's output from a dict that hooks fill",
    names="layers.",
    **everywhere_in(["sliced", "recompute", "fused"], EITHER) | everywhere_in(IN_STAGES),
)
def _(model: Any) -> None:
    _read_another(model, 0, 3)


@change(
    "output of another layer in a stage",
    "the same where both are in one stage",
    names="layers.",
    **everywhere_in(["sliced", "recompute", "fused", *IN_STAGES], EITHER),
)
def _(model: Any) -> None:
    _read_another(model, 2, 3)


def _read_another(model: Any, source: int, reader: int) -> None:
    kept: dict[str, Tensor] = {}

    def keep(module: nn.Module, args: object, output: Tensor) -> None:
        kept["hidden"] = output

    model.model.layers[source].register_forward_hook(keep)
    model.model.layers[reader].register_forward_hook(lambda module, args, output: output + 0.3 * kept["hidden"])


@change(
    "weight of another layer",
    "a hook that reads a weight of another layer",
    names="layers.0|layers.3",
    **everywhere_in(IN_STAGES),
)
def _(model: Any) -> None:
    weight = model.model.layers[3].mlp.up_proj.weight
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * (1 + weight.mean()))


@change(
    "weight of the head",
    "a layer's hook that reads `model.lm_head.weight`",
    names="layers.0|lm_head",
    **everywhere_in(IN_STAGES),
)
def _(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * (1 + model.lm_head.weight.mean()))


@change("gradient clamped", "`weight.register_hook` that clamps gradients", names="up_proj", **everywhere_in(IN_PIECES))
def _(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


@change(
    "accumulated gradient changed",
    "`register_post_accumulate_grad_hook` that changes `.grad`",
    names="up_proj",
    **everywhere_in(IN_PIECES),
)
def _(model: Any) -> None:
    def scale(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    model.model.layers[1].mlp.up_proj.weight.register_post_accumulate_grad_hook(scale)


@change(
    "spectral_norm",
    "`spectral_norm`, which iterates in each forward",
    names="up_proj",
    whole=EITHER,
    save_pretrained=EITHER,
    **everywhere_in(IN_PIECES),
)
def _(model: Any) -> None:
    torch.manual_seed(3)
    spectral_norm(model.model.layers[1].mlp.up_proj)


@change(
    "old spectral_norm",
    "`torch.nn.utils.spectral_norm`",
    names="up_proj",
    whole=EITHER,
    save_pretrained=EITHER,
    **everywhere_in(IN_PIECES),
)
def _(model: Any) -> None:
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.nn.utils.spectral_norm(model.model.layers[1].mlp.up_proj)
