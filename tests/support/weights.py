"""Lists the weights whose gradients can't wait for W."""

from __future__ import annotations

from torch import nn

from slipstream.model.weight_gradients import deferrable_layers


def undeferred_weights(model: nn.Module) -> list[str]:
    """Returns the names of matrices and larger weights whose gradients I computes, so that nothing is left for W."""
    split = {id(parameter) for module in deferrable_layers(model) for parameter in module.parameters(recurse=False)}
    return [name for name, parameter in model.named_parameters() if parameter.dim() > 1 and id(parameter) not in split]
