"""Parameters that patterns of names freeze have no gradient; those of the others are the unsplit model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream import Op, Pipeline
from slipstream.model import meta_model
from slipstream.model.trained_weights import find_frozen, freeze, trained_text
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
from support.pipelines import make_pipe
from support.refusals import refused

LOWER = ["model.embed_tokens*", "model.layers.0.*", "model.layers.1.*"]  # the first of two stages
PATTERNS = {
    "the lower half": (LOWER, 1),
    "layers between": (["model.layers.1.*", "model.layers.2.mlp.*"], 0),
    "parts of layers": (["*_proj.weight", "model.norm*"], 0),
    "all but the head": (["model.*"], 1),
    "the head": (["lm_head.*"], 0),
}


def expected_gradients(patterns: list[str], architecture: str) -> dict[str, torch.Tensor]:
    whole = build(ARCHITECTURES[architecture])
    frozen = find_frozen(whole, patterns)
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        assert name not in frozen or parameter.requires_grad_(False) is parameter
    with no_rounding_inside():
        unsplit_step(whole, tokens(), labels_of(tokens()))
    return gradients(whole)


def make(patterns: list[str], architecture: str = "llama", **options: Any) -> Pipeline:
    defaults = {"num_microbatches": 2, "slices": SLICES, "num_ranks": 2, "dtype": torch.float64}
    return make_pipe(ARCHITECTURES[architecture], freeze=patterns, **defaults | options)


ORDERS: list[dict[str, Any]] = [
    {"schedule": "zb-v", "stages_per_rank": 2, "partition": [1] * 4},
    {"schedule": "1f1b", "partition": [2, 2]},
    {"schedule": "zb-h1", "partition": [2, 2]},
    {"schedule": "interleaved-1f1b", "stages_per_rank": 2, "partition": [1] * 4},
]
# `make test` has each pattern in one order, `make test-all` in two.
WHEN: list[Any] = [[], [pytest.mark.more], [pytest.mark.grid], [pytest.mark.grid]]


@pytest.mark.parametrize(
    ("architecture", "patterns", "options", "num_frozen"),
    [
        *(
            pytest.param("llama", patterns, order, num_frozen, marks=WHEN[(row + column) % len(ORDERS)])
            for row, (patterns, num_frozen) in enumerate(PATTERNS.values())
            for column, order in enumerate(ORDERS)
        ),
        *(
            ("llama", LOWER, options, 0)
            for options in ({"recompute": "full"}, {"partition": [1.5, 2.5]}, {"vocabulary": "spread"})
        ),
        *(  # either name freezes a tied weight, on both stages
            ("llama, tied", [pattern], {"vocabulary": vocabulary}, 0)
            for pattern in ("model.embed_tokens.*", "lm_head.*")
            for vocabulary in ("whole", "spread")
        ),
    ],
)
def test_gradients_of_the_rest_are_exact(
    architecture: str, patterns: list[str], options: dict[str, Any], num_frozen: int
) -> None:
    pipe, expected = make(patterns, architecture, **options), expected_gradients(patterns, architecture)
    assert architecture != "llama, tied" or "model.embed_tokens.weight" not in expected
    assert pipe_error(pipe, expected) < BOUND
    assert pipe.layout.training.num_frozen_stages >= num_frozen
    ran = {span.action.stage for span in pipe.timeline().spans if span.action.op in (Op.B, Op.I, Op.W)}
    assert min(ran) == pipe.layout.training.num_frozen_stages


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
    frozen = ["model.embed_tokens*", *(f"model.layers.{layer}.*" for layer in range(6))]

    def first(**more: Any) -> float:
        pipe = make_pipe(llama(num_hidden_layers=8), schedule="1f1b", num_ranks=2, slices=4, seq_len=64, **more)
        return pipe.layout.layers[0].stop

    assert first() < 5
    # forwards of 6 layers weigh as much as 2 trained ones, and the head comes on top
    assert 6 <= first(freeze=frozen) < 7


REFUSED = {
    "model.layer.0.*": "freeze: 'model.layer.0.*' matches no parameter .. did you mean 'model.layers.0",
    "model.embed_tokens": "to freeze what is inside, give model.embed_tokens.*",
    "lm_head": "lm_head.*",
    "*": "freeze=['*'] matches all .. nothing would be trained",
}


@pytest.mark.parametrize("pattern", REFUSED)
def test_patterns_of_nothing_and_of_everything_are_refused(pattern: str) -> None:
    with refused(REFUSED[pattern]):
        make([pattern])


def test_how_many_train_is_told() -> None:
    whole = meta_model(ARCHITECTURES["llama"])
    head = whole.lm_head.weight.numel()
    freeze(whole, find_frozen(whole, ["model.*"]))
    assert trained_text(whole).startswith(f"{head:,} of {whole.num_parameters():,} parameters train (")
