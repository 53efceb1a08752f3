"""What an initial state adds to a recurrence, next to the recurrence over the whole sequence."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.mamba.modeling_mamba import mamba_selective_scan

from slipstream.model.initial_states import scan_from
from support.architectures import BOUND, gradient_error, no_rounding_inside
from support.examples import examples

WIDTH, STATES = 6, 4


@examples(25)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), has_bias=st.booleans(), seed=st.integers(0, 99))
def test_scans_one_after_the_other_are_the_whole_scan(lengths: list[int], has_bias: bool, seed: int) -> None:
    """Outputs and last state, and the gradients of both: transformers' scan leaves the state, and begins without."""
    generator, length = torch.Generator().manual_seed(seed), sum(lengths)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    x, dt, z = (numbers(2, WIDTH, length) for _ in range(3))
    B, C = (numbers(2, STATES, length) for _ in range(2))
    A, D, bias = numbers(WIDTH, STATES), numbers(WIDTH), numbers(WIDTH) if has_bias else None
    settings: dict[str, Any] = {"D": D, "delta_bias": bias, "delta_softplus": True}
    with no_rounding_inside():
        output, last = mamba_selective_scan(x, dt, -A.exp(), B, C, z=z, return_last_state=True, **settings)
        pieces: list[Tensor] = []
        state: Tensor | None = None
        for parts in zip(*(each.split(lengths, dim=-1) for each in (x, dt, z, B, C)), strict=True):
            own_x, own_dt, own_z, own_b, own_c = parts
            inputs = own_x, own_dt, -A.exp(), own_b, own_c
            piece, state = scan_from(state, mamba_selective_scan, *inputs, z=own_z, **settings)
            pieces.append(piece)
    assert state is not None
    torch.testing.assert_close(torch.cat(pieces, dim=-1), output, rtol=BOUND, atol=BOUND)
    torch.testing.assert_close(state, last, rtol=BOUND, atol=BOUND)
    leaves = [each for each in (x, dt, z, B, C, A, D, bias) if each is not None]
    weights = torch.randn(last.shape, generator=generator, dtype=torch.float64)

    def gradients(outputs: Tensor, after: Tensor) -> dict[str, Tensor]:
        total = outputs.square().sum() + (weights * after).sum()
        return dict(zip(map(str, range(9)), torch.autograd.grad(total, leaves), strict=False))

    assert gradient_error(gradients(output, last), gradients(torch.cat(pieces, dim=-1), state)) < BOUND
