"""Forwards that are replaced or wrapped, in instances and in classes, and modules with a forward of their own."""

from __future__ import annotations

import types
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.changes.change import EITHER, IN_STAGES, REFUSED, USES, change, everywhere_in


def straight_through(found: Tensor, wanted: Tensor) -> Tensor:
    return found + (wanted - found).detach()


def in_four_bits(weight: Tensor) -> Tensor:
    step = weight.detach().abs().max() / 7
    return straight_through(weight, (weight / step).round() * step)


def with_quantised_weight(linear: Any, inputs: Tensor) -> Tensor:
    return F.linear(inputs, in_four_bits(linear.weight), linear.bias)


@change("forward of a linear layer", "`linear.forward` replaced on instances: a fake-quantised weight")
def _(model: Any) -> None:
    for linear in (model.model.layers[1].self_attn.q_proj, model.model.layers[2].mlp.down_proj):
        linear.forward = types.MethodType(with_quantised_weight, linear)


@change("forward of a linear layer, closure", "`linear.forward` replaced by a function that remembers the layer")
def _(model: Any) -> None:
    linear = model.model.layers[1].mlp.up_proj
    linear.forward = lambda inputs: with_quantised_weight(linear, inputs)


@change("scales for each token", "`linear.forward` that quantises its inputs too, with a scale for each token")
def _(model: Any) -> None:
    def forward(linear: Any, inputs: Tensor) -> Tensor:
        step = inputs.detach().abs().amax(-1, keepdim=True) / 127
        return with_quantised_weight(linear, straight_through(inputs, (inputs / step).round() * step))

    for layer in model.model.layers:
        layer.mlp.down_proj.forward = types.MethodType(forward, layer.mlp.down_proj)


@change("forward of the head", "`lm_head.forward` replaced", names="lm_head", spread=REFUSED)
def _(model: Any) -> None:
    model.lm_head.forward = types.MethodType(with_quantised_weight, model.lm_head)


@change("forward of Conv1D", "`forward` of GPT-2's `Conv1D` replaced", of="gpt2", spread=EITHER)
def _(model: Any) -> None:
    def forward(conv: Any, inputs: Tensor) -> Tensor:
        return inputs @ in_four_bits(conv.weight) + conv.bias

    conv = model.transformer.h[1].mlp.c_fc
    conv.forward = types.MethodType(forward, conv)


@change("forward of the embedding", "`embed_tokens.forward` replaced: scaled rows")
def _(model: Any) -> None:
    embedding = model.model.embed_tokens
    embedding.forward = lambda ids: 2.0 * F.embedding(ids, embedding.weight)


@change(
    "forward of a tied embedding", "the same where the head has the embedding's weight", of="llama, tied", spread=EITHER
)
def _(model: Any) -> None:
    embedding = model.model.embed_tokens
    embedding.forward = lambda ids: 2.0 * F.embedding(ids, embedding.weight)


class ScaledLinear(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return 1.5 * super().forward(inputs)


def _as_scaled(linear: nn.Linear) -> ScaledLinear:
    made = ScaledLinear(linear.in_features, linear.out_features, bias=False, dtype=torch.float64)
    made.weight = linear.weight
    return made


@change("subclass of a linear layer", "a subclass of `nn.Linear` with a forward of its own in place of `o_proj`")
def _(model: Any) -> None:
    model.model.layers[1].self_attn.o_proj = _as_scaled(model.model.layers[1].self_attn.o_proj)


@change("subclass of a linear layer as head", "such a subclass as `lm_head`", names="lm_head", spread=REFUSED)
def _(model: Any) -> None:
    model.lm_head = _as_scaled(model.lm_head)


class ScaledEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return 2.0 * super().forward(ids)


@change("subclass of the embedding", "a subclass of `nn.Embedding` with a forward of its own")
def _(model: Any) -> None:
    given = model.model.embed_tokens
    model.model.embed_tokens = ScaledEmbedding(*given.weight.shape, dtype=torch.float64)
    model.model.embed_tokens.weight = given.weight


def _patched_linear() -> AbstractContextManager[object]:
    return patch.object(nn.Linear, "forward", with_quantised_weight)


@change(
    "nn.Linear.forward patched",
    "`nn.Linear.forward` replaced on the class",
    names="Linear",
    during=_patched_linear,
    spread=EITHER,
)
def _(model: Any) -> None:
    pass


@change("forward of a norm", "`input_layernorm.forward` replaced", fused=EITHER)
def _(model: Any) -> None:
    norm = model.model.layers[2].input_layernorm

    def forward(inputs: Tensor) -> Tensor:
        return 1.2 * norm.weight * inputs * torch.rsqrt(inputs.pow(2).mean(-1, keepdim=True) + 1e-3)

    norm.forward = forward


@change("forward of an MLP wrapped", "`mlp.forward` wrapped by a function that calls the one before", fused=EITHER)
def _(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    inner = mlp.forward
    mlp.forward = lambda inputs: 1.1 * inner(inputs)


@change("forward of a layer wrapped", "`layer.forward` wrapped likewise", halves=REFUSED)
def _(model: Any) -> None:
    layer = model.model.layers[1]
    inner = layer.forward
    layer.forward = lambda *args, **kwargs: 1.1 * inner(*args, **kwargs)


@change("forward of a stage's first layer wrapped", "`layer.forward` wrapped on a layer with which a stage begins")
def _(model: Any) -> None:
    layer = model.model.layers[2]
    inner = layer.forward
    layer.forward = lambda *args, **kwargs: 1.1 * inner(*args, **kwargs)


@change("forward of attention wrapped", "`self_attn.forward` wrapped likewise")
def _(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    inner = attention.forward

    def forward(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        output, *rest = inner(*args, **kwargs)
        return (1.1 * output, *rest)

    attention.forward = forward


def run_as_script(model: Any, script: str) -> None:
    """Changes the model as a script does that isn't within a function: its names are globals."""
    exec(script, {"model": model, "F": F})


@change("forward of a linear layer, script", "`linear.forward` that knows the layer by a global name")
def _(model: Any) -> None:
    run_as_script(
        model,
        """
linear = model.model.layers[1].mlp.up_proj
linear.forward = lambda inputs: F.linear(inputs, 1.1 * linear.weight)
""",
    )


@change("forward of an MLP wrapped, script", "`mlp.forward` wrapped, the ones before in a global dict", fused=EITHER)
def _(model: Any) -> None:
    run_as_script(
        model,
        """
originals = {}
for index in (1, 2):
    originals[index] = model.model.layers[index].mlp.forward
    model.model.layers[index].mlp.forward = lambda inputs, index=index: 1.1 * originals[index](inputs)
""",
    )


@change("forward of a layer wrapped, script", "`layer.forward` wrapped, the one before a global", halves=REFUSED)
def _(model: Any) -> None:
    run_as_script(
        model,
        """
inner = model.model.layers[1].forward

def scaled(*args, **kwargs):
    return 1.1 * inner(*args, **kwargs)

def forward(*args, **kwargs):
    return scaled(*args, **kwargs)

model.model.layers[1].forward = forward
""",
    )


@change("class of an MLP", "`mlp.__class__` set to a subclass with a forward of its own", halves=EITHER, fused=EITHER)
def _(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.__class__ = type(
        "ScaledMLP", (type(mlp),), {"forward": lambda self, x: 1.1 * super(type(self), self).forward(x)}
    )


@change("MLP replaced", "a module of your own in place of an MLP", halves=EITHER, fused=EITHER, save_pretrained=EITHER)
def _(model: Any) -> None:
    torch.manual_seed(3)
    model.model.layers[1].mlp = nn.Sequential(nn.Linear(32, 40), nn.Tanh(), nn.Linear(40, 32)).double()


@change(
    "norm of Qwen 3's queries", "`q_norm` replaced by `nn.Identity`", of="qwen3", fused=EITHER, save_pretrained=EITHER
)
def _(model: Any) -> None:
    model.model.layers[1].self_attn.q_norm = nn.Identity()


@change("forward of a router wrapped", "`forward` of a mixture's router wrapped", of="mixtral", fused=EITHER)
def _(model: Any) -> None:
    gate = model.model.layers[1].mlp.gate
    inner = gate.forward
    gate.forward = lambda inputs: inner(1.5 * inputs)


@change(
    "forward of the model wrapped",
    "`model.forward` wrapped",
    names="forward|CausalLM",
    **everywhere_in([*USES], EITHER) | everywhere_in(IN_STAGES),
)
def _(model: Any) -> None:
    inner = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        found = inner(*args, **kwargs)
        found.logits = 1.3 * found.logits
        return found

    model.forward = forward


@change(
    "forward of the layers' model wrapped",
    "`model.model.forward` wrapped",
    names="forward|Model",
    **everywhere_in([*USES], EITHER) | everywhere_in(IN_STAGES),
)
def _(model: Any) -> None:
    inner = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        found = inner(*args, **kwargs)
        found.last_hidden_state = 1.3 * found.last_hidden_state
        return found

    model.model.forward = forward
