"""The modules and names of a model to which PEFT has added an adapter: its own, and what stands around them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

_INSIDE = ("base_layer", "original_module")  # names of the wrapped module: with an adapter, with a trained copy
_COPIES = "modules_to_save"
# The factors of PEFT's methods, and along which dimension each has the output and the input features of its layer.
_FACTORS: dict[str, tuple[int | None, int | None]] = {
    "lora_A": (None, 1),
    "lora_B": (0, None),
    "lora_embedding_A": (None, 1),
    "lora_embedding_B": (0, None),
    "lora_magnitude_vector": (0, None),
    "hada_w1_a": (0, None),
    "hada_w1_b": (None, 1),
    "hada_w2_a": (0, None),
    "hada_w2_b": (None, 1),
    "ia3_l": (0, 1),  # one of the two has size 1
}


class AdaptedName(NamedTuple):
    """The parts of a parameter's name in an adapted model."""

    layer: str  # name of the wrapped module: "model.layers.0.mlp.up_proj"
    factor: str | None  # such as "lora_A"; None: the module's own parameter, or a trained copy's
    rest: str  # the parameter's name within: "weight"; of a factor's bias "bias"

    @property
    def of_layer(self) -> str:
        """The name of the same parameter in the model without an adapter."""
        return f"{self.layer}.{self.rest}"


def parse_name(name: str) -> AdaptedName:
    """Returns the parts of a parameter's name; one that PEFT hasn't wrapped is its module's own."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        layer = ".".join(parts[:place])
        if part in _INSIDE:
            return AdaptedName(layer, None, ".".join(parts[place + 1 :]))
        # The name of the adapter follows.
        if part == _COPIES:
            return AdaptedName(layer, None, ".".join(parts[place + 2 :]))
        if part in _FACTORS:
            return AdaptedName(layer, part, ".".join(parts[place + 2 :]) or "weight")
    return AdaptedName(name.rpartition(".")[0], None, parts[-1])


def features_of(factor: str, shape: tuple[int, ...]) -> tuple[int | None, int | None]:
    """Returns the dimensions along which a factor has its layer's output and input features; None where it has not."""
    outputs, inputs = _FACTORS[factor]
    if factor == "ia3_l":
        return (None, 1) if shape[0] == 1 else (0, None)
    return outputs, inputs


def is_wrapper(module: nn.Module) -> bool:
    """Returns whether PEFT has put this module around one of the model's."""
    return any(name in module._modules for name in _INSIDE)


def own_module(module: nn.Module) -> nn.Module:
    """Returns the model's own module, around which PEFT may have put others."""
    for name in _INSIDE:
        if name in module._modules:
            return own_module(module.get_submodule(name))
    return module


def inner_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the model's own module and its trained copies, or the module itself where PEFT hasn't wrapped it."""
    yield own_module(module)
    copies = module._modules.get(_COPIES)
    yield from copies.children() if copies is not None else ()


def adapter_dropouts(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the dropouts of the input of an adapter's factors."""
    dropouts = module._modules.get("lora_dropout")
    yield from (child for child in dropouts.children() if isinstance(child, nn.Dropout)) if dropouts is not None else ()


def dora_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules that scale the rows of an adapted weight by DoRA."""
    layers = module._modules.get("lora_magnitude_vector")
    yield from layers.children() if layers is not None else ()
