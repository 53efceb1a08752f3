"""The load-balancing loss of each layer's experts: the gradients of the whole model's, formed from all its tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot
from transformers import GraniteMoeConfig, PretrainedConfig, PreTrainedModel, Qwen2MoeConfig

import slipstream
from slipstream import Pipeline
from slipstream.errors import SlipstreamError
from slipstream.model import causal_cross_entropy
from slipstream.model.toy import perturb_parameters
from slipstream.planning.model_report import report_on
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    VOCABULARY,
    build,
    gradient_error,
    gradients,
    labels_of,
    llama,
    no_rounding_inside,
    tokens,
)
from support.hybrids import HYBRIDS
from support.options import grouped
from support.parameters import first_of

COEFFICIENT = 0.5  # so that the loss counts
MIXTURES: dict[str, PretrainedConfig] = {
    "qwen2_moe, a dense layer": Qwen2MoeConfig(**ARCHITECTURES["qwen2_moe"].to_diff_dict() | {"mlp_only_layers": [1]}),
    "mixtral": ARCHITECTURES["mixtral"],
    "qwen3_next": HYBRIDS["qwen3_next"],
    "jamba": HYBRIDS["jamba"],
    "gpt_oss": ARCHITECTURES["gpt_oss"],
    "granitemoe": GraniteMoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
}
SETTINGS = [
    {"slices": [5, 1, 30, 28]},
    {"slices": [20, 44], "schedule": "zb-h1", "recompute": "full"},
    {"slices": 3, "schedule": "zb-v", "stages_per_rank": 2, "recompute": "selective"},
    {"slices": 1},
]


def mixture(name: str) -> PreTrainedModel:
    config = copy.deepcopy(MIXTURES[name])
    config.output_router_logits, config.router_aux_loss_coef = True, COEFFICIENT
    model = build(config).double()
    perturb_parameters(model)
    model.router_aux_loss_coef = COEFFICIENT
    return model


def switch_loss(logits: Tensor, top_k: int) -> Tensor:
    """Equations 4 to 6 of the paper, of one layer's logits (tokens, experts)."""
    num_experts = logits.shape[-1]
    chances = logits.softmax(-1)
    choices = one_hot(chances.topk(top_k).indices, num_experts).sum(1).to(chances.dtype)
    return num_experts * (choices.mean(0) * chances.mean(0)).sum()


def unsplit_step(model: PreTrainedModel, batches: list[tuple[Tensor, Tensor]]) -> None:
    """The gradients of the microbatches' tokens and labels, each loss weighted by its labels that count."""
    count = sum(int((labels[:, 1:] != -100).sum()) for _, labels in batches)
    for inputs, labels in batches:
        output = model(input_ids=inputs, use_cache=False, output_router_logits=True)
        total, valid = causal_cross_entropy(output.logits[:, :-1], labels[:, 1:])
        added = [switch_loss(each.flatten(0, -2), model.num_experts_per_tok) for each in output.router_logits]
        (total / count + int(valid) / count * COEFFICIENT * torch.stack(added).mean()).backward()


def error_of(model: PreTrainedModel, **settings: Any) -> float:
    whole, inputs = copy.deepcopy(model), tokens()
    with no_rounding_inside():
        unsplit_step(whole, [*zip(inputs.split(1), labels_of(inputs).split(1), strict=True)])
        options = {"num_microbatches": 2, "num_ranks": 2, "router_loss": "per_layer", **settings}
        pipe = Pipeline(model, **grouped(**options))
        scale = 1024.0
        pipe.step(inputs, labels_of(inputs), loss_scale=scale)
    return gradient_error(gradients(whole.named_parameters()), gradients(pipe.named_parameters()))


@pytest.mark.parametrize("name", first_of(MIXTURES, 3))
def test_gradients_are_those_of_the_whole_model(name: str) -> None:
    assert error_of(mixture(name), **SETTINGS[0]) < BOUND


@pytest.mark.parametrize("settings", SETTINGS[1:])
def test_with_split_backwards_recomputation_and_whole_sequences(settings: dict[str, Any]) -> None:
    assert error_of(mixture("mixtral"), self_check=False, **settings) < BOUND


def test_a_layer_cut_in_halves() -> None:
    assert error_of(mixture("mixtral"), slices=3, partition=[2.5, 1.5], self_check=False) < BOUND


def test_sequences_of_different_lengths() -> None:
    model, lengths = mixture("mixtral"), [30, 17]
    sequences = [row[:length] for row, length in zip(tokens(2, 30), lengths, strict=True)]
    whole = copy.deepcopy(model)
    with no_rounding_inside():
        unsplit_step(whole, [(each[None], each[None]) for each in sequences])
        pipe = Pipeline(model, slices=3, num_microbatches=2, num_ranks=2, router_loss="per_layer")
        pipe.step(sequences, sequences)
    assert gradient_error(gradients(whole.named_parameters()), gradients(pipe.named_parameters())) < BOUND


def test_sums_without_their_gradient_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.attention.carried_states._add_gradient", lambda *_: None)
    assert error_of(mixture("mixtral"), slices=3, self_check=False) > 1e-4


def test_what_is_refused() -> None:
    mixtral = mixture("mixtral").config
    unchecked = slipstream.Runtime(self_check=False)
    with pytest.raises(SlipstreamError, match=r"of 'mixtral'.*Give router_loss='per_layer'.*or set output_router"):
        Pipeline.from_config(mixtral, slices=1, runtime=unchecked)
    assert "pipeline.router_loss='per_layer'" in report_on(mixtral).refusal
    with pytest.raises(SlipstreamError, match=r"router_loss='per_layer': 'llama' has no load-balancing loss"):
        Pipeline.from_config(llama(), runtime=unchecked, router_loss="per_layer")
    with pytest.raises(SlipstreamError, match=r"router_loss='all': give one of none, per_layer"):
        Pipeline.from_config(llama(), router_loss="all")
    with pytest.raises(SlipstreamError, match=r"router_loss='per_layer': an option of causal LMs"):
        Pipeline(torch.nn.Sequential(torch.nn.Linear(2, 2)), router_loss="per_layer")
