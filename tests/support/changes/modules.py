"""Parametrizations, quantised layers, adapters, compiled modules, and settings of single modules."""

from __future__ import annotations

import types
import warnings
from typing import Any

import peft
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from slipstream.model.added_adapter import quiet_peft
from support.adapters import lora
from support.changes.change import EITHER, REFUSED, USES, change, everywhere_in, noise, scaled
from support.changes.forwards import with_quantised_weight


@change("weight_norm", "`torch.nn.utils.parametrizations.weight_norm` on a linear layer", save_pretrained=EITHER)
def _(model: Any) -> None:
    parametrizations.weight_norm(model.model.layers[1].mlp.up_proj)


@change("old weight_norm", "`torch.nn.utils.weight_norm` on a linear layer", save_pretrained=EITHER)
def _(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.nn.utils.weight_norm(model.model.layers[1].mlp.up_proj)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight.tanh()


@change(
    "parametrized head",
    "a parametrization of `lm_head.weight`",
    names="lm_head",
    spread=REFUSED,
    save_pretrained=EITHER,
)
def _(model: Any) -> None:
    parametrize.register_parametrization(model.lm_head, "weight", Doubled())


class Int8Linear(nn.Module):
    """A frozen weight in int8 with a scale for each of its rows."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.weight.to(inputs.dtype) * self.scale)


@change(
    "int8 linear layers",
    "a linear class of your own, with an int8 weight and a scale as buffers",
    save_pretrained=EITHER,
)
def _(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj = Int8Linear(layer.mlp.up_proj)
        layer.self_attn.k_proj = Int8Linear(layer.self_attn.k_proj)


def _adapted(model: Any, config: peft.LoraConfig) -> nn.Module:
    with quiet_peft():
        adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False).double()
    for number, parameter in enumerate(each for each in adapted.parameters() if each.requires_grad):
        parameter.data += 0.1 * noise(*parameter.shape, seed=number)
    return adapted


@change("LoRA and a hook", "a PeftModel with LoRA, and a hook on one of its layers")
def _(model: Any) -> nn.Module:
    model.model.layers[2].register_forward_hook(scaled)
    torch.manual_seed(3)
    return _adapted(model, lora())


@change("LoRA and a forward", "a PeftModel with LoRA over a linear layer whose forward was replaced")
def _(model: Any) -> nn.Module:
    linear = model.model.layers[2].self_attn.q_proj
    linear.forward = types.MethodType(with_quantised_weight, linear)
    torch.manual_seed(3)
    return _adapted(model, lora())


@change(
    "LoRA by target_parameters",
    "LoRA of a linear layer's weight by `target_parameters`",
    names="target_parameters|ParamWrapper|lora|up_proj",
    save_pretrained=EITHER,
    **everywhere_in([*USES], EITHER),
)
def _(model: Any) -> nn.Module:
    torch.manual_seed(3)
    return _adapted(model, peft.LoraConfig(r=4, target_modules=[], target_parameters=["mlp.up_proj.weight"]))


@change("MLP compiled", "`mlp.compile()`", **everywhere_in([*USES], EITHER))
def _(model: Any) -> None:
    model.model.layers[1].mlp.compile(backend="eager")


@change("activation replaced", "`mlp.act_fn = nn.ReLU()`", fused=EITHER)
def _(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.ReLU()


@change("activation replaced in a layer", "the same in one layer alone", fused=EITHER)
def _(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.ReLU()


@change("scale of attention", "`self_attn.scaling` changed in one layer")
def _(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 1.7


@change("frequencies of the rotary embedding", "`rotary_emb.inv_freq` changed")
def _(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.8)


@change("epsilon of a norm", "`variance_epsilon` of one norm changed", fused=EITHER)
def _(model: Any) -> None:
    model.model.layers[2].input_layernorm.variance_epsilon = 1e-2


@change("bias added", "a bias put into a linear layer that had none", save_pretrained=EITHER)
def _(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.bias = nn.Parameter(0.1 * noise(48))
