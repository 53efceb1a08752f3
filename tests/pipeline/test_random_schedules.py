"""Any valid order of actions, on any placement, with any slices, gives the unsplit model's gradients."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from slipstream import Action, Op, Schedule
from slipstream.schedule import predecessors
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    build,
    gradient_error,
    gradients,
    labels_of,
    no_rounding_inside,
    tokens,
    unsplit_step,
)
from support.examples import examples
from support.hybrids import HYBRIDS
from support.parameters import first_of
from support.pipelines import make_pipe
from support.unusual_layers import OWN_ATTENTION
from support.versions import since

LENGTH = 24
ATTENDING = ("llama, tied", "gpt2", "mistral, window of 7")
_CONFIGS = ARCHITECTURES | HYBRIDS | OWN_ATTENTION
MODELS = {name: build(_CONFIGS[name]) for name in (*ATTENDING, "qwen3_5_text", "bloom")}


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """A random order over a random placement: several stages a rank, in any arrangement, backwards whole or split.

    Any slices are recomputed, and moved to the host and back, wherever the rules of order allow it.
    """
    num_stages, num_ranks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    placement = tuple(draw(st.integers(0, num_ranks - 1)) for _ in range(num_stages))
    m, s = draw(st.integers(1, 3)), st.integers(1, 4)
    counts = (draw(s),) * m if draw(st.booleans()) else draw(st.tuples(*[s] * m))
    units = [(g, m, i) for g, (m, count) in product(range(num_stages), enumerate(counts)) for i in range(count)]
    actions = []
    for unit in units:
        ops = [Op.F, *draw(st.sampled_from([(Op.B,), (Op.I, Op.W)]))]
        ops += draw(st.sampled_from([(), (Op.R,)])) + draw(st.sampled_from([(), (), (Op.OFFLOAD, Op.RELOAD)]))
        actions += [Action(op, *unit) for op in ops]

    def rows(order: list[Action]) -> tuple[tuple[Action, ...], ...]:
        of_rank = [[action for action in order if placement[action.stage] == rank] for rank in range(num_ranks)]
        return tuple(map(tuple, of_rank))

    rules = Schedule("rules", rows(actions), placement, m, max(counts), slice_counts=counts)
    order = _random_order(actions, rules, random.Random(draw(st.integers(0, 2**32))))
    return replace(rules, name="random", actions=rows(order))


def _random_order(actions: list[Action], rules: Schedule, generator: random.Random) -> list[Action]:
    done: list[Action] = []
    left = list(actions)
    while left:
        ready = [action for action in left if set(predecessors(action, rules)) <= set(done)]
        done.append(generator.choice(ready))
        left.remove(done[-1])
    return done


@st.composite
def cuts(draw: st.DrawFn, num_slices: int) -> list[int]:
    bounds = sorted(draw(st.sets(st.integers(1, LENGTH - 1), min_size=num_slices - 1, max_size=num_slices - 1)))
    return [b - a for a, b in zip([0, *bounds], [*bounds, LENGTH], strict=True)]


@st.composite
def partitions(draw: st.DrawFn, num_stages: int, num_layers: int, parts: int = 2) -> list[float]:
    """Layers, of `parts` parts each, to every stage."""
    whole, cuts = parts * num_layers, num_stages - 1
    bounds = sorted(draw(st.sets(st.integers(1, whole - 1), min_size=cuts, max_size=cuts)))
    return [(b - a) / parts for a, b in zip([0, *bounds], [*bounds, whole], strict=True)]


def run_unsplit(model: PreTrainedModel, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    whole = copy.deepcopy(model)
    unsplit_step(whole, inputs, labels)
    return gradients(whole)


def cut_settings(schedule: Schedule, data: st.DataObject) -> dict[str, Any]:
    """Returns how rows of LENGTH tokens are cut: into the schedule's slices, one list a microbatch if they differ."""
    if not schedule.is_ragged:
        return {"slices": data.draw(cuts(schedule.num_slices))}
    rows = torch.arange(3).tensor_split(schedule.num_microbatches)
    pairs = zip(rows, schedule.slice_counts, strict=True)
    return {"microbatches": [(len(part), data.draw(cuts(count))) for part, count in pairs]}


def check(name: str, data: st.DataObject, parts: int = 2) -> None:
    schedule = data.draw(schedules())
    settings = cut_settings(schedule, data)
    inputs = tokens(batch=3, length=LENGTH, seed=data.draw(st.integers(0, 99)))
    labels = labels_of(inputs)
    recompute = data.draw(st.sampled_from(["stage", "stage+full", "selective"]))
    model = copy.deepcopy(MODELS[name])
    partition = data.draw(partitions(schedule.num_stages, model.config.num_hidden_layers, parts))
    settings |= {"schedule": schedule, "partition": partition, "recompute": recompute}
    pipe = make_pipe(model, **settings)
    pipe.step(inputs, labels)
    expected = run_unsplit(MODELS[name], inputs, labels)
    assert gradient_error(expected, gradients(pipe)) < BOUND


@pytest.mark.parametrize("name", first_of(ATTENDING))
@examples(25, thin=3)
@given(data=st.data())
def test_gradients_are_those_of_the_unsplit_model(name: str, data: st.DataObject) -> None:
    check(name, data)


@pytest.mark.more
@since("5.21")
@examples(25)
@given(data=st.data())
def test_carried_states(data: st.DataObject) -> None:
    """Layers that carry a state are whole."""
    with no_rounding_inside():
        check("qwen3_5_text", data, parts=1)


@pytest.mark.more
@examples(25)
@given(data=st.data())
def test_attention_of_their_own(data: st.DataObject) -> None:
    """Layers that attend by code of their own are whole."""
    with no_rounding_inside():
        check("bloom", data, parts=1)


@pytest.mark.grid
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["llama, tied", "gpt2"])
@examples(1000)
@given(data=st.data())
def test_two_thousand_schedules(name: str, data: st.DataObject) -> None:
    check(name, data)
