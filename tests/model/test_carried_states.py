"""Convolutions and recurrences continue from slice to slice, with the gradients of the unsplit model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream import Pipeline
from slipstream.errors import SlipstreamError
from slipstream.model import causal_cross_entropy, initial_states
from slipstream.model.hooks.slice_cache import CarriedState
from slipstream.model.hooks.token_slice import current_slice
from slipstream.model.initial_states import StateAdapter
from slipstream.model.toy import perturb_parameters
from slipstream.profile import count_model
from support.architectures import (
    BOUND,
    build,
    gradient_error,
    labels_of,
    no_rounding_inside,
    tokens,
    unsplit_step,
)
from support.hybrids import HYBRIDS, LENGTH
from support.options import grouped
from support.parameters import each_once, first_of
from support.pipelines import make_pipe
from support.versions import since

pytestmark = since("5.21")
SLICES = [5, 1, 46, 44]  # the second alone in its slice
FEATURES = [
    "qwen3_next",
    "lfm2",
    "bamba",
    "minimax",
    "jamba",
    "recurrent_gemma",
    "rwkv",
    "xlstm",
    "zaya",
]  # one of each


def unsplit(name: str) -> PreTrainedModel:
    model = build(HYBRIDS[name]).double()  # OLMo's decays stay float32, and so would their gradients
    perturb_parameters(model)
    return model


def error_of(name: str, model: PreTrainedModel | None = None, **settings: Any) -> float:
    """The largest relative error of a step's gradients."""
    model = model or unsplit(name)
    whole, inputs = copy.deepcopy(model), tokens(length=LENGTH)
    with no_rounding_inside():
        expected = unsplit_step(whole, inputs, labels_of(inputs))
        pipe = Pipeline(model, **grouped(**{"slices": SLICES, "num_microbatches": 2, "num_ranks": 2, **settings}))
        loss = pipe.step(inputs, labels_of(inputs))
        assert abs(loss - expected) < BOUND * expected
        assert abs(pipe.evaluate(inputs, labels_of(inputs)) - expected) < BOUND * expected
    return gradient_error(whole, pipe)


@pytest.mark.parametrize("name", first_of(HYBRIDS, 2))
def test_gradients_are_those_of_the_unsplit_model(name: str) -> None:
    assert error_of(name) < BOUND


class OwnMemory(StateAdapter):
    """What a further kind of state needs: this class, and its place in the list."""

    def matches(self, module: nn.Module) -> bool:
        return type(module).__name__ == "xLSTMBlock"

    def run(self, module: Any, forward: Callable[..., Any], x: Tensor, *_: Any, **__: Any) -> Any:
        context = current_slice()
        calls = [CarriedState(context.layer, "own memory", number) for number in range(3)]
        states = [context.state(call) for call in calls]
        output, after = forward(x, None if states[0] is None else tuple(states))
        for call, state in zip(calls, after, strict=True):
            context.change_state(call, state)
        return output, None


def test_a_further_state_is_one_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial_states, "ADAPTERS", [OwnMemory()])
    assert error_of("xlstm", self_check=False) < BOUND
    monkeypatch.setattr(initial_states, "ADAPTERS", [])
    with pytest.raises(SlipstreamError, match="can't be trained in token slices"):
        error_of("xlstm", self_check=False)


def test_a_state_without_its_gradient_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.attention.store._add_gradient", lambda *_: None)
    assert error_of("lfm2", self_check=False) > 1e-4


@pytest.mark.parametrize(
    ("settings", "name"),
    each_once(
        [
            {"schedule": "zb-h1", "recompute": "full"},
            {"recompute": "selective", "offload": 0.5},
            {"recompute": 1, "num_ranks": 1},
            {"schedule": "zb-v", "stages_per_rank": 2},
            {"slices": 3, "num_microbatches": 1, "schedule": "gpipe", "offload": 1.0},
        ],
        FEATURES,
        2,
    ),
)
def test_with_split_backwards_recomputation_and_offload(name: str, settings: dict[str, Any]) -> None:
    assert error_of(name, self_check=False, **settings) < BOUND


def test_frozen_layers_carry_states_without_gradients() -> None:
    model = unsplit("qwen3_next")
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "layers.0" not in name and "embed" not in name
    assert error_of("qwen3_next", model) < BOUND


@pytest.mark.parametrize(("slices", "every"), first_of([([20, 1, 19], 6), ([40], 6), ([17, 23], 2), ([9, 31], 1)], 2))
def test_rwkv_evaluates_as_in_evaluation_mode(slices: list[int], every: int) -> None:
    """There it halves hidden states every few layers, before norms whose epsilon stays."""
    config = copy.deepcopy(HYBRIDS["rwkv"])
    config.num_hidden_layers, config.rescale_every = 13 if every == 6 else 5, every
    model, inputs = build(config).train(), tokens(length=40)
    evaluated = copy.deepcopy(model).eval()
    with no_rounding_inside(), torch.no_grad():
        expected = causal_cross_entropy(evaluated(input_ids=inputs).logits[:, :-1], inputs[:, 1:])
    pipe = Pipeline(copy.deepcopy(model), slices=slices, num_ranks=2)
    for _ in range(2):  # a step changes nothing
        with no_rounding_inside():
            assert float(pipe.evaluate(inputs, inputs)) == pytest.approx(float(expected[0] / expected[1]), rel=1e-12)
            pipe.step(inputs, inputs)
            unsplit_step(model, inputs, inputs)
    assert gradient_error(model, pipe) < BOUND


def documents(*rows: tuple[int, ...]) -> Tensor:
    """The number of each token's document, given the documents' lengths in each row."""
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])


@pytest.mark.parametrize(
    ("name", "slices"), each_once(["zaya", *FEATURES[:-1], "nemotron_h", "kimi_linear"], [SLICES, [LENGTH]], 2)
)
def test_a_state_is_reset_where_a_document_begins(name: str, slices: list[int]) -> None:
    """Once at a slice's first token, in one row within a slice, for one token, and twice in a slice."""
    model, inputs, rows = unsplit(name), tokens(length=LENGTH), [(6, 20, 70), (40, 1, 11, 44)]
    whole, count = copy.deepcopy(model), sum(LENGTH - len(row) for row in rows)
    with no_rounding_inside():
        for row, lengths in zip(inputs, rows, strict=True):
            for document in row.split(lengths):
                logits = whole(input_ids=document[None], use_cache=False).logits
                (causal_cross_entropy(logits[:, :-1], document[None, 1:])[0] / count).backward()
        pipe = Pipeline(model, slices=slices, num_ranks=2)
        pipe.step(inputs, inputs, document_ids=documents(*rows))
    assert gradient_error(whole, pipe) < BOUND


def test_sequences_of_different_lengths() -> None:
    model, lengths = unsplit("qwen3_next"), [30, 7, 52, 1, 18]
    sequences = [row[:length] for row, length in zip(tokens(len(lengths), max(lengths)), lengths, strict=True)]
    whole, count = copy.deepcopy(model), sum(lengths) - len(lengths)
    with no_rounding_inside():
        for each in sequences:
            logits = whole(input_ids=each[None], use_cache=False).logits
            (causal_cross_entropy(logits[:, :-1], each[None, 1:])[0] / count).backward()
        pipe = Pipeline(model, slices=3, num_microbatches=2, num_ranks=2)
        pipe.step(sequences, sequences)
    assert gradient_error(whole, pipe) < BOUND


@pytest.mark.more
def test_costs_are_counted_and_measured_while_it_trains() -> None:
    config = HYBRIDS["qwen3_5_text"]
    assert len(count_model(config, LENGTH).layers) == 2
    settings: dict[str, Any] = {"schedule": "auto", "slices": "auto", "seq_len": LENGTH, "num_ranks": 2}
    pipe, inputs = Pipeline.from_config(config, num_microbatches=2, **settings), tokens(length=LENGTH)
    losses = [pipe.step(inputs, inputs) for _ in range(4)]
    assert max(losses) - min(losses) < 1e-5 * max(losses)


@pytest.mark.parametrize("name", first_of(["mamba", "mamba2"]))
def test_a_residual_in_float32_goes_to_the_next_stage(name: str) -> None:
    """Mamba's residual connections stay float32 in bfloat16."""
    inputs, losses = tokens(length=LENGTH), []
    for ranks, partition in ((1, "auto"), (2, "auto"), (2, [0, HYBRIDS[name].num_hidden_layers])):
        settings = {"slices": SLICES, "num_ranks": ranks, "partition": partition, "dtype": torch.bfloat16}
        pipe = make_pipe(HYBRIDS[name], **settings)
        losses.append(pipe.step(inputs, inputs))
    assert losses[1] == losses[2] == losses[0]
