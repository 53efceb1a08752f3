"""Ranks that NCCL connects, each with a GPU or sharing one, compute as one process does.

    python -m pytest -m nccl tests/parallel/test_nccl.py    # the most valuable cases come first

The cases run in two standing processes; one that hangs ends these, is named, and two new ones go on. Without a GPU they
run on CPUs over gloo.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from support.parallel.standing_pair import StandingPair
from support.paths import WORKERS
from support.trainers import accuracy, arguments, history, unsplit_model, unsplit_trainer

PROGRAM = WORKERS / "parallel/nccl.py"
NAMES = (
    "one_f_one_b_in_unequal_slices",
    "v_shaped",
    "replicas_with_a_sharded_optimizer",
    "tensor_ranks",
    "context_exchanges_heads",
    "experts_apart",
    "replicas_with_sharded_parameters",
    "trainer_logs",
    "context_exchanges_keys",
    "interleaved",
    "zero_bubble",
    "sequence_parallel",
    "saved_and_resumed",
    "evaluated",
    "state_is_gathered",
    "graphs_exchange",
)
# Over gloo these try nothing that the others, or those of test_meshes, don't: `-m nccl` runs them.
LIKE_OTHERS = {"v_shaped", "replicas_with_a_sharded_optimizer", "context_exchanges_keys", "interleaved", "zero_bubble"}
LIKE_OTHERS |= {"sequence_parallel", "graphs_exchange"}
SECONDS = 30.0  # of a case, which takes about five on a GPU

on_a_gpu = [pytest.mark.nccl, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
device = pytest.mark.parametrize(
    "pair", [pytest.param("cuda", marks=on_a_gpu), pytest.param("cpu", marks=pytest.mark.more)], indirect=True
)


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingPair]:
    folder = tmp_path_factory.mktemp("nccl")
    alone = unsplit_trainer(unsplit_model(), arguments(folder / "alone", max_steps=3), compute_metrics=accuracy)
    alone.train()
    (folder / "trainer.json").write_text(json.dumps(history(alone)))
    made = StandingPair(PROGRAM, (request.param, str(folder)))
    yield made
    made.close()


@device
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.grid] * (name in LIKE_OTHERS)) for name in NAMES]
)
def test_a_case_is_exact(pair: StandingPair, name: str) -> None:
    problem = pair.run(name, SECONDS if torch.cuda.is_available() else 20 * SECONDS)
    assert not problem, problem


@device
def test_a_killed_rank_is_named_and_a_new_pair_goes_on(pair: StandingPair) -> None:
    limit = SECONDS if torch.cuda.is_available() else 20 * SECONDS
    problem = pair.run("killed", limit)
    assert "rank 1 ended with 9" in problem
    assert "rank 1" in problem.partition("rank 1 ended")[0] or "rank 0 ended" in problem, problem
    assert not pair.run("evaluated", limit)
