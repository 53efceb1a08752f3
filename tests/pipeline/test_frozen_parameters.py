"""Parameters that patterns of names freeze have no gradient; those of the others are the unsplit model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream import Op, Pipeline, SlipstreamError
from slipstream.model import meta_model
from slipstream.model.adapters import find_frozen, freeze, trained_text
from support.adapters import SLICES, pipe_error
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    build,
    gradients,
    labels_of,
    llama,
    no_rounding_inside,
    tokens,
    unsplit_step,
)
from support.options import grouped

LOWER = ["model.embed_tokens*", "model.layers.0.*", "model.layers.1.*"]  # the first of two stages
PATTERNS = {
    "the lower half": (LOWER, 1),
    "layers between": (["model.layers.1.*", "model.layers.2.mlp.*"], 0),
    "parts of layers": (["*_proj.weight", "model.norm*"], 0),
    "all but the head": (["model.*"], 1),
    "the head": (["lm_head.*"], 0),
}


def expected_gradients(patterns: list[str], architecture: str = "llama") -> dict[str, torch.Tensor]:
    whole = build(ARCHITECTURES[architecture])
    frozen = find_frozen(whole, patterns)
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        assert name not in frozen or parameter.requires_grad_(False) is parameter
    with no_rounding_inside():
        unsplit_step(whole, tokens(), labels_of(tokens()))
    return gradients(whole)


def make(patterns: list[str], architecture: str = "llama", schedule: str = "1f1b", **options: Any) -> Pipeline:
    stages = 2 if schedule in ("zb-v", "interleaved-1f1b") else 1
    arguments: dict[str, Any] = {"num_microbatches": 2, "slices": SLICES, "num_ranks": 2, "stages_per_rank": stages}
    arguments |= {"dtype": torch.float64, "self_check": False, "schedule": schedule} | options
    return Pipeline.from_config(ARCHITECTURES[architecture], freeze=patterns, **grouped(**arguments))


SCHEDULES = ("zb-v", "1f1b", "zb-h1", "interleaved-1f1b")
CASES = [
    pytest.param(name, schedule, marks=[pytest.mark.more] * ((row + column) % 4 > 0))
    for row, name in enumerate(PATTERNS)
    for column, schedule in enumerate(SCHEDULES)
]


@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_gradients_of_the_rest_are_exact(name: str, schedule: str) -> None:
    patterns, num_frozen = PATTERNS[name]
    stages = 4 if schedule in ("zb-v", "interleaved-1f1b") else 2
    pipe = make(patterns, schedule=schedule, partition=[4 // stages] * stages)
    assert pipe_error(pipe, expected_gradients(patterns)) < BOUND
    assert pipe.layout.training.num_frozen_stages >= num_frozen
    ran = {span.action.stage for span in pipe.timeline().spans if span.action.op in (Op.B, Op.I, Op.W)}
    assert min(ran) == pipe.layout.training.num_frozen_stages


@pytest.mark.parametrize("options", [{"recompute": "full"}, {"partition": [1.5, 2.5]}, {"vocabulary": "spread"}])
def test_they_are_with_other_options(options: dict[str, Any]) -> None:
    assert pipe_error(make(LOWER, **options), expected_gradients(LOWER)) < BOUND


@pytest.mark.parametrize("pattern", ["model.embed_tokens.*", "lm_head.*"])
@pytest.mark.parametrize("vocabulary", ["whole", "spread"])
def test_either_name_freezes_a_tied_weight_on_both_stages(pattern: str, vocabulary: str) -> None:
    expected = expected_gradients([pattern], "llama, tied")
    assert "model.embed_tokens.weight" not in expected
    assert pipe_error(make([pattern], "llama, tied", vocabulary=vocabulary), expected) < BOUND


def test_a_folder_s_model_is_frozen_too(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(ARCHITECTURES["llama"])
    model.save_pretrained(tmp_path)
    pipe = Pipeline.from_pretrained(tmp_path, freeze=LOWER, num_ranks=2, **grouped(self_check=False))
    trained = {name for name, parameter in pipe.named_parameters() if parameter.requires_grad}
    assert trained == {
        name for name, _ in model.named_parameters() if not name.startswith(tuple(p[:-1] for p in LOWER))
    }


def test_layers_are_cut_for_what_is_computed() -> None:
    """Of eight equal layers, the first of two ranks gets more where they run forwards alone: 6 of them are frozen."""
    config = llama(num_hidden_layers=8, vocab_size=61)
    frozen = ["model.embed_tokens*", *(f"model.layers.{layer}.*" for layer in range(6))]

    def cut(**more: Any) -> list[float]:
        options: dict[str, Any] = {"num_ranks": 2, "slices": 4, "seq_len": 64, "self_check": False}
        pipe = Pipeline.from_config(config, **grouped(**options), **more)
        return [each.stop - each.start for each in pipe.layout.layers]

    assert cut()[0] < 5
    # forwards of 6 layers weigh as much as 2 trained ones, and the head comes on top
    assert 6 <= cut(freeze=frozen)[0] < 7


REFUSED = {
    "model.layer.0.*": r"freeze: 'model.layer.0.\*' matches no parameter.*did you mean 'model.layers.0",
    "model.embed_tokens": r"to freeze what is inside, give model.embed_tokens.\*",
    "lm_head": r"lm_head.\*",
    "*": r"freeze=\['\*'\] matches all.*nothing would be trained",
}


@pytest.mark.parametrize("pattern", REFUSED)
def test_patterns_of_nothing_and_of_everything_are_refused(pattern: str) -> None:
    with pytest.raises(SlipstreamError, match=REFUSED[pattern]):
        make([pattern])


def test_how_many_train_is_told() -> None:
    whole = meta_model(ARCHITECTURES["llama"])
    head = whole.lm_head.weight.numel()
    freeze(whole, find_frozen(whole, ["model.*"]))
    assert trained_text(whole).startswith(f"{head:,} of {whole.num_parameters():,} parameters train (")
