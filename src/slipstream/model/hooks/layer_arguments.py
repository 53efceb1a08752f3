"""Finds and replaces hidden states and others of the arguments with which transformers' code calls a layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of one call


def hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Returns the hidden states (b, T, hidden): the first positional argument, else the one that is named so."""
    found: Tensor = args[0] if args else kwargs[_keyword(kwargs)]
    return found


def with_hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Any) -> Arguments:
    """Returns the arguments with `hidden` in place of the hidden states."""
    if args:
        return (hidden, *args[1:]), kwargs
    return args, kwargs | {_keyword(kwargs): hidden}


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int | str) -> Any:
    """Returns the argument at a position or of a keyword."""
    return args[place] if isinstance(place, int) else kwargs[place]


def with_argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int | str, value: Any) -> Arguments:
    """Returns the arguments with `value` at a position or for a keyword."""
    if isinstance(place, int):
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, kwargs | {place: value}


def first_output(output: Any) -> Tensor:
    """Returns the hidden states that a layer returned, alone or as the first item of a tuple or a list."""
    found: Tensor = output[0] if isinstance(output, (tuple, list)) else output
    return found


def with_first_output(output: Any, hidden: Tensor) -> Any:
    """Returns what a layer returned with `hidden` in place of the hidden states."""
    return (hidden, *output[1:]) if isinstance(output, (tuple, list)) else hidden


def _keyword(kwargs: dict[str, Any]) -> str:
    return "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
