"""Pipelines, replicas and tensor parallelism together take the same three steps as one process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.forked import launch
from support.paths import WORKERS

WORKER = WORKERS / "parallel/exactness.py"
BOUND = 1e-9
# Some of its six models on each mesh. `make test` has the first one on the meshes with a pipeline, `make exactness` all
# models on every mesh of up to eight processes.
MODELS = {
    (2, 2, 1): ("llama, tied", "mixtral"),
    (2, 1, 2): ("qwen3", "mixtral", "llama, adapted"),
    (1, 2, 2): ("gpt2", "llama", "llama, adapted"),
}
CASES = [
    pytest.param(
        mesh,
        model,
        marks=[pytest.mark.more] * (number > 0 or mesh == (1, 2, 2)),
        id="pp{} dp{} tp{}, {}".format(*mesh, model),
    )
    for mesh, models in MODELS.items()
    for number, model in enumerate(models)
]


@pytest.mark.more
def test_pipelines_of_three_ranks_beside_each_other_connect() -> None:
    """The middle rank is in more groups than the others, so groups can't be told apart by how many a rank is in."""
    results = run(6, "3", "1", "2", "llama, tied")
    assert len(results) == 3
    assert max(result["error"] for result in results) < BOUND


def run(num_processes: int, *arguments: str) -> list[dict[str, Any]]:
    ended = launch(num_processes, WORKER, *arguments)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.mark.parametrize(("mesh", "model"), CASES)
def test_a_mesh_trains_as_one_process(mesh: tuple[int, int, int], model: str) -> None:
    results = run(4, *map(str, mesh), model)
    assert len(results) == (3 if mesh[0] > 1 else 2)
    for result in results:
        assert result["model"] == model
        assert result["error"] < BOUND, result
