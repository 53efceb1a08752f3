"""Any valid order of actions, on any placement, with any slices, gives the unsplit model's gradients, also where the
rows of its head are spread over the ranks."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise, product
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import PhiConfig

from slipstream import Action, Op, Schedule
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    build,
    gradient_error,
    labels_of,
    no_rounding_inside,
    tokens,
    unsplit_step,
)
from support.examples import examples
from support.hybrids import HYBRIDS
from support.parameters import first_of
from support.pipelines import make_pipe
from support.random_orders import by_rank, random_order
from support.unusual_layers import OWN_ATTENTION
from support.versions import since

LENGTH = 24
ATTENDING = ("llama, tied", "gpt2", "mistral, window of 7")
TIED = ("llama, tied", "gpt2", "gemma3")  # which also look up spread rows
PHI = PhiConfig(  # a head with a bias
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
_CONFIGS = ARCHITECTURES | HYBRIDS | OWN_ATTENTION | {"phi": PHI}
MODELS = {name: build(_CONFIGS[name]) for name in (*ATTENDING, "gemma3", "llama", "phi", "qwen3_5_text", "bloom")}
IN_WHOLE_LAYERS = ("phi", "qwen3_5_text", "bloom")


@st.composite
def schedules(draw: st.DrawFn, spread: bool = False, embedding: bool = False) -> Schedule:
    """A random order over a random placement: several stages a rank, in any arrangement, backwards whole or split.

    Any slices are recomputed, and moved to the host and back, wherever the rules of order allow it. Where the head is
    `spread`, V, L and VW, and with the `embedding` E and EW, stand anywhere, too.
    """
    num_stages, num_ranks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    placement = tuple(draw(st.integers(0, num_ranks - 1)) for _ in range(num_stages))
    assume(not spread or len({*placement}) == num_ranks)
    m, s = draw(st.integers(1, 3)), st.integers(1, 4)
    counts = (draw(s),) * m if draw(st.booleans()) else draw(st.tuples(*[s] * m))
    units = [(g, m, i) for g, (m, count) in product(range(num_stages), enumerate(counts)) for i in range(count)]
    actions = []
    for unit in units:
        ops = [Op.F, *draw(st.sampled_from([(Op.B,), (Op.I, Op.W)]))]
        ops += draw(st.sampled_from([(), (Op.R,)])) + draw(st.sampled_from([(), (), (Op.OFFLOAD, Op.RELOAD)]))
        actions += [Action(op, *unit) for op in ops]
    rows = by_rank(actions, placement, num_ranks)
    schedule = Schedule("random", rows, placement, m, max(counts), slice_counts=counts)
    if spread:
        slices, ops = schedule.microbatch_slices, [Op.V, Op.VW, *[Op.E, Op.EW] * embedding]
        actions += [Action(op, g, *each) for op, g, each in product(ops, schedule.vocabulary_stages, slices)]
        actions += [Action(Op.L, num_stages - 1, *each) for each in slices]
        schedule = replace(schedule, actions=by_rank(actions, placement, num_ranks))
    return random_order(schedule, Random(draw(st.integers(0, 2**32))))


def parts_of(data: st.DataObject, whole: int, number: int) -> list[int]:
    """So many numbers above 0 that add up to it."""
    bounds = data.draw(st.sets(st.integers(1, whole - 1), min_size=number - 1, max_size=number - 1))
    return [b - a for a, b in pairwise([0, *sorted(bounds), whole])]


def cut_settings(schedule: Schedule, data: st.DataObject) -> dict[str, Any]:
    """Returns how rows of LENGTH tokens are cut: into the schedule's slices, one list a microbatch if they differ."""
    if not schedule.is_ragged:
        return {"slices": parts_of(data, LENGTH, schedule.num_slices)}
    rows = torch.arange(3).tensor_split(schedule.num_microbatches)
    pairs = zip(rows, schedule.slice_counts, strict=True)
    return {"microbatches": [(len(part), parts_of(data, LENGTH, count)) for part, count in pairs]}


def check(name: str, data: st.DataObject, schedule: Schedule) -> None:
    settings = cut_settings(schedule, data)
    inputs = tokens(batch=3, length=LENGTH, seed=data.draw(st.integers(0, 99)))
    labels, model = labels_of(inputs), copy.deepcopy(MODELS[name])
    halves = 1 if name in IN_WHOLE_LAYERS else 2
    parts = parts_of(data, halves * model.config.num_hidden_layers, schedule.num_stages)
    settings["partition"] = [part / halves for part in parts]
    settings["recompute"] = data.draw(st.sampled_from(["stage", "stage+full", "selective"]))
    with no_rounding_inside():
        whole = copy.deepcopy(model)
        expected = unsplit_step(whole, inputs, labels)
        pipe = make_pipe(model, schedule, **settings)
        assert abs(pipe.step(inputs, labels) - expected) < BOUND
        assert gradient_error(whole, pipe) < BOUND
        assert abs(pipe.evaluate(inputs, labels) - expected) < BOUND


@pytest.mark.parametrize("name", first_of(ATTENDING))
@examples(25, thin=3)
@given(data=st.data())
def test_gradients_are_those_of_the_unsplit_model(name: str, data: st.DataObject) -> None:
    check(name, data, data.draw(schedules()))


@pytest.mark.parametrize("name", first_of((*TIED, "llama", "phi")))
@examples(25, thin=3)
@given(data=st.data())
def test_a_spread_head_has_them_too(name: str, data: st.DataObject) -> None:
    check(name, data, data.draw(schedules(spread=True, embedding=name in TIED)))


@pytest.mark.more
@pytest.mark.parametrize("name", [pytest.param("qwen3_5_text", marks=since("5.21")), "bloom"])
@examples(25)
@given(data=st.data())
def test_layers_that_carry_a_state_or_attend_by_code_of_their_own(name: str, data: st.DataObject) -> None:
    check(name, data, data.draw(schedules()))


@pytest.mark.grid
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["llama, tied", "gpt2"])
@examples(1000)
@given(data=st.data())
def test_two_thousand_schedules(name: str, data: st.DataObject) -> None:
    check(name, data, data.draw(schedules()))
