"""The load-balancing loss of each layer's experts: the gradients of the whole model's, formed from all its tokens."""

from __future__ import annotations

import copy
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import slipstream
from slipstream import Pipeline
from slipstream.cluster_plans.model_report import report_on
from slipstream.errors import SlipstreamError
from support.architectures import BOUND, gradient_error, labels_of, llama, no_rounding_inside, tokens
from support.forked import launch, selected_cases
from support.hybrids import HYBRIDS
from support.mixtures import MIXTURES, mixture, unsplit_step
from support.options import grouped
from support.parameters import first_of
from support.paths import WORKERS
from support.pipelines import in_usual_order
from support.versions import since
from workers.model.router_loss import CASES

SETTINGS = [
    {"slices": [5, 1, 30, 28]},
    {"slices": [20, 44], "schedule": "zb-h1", "recompute": "full"},
    {"slices": 3, "schedule": "zb-v", "stages_per_rank": 2, "recompute": "selective"},
    {"slices": 1},
]


def error_of(model: PreTrainedModel, **settings: Any) -> float:
    whole, inputs = copy.deepcopy(model), tokens()
    with no_rounding_inside():
        unsplit_step(whole, [*zip(inputs.split(1), labels_of(inputs).split(1), strict=True)])
        options = {"num_microbatches": 2, "num_ranks": 2, "router_loss": "per_layer", **settings}
        pipe = Pipeline(model, **grouped(**in_usual_order(**options)))
        scale = 1024.0
        pipe.step(inputs, labels_of(inputs), loss_scale=scale)
    return gradient_error(whole, pipe)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(*each.values, marks=[*each.marks, *[since("5.21")] * (each.values[0] in HYBRIDS)])
        for each in first_of(MIXTURES, 3)
    ],
)
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
        pipe = Pipeline(model, slices=3, num_microbatches=2, num_ranks=2, schedule="1f1b", router_loss="per_layer")
        pipe.step(sequences, sequences)
    assert gradient_error(whole, pipe) < BOUND


@pytest.fixture(scope="module")
def replicas(request: pytest.FixtureRequest) -> CompletedProcess[str]:
    return launch(4, WORKERS / "model/router_loss.py", *selected_cases(request))


@pytest.mark.more
@pytest.mark.parametrize("case", CASES)
def test_replicas_of_two_stages(replicas: CompletedProcess[str], case: str) -> None:
    assert f"passed {case}\n" in replicas.stdout, replicas.stderr[-3000:]


def test_sums_without_their_gradient_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.attention.store._add_gradient", lambda *_: None)
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
