"""Models that attend by code of their own, on keys and values from the cache, have the unsplit model's gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from slipstream import Pipeline, SlipstreamError
from slipstream.model import causal_cross_entropy, check_sliceable, find_anatomy
from slipstream.model.toy import perturb_parameters
from support.architectures import (
    BOUND,
    gradient_error,
    labels_of,
    no_rounding_inside,
    tokens,
    unsplit_step,
)
from support.options import grouped
from support.own_attention import LENGTH, OWN_ATTENTION
from support.parameters import each_once, first_of

SLICES = [5, 1, 46, 44]  # the second alone in its slice


def unsplit(name: str) -> PreTrainedModel:
    """The model in float64, with the attention that it has by default."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(OWN_ATTENTION[name]), dtype=torch.float64)
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


@pytest.mark.parametrize("name", first_of(OWN_ATTENTION, 3))
def test_gradients_are_those_of_the_unsplit_model(name: str) -> None:
    assert error_of(name) < BOUND


def test_prefixes_without_their_gradients_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_own(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.store.finish(ctx.call, ctx.ranges)
        return *(each[:, :, ctx.ranges.start :] for each in gradients), None, None, None

    monkeypatch.setattr("slipstream.attention.slice_attention._Prefix.backward", only_own)
    assert error_of("gptj", self_check=False) > 1e-4


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
        ["bloom", "falcon", "gpt_neo"],
        2,
    ),
)
def test_with_split_backwards_recomputation_and_offload(name: str, settings: dict[str, Any]) -> None:
    assert error_of(name, self_check=False, **settings) < BOUND


def test_frozen_layers_read_prefixes_without_gradients() -> None:
    model = unsplit("gptj")
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "h.0." not in name and "wte" not in name
    assert error_of("gptj", model) < BOUND


def documents(*rows: tuple[int, ...]) -> Tensor:
    """The number of each token's document, given the documents' lengths in each row."""
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])


@pytest.mark.parametrize("slices", [SLICES, [LENGTH]], ids=["slices", "whole"])
@pytest.mark.parametrize("name", first_of(OWN_ATTENTION, 3))
def test_documents_are_separate_sequences(name: str, slices: list[int]) -> None:
    """Begun at a slice's first token, in one row within a slice, for one token, and twice in a slice."""
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


@pytest.mark.parametrize("name", first_of(["mpt", "gpt_neo"]))
def test_sequences_of_different_lengths(name: str) -> None:
    model, lengths = unsplit(name), [30, 7, 52, 1, 18]
    sequences = [row[:length] for row, length in zip(tokens(len(lengths), max(lengths)), lengths, strict=True)]
    whole, count = copy.deepcopy(model), sum(lengths) - len(lengths)
    with no_rounding_inside():
        for each in sequences:
            logits = whole(input_ids=each[None], use_cache=False).logits
            (causal_cross_entropy(logits[:, :-1], each[None, 1:])[0] / count).backward()
        pipe = Pipeline(model, slices=3, num_microbatches=2, num_ranks=2)
        pipe.step(sequences, sequences)
    assert gradient_error(whole, pipe) < BOUND


def test_kernels_of_their_own_are_refused() -> None:
    config = copy.deepcopy(OWN_ATTENTION["bloom"])
    config._attn_implementation_internal = "flash_attention_2"  # as when it was loaded with that
    with pytest.raises(SlipstreamError, match=r"'flash_attention_2'.*Load it with attn_implementation='eager'"):
        find_anatomy(config)


def test_documents_are_exact_at_any_length() -> None:
    assert check_sliceable(OWN_ATTENTION["falcon, alibi"]).longest_packed == float("inf")
