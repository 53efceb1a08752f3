"""The lines that print(pipe) shows say how the pipeline is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream import Pipeline
from support.architectures import ARCHITECTURES
from support.options import grouped

CASES: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"slices": 3, "num_microbatches": 2, "partition": [2.5, 1.5]},
        [
            "Pipeline of llama",
            "  layers: 2.5 + 1.5 in 2 stages, on ranks 0, 1",
            "  schedule: 1f1b, 2 microbatches, slices: 3",
            "  mesh: one process, on cpu",
        ],
    ),
    (
        {"slices": [5, 3], "schedule": "zb-v", "stages_per_rank": 2, "partition": [1, 1, 1, 1]},
        ["1 + 1 + 1 + 1 in 4 stages, on ranks 0, 1, 1, 0", "zb-v, 1 microbatch, slices of tokens: 5, 3"],
    ),
    ({"schedule": "auto", "slices": "auto"}, ['"auto" is still to be planned']),
    ({"vocabulary": "spread", "slices": 2}, ["the head's rows are spread over all ranks"]),
    ({"num_ranks": 1, "slices": 2}, ["layers: 4 in 1 stage, on rank 0\n"]),
    ({"dtype": "bfloat16", "master_dtype": "float32"}, ["on this rank; bfloat16, updated in float32"]),
]


@pytest.mark.parametrize(("options", "lines"), CASES, ids=lambda value: str(value)[:40])
def test_a_causal_lm(options: dict[str, Any], lines: list[str]) -> None:
    options = {"num_ranks": 2, "self_check": False, **options}
    pipe = Pipeline.from_config(ARCHITECTURES["llama"], **grouped(**options))
    for line in lines:
        assert line in repr(pipe)
    count = sum(parameter.numel() for parameter in pipe.parameters())
    assert f"parameters: {count:,} on this rank" in repr(pipe)


def test_layers_of_which_some_are_frozen() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    layers[1].bias.requires_grad_(False)
    pipe = Pipeline(layers, "gpipe", partition=[1, 1], loss_fn=lambda *_: None, num_ranks=2)
    assert repr(pipe).startswith("Pipeline of an nn.Sequential\n  layers: 1 + 1 in 2 stages")
    assert repr(pipe).endswith("parameters: 12 on this rank, of which 10 are trained; float32")
