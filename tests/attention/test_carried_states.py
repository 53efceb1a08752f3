"""Carried states are freed, and a wrong order of slices is named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.attention import CarriedStates, ContextError

CUTS = [(0, 3), (3, 4), (4, 9)]


def inputs() -> Tensor:
    return torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()


def decayed(state: Tensor | None, x: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """A recurrence: s(t) = decay * s(t-1) + x(t), y(t) = s(t)^2; returns y and the last s."""
    outputs = []
    state = torch.zeros((), dtype=x.dtype) if state is None else state
    for each in x:
        state = decay * state + each
        outputs.append(state**2)
    return torch.stack(outputs), state


def run(states: CarriedStates, x: Tensor, decay: Tensor, first: int, end: int) -> Tensor:
    output, state = decayed(states.read("a", first), x[first:end], decay)
    return states.leave({"a": state}, first, end, output)


def test_a_forward_before_the_one_it_continues() -> None:
    states, decay = CarriedStates(), torch.tensor(0.9)
    with pytest.raises(ContextError, match=r"from token 3 on needs the state of 'a'.*first run the slice before"):
        run(states, inputs(), decay, 3, 4)


def test_a_backward_before_that_of_the_next_slice() -> None:
    states, decay = CarriedStates(), torch.tensor(0.9, dtype=torch.float64)
    outputs = [run(states, inputs(), decay, *cut) for cut in CUTS]
    with pytest.raises(ContextError, match=r"slice \[3, 4\) runs backward before the slice from 4 on"):
        outputs[1].sum().backward()


def test_a_forward_after_the_backward_that_frees_its_state() -> None:
    states, decay = CarriedStates(), torch.tensor(0.9, dtype=torch.float64)
    outputs = [run(states, inputs(), decay, *cut) for cut in CUTS]
    outputs[2].sum().backward()
    with pytest.raises(ContextError, match=r"from token 4 on .*any more"):
        run(states, inputs(), decay, 4, 9)


def test_without_gradients_one_state_is_kept() -> None:
    states, decay = CarriedStates(), torch.tensor(0.9, dtype=torch.float64)
    with torch.no_grad():
        for cut in CUTS:
            run(states, inputs(), decay, *cut)
            assert len(states._states) == 1
    states.free()
    assert not states.calls


def test_what_is_left_holds_no_more_than_its_numbers() -> None:
    states, long = CarriedStates(), torch.randn(1000)
    states.leave({"a": long[-3:]}, 0, 1000, long)
    left = states.read("a", 1000)
    assert left is not None
    assert left.untyped_storage().nbytes() == 3 * 4
