"""The trained weights of a model: all but the frozen ones, or an adapter beside them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from transformers import PreTrainedModel

from slipstream.errors import SlipstreamError, did_you_mean
from slipstream.model.adapters import Adapter
from slipstream.model.added_adapter import adapted_model
from slipstream.model.quantised import quantise, quantised_names
from slipstream.model.tensors import tied_names


def find_frozen(whole: nn.Module, patterns: Sequence[str], setting: str = "freeze") -> frozenset[str]:
    """Returns the names of the parameters that the patterns match, of a weight with several names each of them.

    Args:
        whole: the whole model; it may be on the meta device.
        patterns: of names, as `fnmatch` has them, such as `model.layers.0.*`.
        setting: the one that gave the patterns, for messages.

    Raises:
        SlipstreamError: for a pattern that matches no parameter, and where none is left to train.
    """
    weights = tied_names(whole)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for names in weights for name in names):
            raise SlipstreamError(_no_match(whole, pattern, setting))
    frozen = [names for names in weights if any(fnmatchcase(name, pattern) for name in names for pattern in patterns)]
    if weights and len(frozen) == len(weights):
        raise SlipstreamError(
            f"{setting}={[*patterns]} matches all of the model's parameters, so nothing would be trained. Give "
            f"patterns that leave some, such as {_below(weights[-1][0])}."
        )
    return frozenset(name for names in frozen for name in names)


def freeze(model: nn.Module, names: Collection[str]) -> None:
    """Freezes the parameters of these names, in place. The model may be a part of the one that they are from."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in names:
            parameter.requires_grad_(False)


def trained_text(whole: nn.Module) -> str:
    """Returns how many of a model's parameters are trained, in words."""
    trained = sum(parameter.numel() for parameter in whole.parameters() if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in whole.parameters())
    return f"{trained:,} of {total:,} parameters train ({trained / total:.2%})"


def _no_match(whole: nn.Module, pattern: str, setting: str) -> str:
    """Returns a refusal of a pattern that matches no parameter, with the one that it may have been meant to be."""
    names = [name for name, _ in whole.named_parameters(remove_duplicate=False)]
    inside = [name for name in names if name.startswith(f"{pattern}.")]
    if inside:
        hint = f"; to freeze what is inside, give {pattern}.*"
    else:
        hint = did_you_mean(pattern, dict.fromkeys([*names, *map(_below, names)])).rstrip(".")
    shown = ", ".join([*names[:3], "...", names[-1]] if len(names) > 4 else names)
    return f"{setting}: {pattern!r} matches no parameter of the model{hint}. Its parameters are {shown}."


def _below(name: str) -> str:
    return f"{name.rpartition('.')[0]}.*"


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
        """Returns the trained weights of a model in memory, which has this adapter already."""
        named = model.named_parameters(remove_duplicate=False)
        return cls(frozenset(name for name, parameter in named if not parameter.requires_grad), adapter)

    @property
    def are_all(self) -> bool:
        """Whether all weights are trained, and nothing is added to them."""
        return not self.frozen and self.adapter is None

    def apply(self, whole: PreTrainedModel) -> PreTrainedModel:
        """Returns the whole model, on the meta device, with its adapter and its frozen parameters; it is changed."""
        if self.adapter is not None:
            names = quantised_names(whole) if self.adapter.on_4_bits else ()
            whole = adapted_model(whole, self.adapter).get_base_model()
            quantise(whole, names)
        freeze(whole, self.frozen)
        return whole


ALL_WEIGHTS = TrainedWeights()
