"""Where only some tokens count, gradients are those of the plain loss of the unsplit model on each sample alone."""

from __future__ import annotations

import copy
from math import prod
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.train.data import TokenisedText, sequences_of
from support.architectures import BOUND, gradient_error, gradients
from support.forked import launch
from support.parameters import first_of
from support.paths import WORKERS
from support.pipelines import make_pipe
from support.ragged_batches import MODELS, one_by_one

LENGTH = 24


def conversations() -> TokenisedText:
    """Samples of 4 to 24 tokens, of which few or all count, in the middle or at the end."""
    random = np.random.default_rng(0)
    tokens = [random.integers(1, 61, length).astype(np.int32) for length in (24, 4, 9, 15, 7, 11, 20, 6)]
    counts = [np.zeros(len(each), dtype=bool) for each in tokens]
    for number, each in enumerate(counts):
        each[-2 - number :] = True
        each[len(each) // 2] = number % 2 == 0
    labels = [np.where(each, ids, -100).astype(np.int32) for each, ids in zip(counts, tokens, strict=True)]
    return TokenisedText.join(tokens, labels)


@pytest.fixture(scope="module", params=["llama, tied", "gpt2"])
def expected(request: pytest.FixtureRequest) -> tuple[str, torch.Tensor, dict[str, torch.Tensor]]:
    text = conversations()
    both = [(text.document(n), text.labels_of(n)) for n in range(text.num_documents)]
    ids, labels = ([torch.from_numpy(each.astype(np.int64)) for each in column] for column in zip(*both, strict=True))
    return request.param, *one_by_one(request.param, ids, labels)


@pytest.mark.parametrize(
    "order",
    first_of(
        [
            {"schedule": "zb-v", "stages_per_rank": 2},
            {"schedule": "1f1b"},
            {"schedule": "zb-h1"},
            {"schedule": "interleaved-1f1b", "stages_per_rank": 2},
        ]
    ),
    ids=lambda order: order["schedule"],
)
@pytest.mark.parametrize("packing", ["fixed", "none"])
def test_gradients_are_those_of_the_plain_loss(
    expected: tuple[str, torch.Tensor, dict[str, torch.Tensor]], order: dict[str, Any], packing: str
) -> None:
    name, loss, grads = expected
    sequences = sequences_of([conversations()], packing, LENGTH, seed=0)
    batch = sequences.batch(0, sequences.num_sequences)
    slices = [11, 1, 7, 5] if packing == "fixed" else 4
    pipe = make_pipe(copy.deepcopy(MODELS[name]), slices=slices, num_microbatches=2, num_ranks=2, **order)
    found = pipe.step(batch.input_ids, batch.labels, document_ids=batch.document_ids)
    assert abs(found - loss) < BOUND
    assert gradient_error(grads, gradients(pipe)) < BOUND
    measured = pipe.evaluate(batch.input_ids, batch.labels, document_ids=batch.document_ids)
    assert float(measured) == pytest.approx(float(loss), rel=1e-12)


@pytest.mark.parametrize(
    "meshes",
    [
        pytest.param(["1,2,1", "1,1,2"], id="dp, tp"),
        # Four replicas have one or two of six rows.
        pytest.param(["2,2,1", "2,1,2", "1,2,2", "1,4,1"], id="dp x pp, pp x tp, dp x tp, dp", marks=pytest.mark.more),
    ],
)
def test_processes_divide_by_what_counts_in_all_of_them(meshes: list[str]) -> None:
    """Replicas, in which unequally many tokens count; parts of layers and of the vocabulary; packed and ragged."""
    num_processes = prod(map(int, meshes[0].split(",")))
    ended = launch(num_processes, WORKERS / "training" / "completion_meshes.py", *meshes)
    assert ended.returncode == 0, ended.stderr[-3000:]
    lines = ended.stdout.splitlines()
    assert len(lines) == 2 * len(meshes) * num_processes
    assert max(float(line) for line in lines) < BOUND
