"""Weights that several stages hold: one that embeds on the first and is the head on the last, or of several layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from slipstream.model.model_anatomy import ModelAnatomy


@dataclass(frozen=True)
class TiedWeight:
    """A weight that other stages may hold, too (rule 11).

    `parameter` has the canonical name. `accumulators` are the parameters, over the same storage, in which this stage's
    backwards leave gradients: of an embedding that is the head, one for each of the two, so that these can be added in
    one fixed order whatever the number of stages; of one that several layers share, `parameter` alone.
    """

    name: str
    parameter: nn.Parameter
    accumulators: tuple[nn.Parameter, ...]


def separate_head(model: PreTrainedModel, anatomy: ModelAnatomy, is_first: bool, is_last: bool) -> list[TiedWeight]:
    """Returns the tied weights of a stage, whose head gets a separate accumulator."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied = []
    for head_name, name in anatomy.tied:
        if name not in parameters:
            continue  # neither the embedding nor the head is on this stage
        accumulators = [parameters[name]] if is_first else []
        if is_last:
            head = nn.Parameter(parameters[name].detach(), requires_grad=parameters[name].requires_grad)
            module, _, attribute = head_name.rpartition(".")
            setattr(model.get_submodule(module), attribute, head)
            accumulators.append(head)
        tied.append(TiedWeight(name, parameters[name], tuple(accumulators)))
    return tied


def shared_weights(model: PreTrainedModel, anatomy: ModelAnatomy) -> list[TiedWeight]:
    """Returns the weights of a stage that several layers share, which may be other stages'."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    here = ((names[0], next((name for name in names if name in parameters), None)) for names in anatomy.shared)
    return [TiedWeight(name, parameters[own], (parameters[own],)) for name, own in here if own is not None]
