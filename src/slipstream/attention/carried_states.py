"""Carries what layers need of earlier tokens besides keys and values from slice to slice, and its gradient back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.attention.context_error import ContextError


@dataclass
class _State:
    """A state between two slices."""

    value: Tensor | None  # None: the backward of its reader began, whose graph holds what it needs
    has_gradient: bool
    gradient: Tensor | None = None  # None: none yet, or the reader's outputs don't depend on it
    is_read: bool = False  # by a forward


class CarriedStates:
    """The states of one microbatch on one stage: windows of convolutions, recurrent and state-space states.

        forward   slice 0 --S--> slice 1 --S--> slice 2     read by the next slice alone, not by all later ones
        backward  slice 0 <-dS-- slice 1 <-dS-- slice 2     final when the next slice's backward has run (rule 2)

    Each is kept by what carries it (`call`) and by the first token that is computed from it. A replay reads what the
    forward read, so a value stays until the backward of its reader.
    """

    def __init__(self) -> None:
        self._states: dict[tuple[Hashable, int], _State] = {}

    @property
    def calls(self) -> set[Hashable]:
        """What carries a state: the calls that left one for a slice whose backward hasn't begun."""
        return {call for call, _ in self._states}

    @property
    def values(self) -> list[Tensor]:
        """The states that are kept."""
        return [state.value for state in self._states.values() if state.value is not None]

    def read(self, call: Hashable, token: int) -> Tensor | None:
        """Returns the state with which a slice begins, connected to its gradient; None at the sequence's start."""
        if token == 0:
            return None
        state = self._states.get((call, token))
        if state is None or state.value is None:
            raise ContextError(
                f"the slice from token {token} on needs the state of {call!r}, which isn't there (any more): "
                "first run the slice before it, and no forward after a backward"
            )
        state.is_read = True
        if not state.has_gradient or not torch.is_grad_enabled():
            return state.value
        beginning: Any = _Beginning.apply
        found: Tensor = beginning(torch.empty(0, requires_grad=True), state.value, partial(_add_gradient, state))
        return found

    def keep(self, call: Hashable, token: int, value: Tensor, has_gradient: bool) -> None:
        """Keeps the state with which the slice from `token` on begins."""
        self._states[call, token] = _State(value, has_gradient)

    def leave(self, states: Mapping[Hashable, Tensor], first: int, end: int, output: Tensor) -> Tensor:
        """Keeps the states with which the slice [first, end) ends, for the next one.

        Returns `output`, anything that the rest of the slice's forward depends on: where its gradient arrives, those of
        the states do, too.
        """
        for call, value in states.items():
            # a copy, since it may be a view of something as long as the slice
            self.keep(call, end, value.detach().clone(), value.requires_grad)
        if not torch.is_grad_enabled():
            for call in states:
                self._states.pop((call, first), None)
            return output
        reachable = {call: value for call, value in states.items() if value.requires_grad}
        if not reachable:
            return output
        join: Any = _Join.apply
        joined: Tensor = join(output, partial(self._gradients, tuple(reachable), first, end), *reachable.values())
        return joined

    def free(self) -> None:
        """Drops all states."""
        self._states.clear()

    def _gradients(self, calls: tuple[Hashable, ...], first: int, end: int) -> list[Tensor | None]:
        """Returns the gradients of what the slice [first, end) left, whose backward begins here."""
        found = []
        for call in calls:
            left = self._states.pop((call, end))
            if left.is_read and left.value is not None:
                raise ContextError(
                    f"the slice [{first}, {end}) runs backward before the slice from {end} on, which begins with its "
                    f"state of {call!r}: run the slices of a microbatch in reverse order"
                )
            if (read := self._states.get((call, first))) is not None:
                read.value = None
            found.append(left.gradient)
            left.gradient = None  # the reader's graph, which W holds, would keep it
        return found


def _add_gradient(state: _State, gradient: Tensor) -> None:
    # a copy, since it may be a view of something as long as the slice, which W holds too
    state.gradient = gradient.clone() if state.gradient is None else state.gradient + gradient


class _Beginning(torch.autograd.Function):
    """The identity, whose gradient goes to the slice before."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, state: Tensor, leave: Callable[[Tensor], None]) -> Tensor:
        ctx.leave = leave
        return state.view_as(state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.leave(gradient)
        return None, None, None


class _Join(torch.autograd.Function):
    """The identity of its first argument, whose backward also begins that of the states."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradients: Callable[[], list[Tensor | None]], *states: Tensor) -> Tensor:
        ctx.gradients = gradients
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None, *ctx.gradients()
