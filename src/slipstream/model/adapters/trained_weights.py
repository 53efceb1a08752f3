"""What of a model's weights is trained, for what is planned and counted before any of them is in memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from slipstream.model.adapters.adapter_check import Adapter
from slipstream.model.adapters.adapter_loading import adapted_model
from slipstream.model.adapters.frozen_parameters import freeze


@dataclass(frozen=True)
class TrainedWeights:
    """All weights, all but those of some names, or an adapter beside the frozen ones.

    Args:
        frozen: names of frozen parameters. Of a model with an adapter: besides those that PEFT freezes.
        adapter: what the model has in addition.
    """

    frozen: frozenset[str] = frozenset()
    adapter: Adapter | None = None

    @classmethod
    def of(cls, model: nn.Module, adapter: Adapter | None) -> TrainedWeights:
        """Returns what is trained of a model in memory, which has this adapter already."""
        named = model.named_parameters(remove_duplicate=False)
        return cls(frozenset(name for name, parameter in named if not parameter.requires_grad), adapter)

    @property
    def are_all(self) -> bool:
        """Whether all weights are trained, and nothing is added to them."""
        return not self.frozen and self.adapter is None

    def apply(self, whole: PreTrainedModel) -> PreTrainedModel:
        """Returns the whole model, on the meta device, with its adapter and its frozen parameters; it is changed."""
        if self.adapter is not None:
            whole = adapted_model(whole, self.adapter).get_base_model()
        freeze(whole, self.frozen)
        return whole


ALL_WEIGHTS = TrainedWeights()
