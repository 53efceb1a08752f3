"""A weight that embeds on the first stage and is the head on the last."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from slipstream.model.model_anatomy import ModelAnatomy


@dataclass(frozen=True)
class TiedWeight:
    """A weight that embeds on the first stage and is the head on the last (rule 11).

    `parameter` has the canonical name and collects the embedding's gradient; `head` shares its storage and collects the
    head's, so that the two can be added in one fixed order whatever the number of stages. A stage that does not compute
    one of the two has no gradient for it.
    """

    name: str
    parameter: nn.Parameter
    head: nn.Parameter | None  # on the last stage


def separate_head(model: PreTrainedModel, anatomy: ModelAnatomy, is_last: bool) -> list[TiedWeight]:
    """Gives the head a separate accumulator, so that embedding and head gradients add in a fixed order."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied = []
    for head_name, name in anatomy.tied:
        if name not in parameters:
            continue  # neither the embedding nor the head is on this stage
        head = None
        if is_last:
            head = nn.Parameter(parameters[name].detach(), requires_grad=parameters[name].requires_grad)
            module, _, attribute = head_name.rpartition(".")
            setattr(model.get_submodule(module), attribute, head)
        tied.append(TiedWeight(name, parameters[name], head))
    return tied
