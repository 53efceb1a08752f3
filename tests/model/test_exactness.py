"""Every supported architecture, in stages and unequal slices, has the gradients of the unsplit model in float64."""

from __future__ import annotations

import copy

import pytest

from support.architectures import (
    ARCHITECTURES,
    build,
    gradient_error,
    labels_of,
    tokens,
    unsplit_step,
)
from support.exact_steps import exact_pipe
from support.parameters import each_once, first_of
from support.pipelines import make_pipe

SLICES = [5, 30, 17, 12]


@pytest.mark.parametrize(("name", "num_stages"), each_once(ARCHITECTURES, [2, 4]))
def test_gradients_are_those_of_the_unsplit_model(name: str, num_stages: int) -> None:
    inputs = tokens()
    settings = {"slices": SLICES, "num_microbatches": 2, "num_ranks": num_stages}
    exact_pipe(build(ARCHITECTURES[name]), inputs, labels_of(inputs), **settings)


# Norms of these sum a float32 gradient over the tokens of a slice, so its last bits depend on the cuts.
_ROUNDS_INSIDE = {"gemma2", "gemma3"}


@pytest.mark.parametrize("name", first_of(ARCHITECTURES, 2))
def test_the_models_own_roundings_are_all_that_differs(name: str) -> None:
    """The same without touching the model's casts: nothing else in the code path depends on the comparison above."""
    model = build(ARCHITECTURES[name])
    whole = copy.deepcopy(model)
    inputs = tokens()
    unsplit_step(whole, inputs, inputs)
    pipe = make_pipe(model, slices=SLICES, num_ranks=2)
    pipe.step(inputs, inputs)
    bound = 1e-6 if name in _ROUNDS_INSIDE else 1e-7
    assert gradient_error(whole, pipe) < bound


def test_an_error_shows_above_the_bound() -> None:
    """A window one token too wide, the smallest mistake of meaning, is far above every bound used here."""
    model, other = (
        build(ARCHITECTURES["mistral, window of 7"]),
        copy.deepcopy(ARCHITECTURES["mistral, window of 7"]),
    )
    other.sliding_window = 8
    wrong = build(other)
    inputs = tokens()
    unsplit_step(wrong, inputs, inputs)
    pipe = make_pipe(model, slices=SLICES, num_ranks=2)
    pipe.step(inputs, inputs)
    assert gradient_error(wrong, pipe) > 1e-4
