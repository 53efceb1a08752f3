"""Freezes the parameters of a model, or of the part of it that a rank has, whose names match patterns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from torch import nn

from slipstream.errors import SlipstreamError, did_you_mean


def find_frozen(whole: nn.Module, patterns: Sequence[str], setting: str = "freeze") -> frozenset[str]:
    """Returns the names of the parameters that the patterns match, of a weight with several names each of them.

    Args:
        whole: the whole model; it may be on the meta device.
        patterns: of names, as `fnmatch` has them, such as `model.layers.0.*`.
        setting: what gave the patterns, for messages.

    Raises:
        SlipstreamError: for a pattern that matches no parameter, and where none is left to train.
    """
    aliases: dict[int, list[str]] = defaultdict(list)
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        aliases[id(parameter)].append(name)
    weights = [*aliases.values()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for names in weights for name in names):
            raise SlipstreamError(_no_match(whole, pattern, setting))
    frozen = [names for names in weights if any(fnmatchcase(name, each) for name in names for each in patterns)]
    if weights and len(frozen) == len(weights):
        raise SlipstreamError(
            f"{setting}={[*patterns]} matches all of the model's parameters, so that nothing would be trained. Give "
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
    """Says what the pattern of no parameter may have been meant to be."""
    names = [name for name, _ in whole.named_parameters(remove_duplicate=False)]
    inside = [name for name in names if name.startswith(f"{pattern}.")]
    if inside:
        hint = f"; to freeze what is inside, give {pattern}.*"
    else:
        hint = did_you_mean(pattern, dict.fromkeys([*names, *map(_below, names)])).rstrip(".")
    shown = ", ".join([*names[:3], "...", names[-1]] if len(names) > 4 else names)
    return f"{setting}: {pattern!r} matches no parameter of the model{hint}. Its parameters are {shown}."


def _below(name: str) -> str:
    """Returns the pattern of everything in the module that has a parameter."""
    return f"{name.rpartition('.')[0]}.*"
