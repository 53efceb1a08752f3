"""What nobody gives is planned by counted operations: alike on every run, with what is given kept, and exact."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from slipstream import Layers, Pipeline
from slipstream.schedule import make_schedule, slice_lengths, split_backwards
from slipstream.simulator import memory_of
from support.architectures import ARCHITECTURES, BOUND, build, gradient_error, labels_of, tokens
from support.exact_steps import exact_pipe, sequences_error
from support.pipelines import make_pipe
from support.refusals import refused

PLANNED = "planned by counted operations: "


def choices(pipe: Pipeline) -> tuple[Any, ...]:
    """What was planned: the cut, the ranks of the stages, the order, and the slices of the last step."""
    layers = [stage.stop - stage.start for stage in pipe.layout.layers]
    return layers, str(pipe.order), pipe.last_step.slices


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}),
        ("gpt2", {"num_microbatches": 2, "num_ranks": 3}),  # its head is tied to its embedding
        ("mistral, window of 7", {"slices": 3, "schedule": None}),
        ("gemma3", {"schedule": "interleaved-1f1b", "num_microbatches": 2}),
        ("llama", {"partition": [1.5, 2.5], "recompute": "full"}),
        ("llama", {"num_microbatches": 12, "num_flushes": 2}),
        ("llama", {"stages_per_rank": 2, "num_microbatches": 9}),  # many for each rank: an order that has a name
    ],
    ids=str,
)
def test_a_step_is_exact_with_what_is_open(name: str, settings: dict[str, Any]) -> None:
    inputs = tokens(settings.get("num_microbatches", 1))
    pipe = exact_pipe(build(ARCHITECTURES[name]), inputs, labels_of(inputs), **settings)
    assert pipe.how_planned.startswith(PLANNED)
    again = make_pipe(build(ARCHITECTURES[name]), **{"num_ranks": 2} | settings)
    again.step(inputs, labels_of(inputs))
    assert choices(again) == choices(pipe)


def test_what_is_given_is_kept() -> None:
    given = {"num_ranks": 2, "num_microbatches": 2}
    model = build(ARCHITECTURES["llama"])
    named = make_pipe(copy.deepcopy(model), "1f1b", **given)
    sliced = make_pipe(copy.deepcopy(model), None, slices=[10, 8, 6], **given)
    cut = make_pipe(copy.deepcopy(model), partition=[0.5, 1.5, 1.5, 0.5], **given)
    for pipe in (named, sliced, cut):
        pipe.step(tokens(2, 24), tokens(2, 24))
    count = len(named.last_step.slices)
    assert named.order.actions == split_backwards(make_schedule("1f1b", 2, 2, count)).actions
    assert sliced.last_step.slices == [10, 8, 6]
    assert [stage.stop - stage.start for stage in cut.layout.layers] == [0.5, 1.5, 1.5, 0.5]


def test_order_and_slices_that_are_given_leave_the_usual_cut() -> None:
    pipe = make_pipe(build(ARCHITECTURES["llama"]), "1f1b", 1, 8, num_ranks=2)
    assert pipe.how_planned == ""
    assert pipe.order.actions == split_backwards(make_schedule("1f1b", 2, 1, 8)).actions
    assert pipe.slices(30) == slice_lengths(8, 30)
    assert [stage.stop - stage.start for stage in pipe.layout.layers] == [2, 2]


def test_rows_of_another_length_run_in_as_many_slices() -> None:
    pipe = make_pipe(build(ARCHITECTURES["llama"]), num_ranks=2, slices=None, seq_len=32)
    counts = []
    for length in (32, 20, 2, 32):
        pipe.step(tokens(1, length), tokens(1, length))
        counts.append(len(pipe.last_step.slices))
        assert sum(pipe.last_step.slices) == length
    assert counts[1] == counts[0]


@pytest.mark.parametrize("settings", [{}, {"num_microbatches": 2}, {"slices": 2, "schedule": None}], ids=str)
def test_sequences_of_different_lengths(settings: dict[str, Any]) -> None:
    assert sequences_error(build(ARCHITECTURES["llama"]), (5, 24, 11, 2), num_ranks=2, **settings) < BOUND


def peak(pipe: Pipeline, inputs: torch.Tensor) -> float:
    """The bytes of the fullest rank in a step, by its own tensors."""
    pipe.step(inputs, inputs)
    return max(rank.peak for rank in memory_of(pipe.layout.training, pipe.memory_table(inputs, inputs)))


def test_a_plan_holds_little_more_than_the_usual_one_and_keeps_a_limit() -> None:
    """By the search alone a rank would hold all microbatches, for a percent or two."""
    inputs, model, settings = tokens(8), build(ARCHITECTURES["llama"]), {"num_ranks": 2, "num_microbatches": 8}
    usual = peak(make_pipe(copy.deepcopy(model), "1f1b", slices=8, **settings), inputs)
    gpipe = peak(make_pipe(copy.deepcopy(model), "gpipe", slices=1, **settings), inputs)
    planned = peak(make_pipe(copy.deepcopy(model), **settings), inputs)
    assert planned < 1.5 * usual < gpipe
    limited = make_pipe(model, memory_limit=1.02 * usual, **settings)
    assert peak(limited, inputs) <= 1.02 * usual
    assert limited.how_planned.startswith(PLANNED)


def test_what_cant_be_counted_is_as_usual_and_says_why() -> None:
    pipe = make_pipe(layers(), num_ranks=2, num_microbatches=2, partition=[4, 3])
    assert "nothing is planned: the layers' costs aren't known. Give layers=" in str(pipe)
    assert pipe.order.name == "1f1b"
    model = exact_pipe(build(ARCHITECTURES["qwen2_moe"]), tokens(1))  # whose loop over experts needs their values
    assert "nothing is planned: what a model of model_type 'qwen2_moe' computes can't be counted" in str(model)
    assert model.slices(24) == slice_lengths(8, 24)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    parts = [part for _ in range(3) for part in (nn.Linear(6, 6), nn.Tanh())]
    return nn.Sequential(*parts, nn.Linear(6, 4)).double()


@pytest.mark.parametrize(
    "given", [{"example": torch.ones(2, 6, dtype=torch.float64)}, {"costs": [4.0, 1, 4, 1, 4, 1, 8]}], ids=list
)
def test_a_sequence_of_layers(given: dict[str, Any]) -> None:
    inputs, targets = torch.randn(8, 6, dtype=torch.float64), torch.arange(8) % 4
    whole = layers()
    loss = nn.functional.cross_entropy(whole(inputs), targets)
    loss.backward()
    pipe = Pipeline(layers(), num_ranks=2, num_microbatches=4, layers=Layers(**given))
    assert pipe.how_planned.startswith(PLANNED)
    assert abs(pipe.step(inputs, targets) - loss) < BOUND
    assert gradient_error(whole, pipe) < BOUND


def test_more_stages_than_layers_are_refused_by_their_number() -> None:
    """And not by the order, which nobody gave."""
    with refused("8 stages for 4 layers"):
        make_pipe(ARCHITECTURES["llama"], num_ranks=2, stages_per_rank=4)
    model = build(ARCHITECTURES["llama"]).requires_grad_(False)
    assert "nothing is trained" in make_pipe(model, num_ranks=2).how_planned
