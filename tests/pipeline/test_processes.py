"""A Pipeline over real processes trains as the unsplit model, and reports messages that differ or never come."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.forked import launch
from support.parameters import first_of
from support.paths import WORKERS

WORKER = WORKERS / "pipeline/processes.py"


@pytest.mark.parametrize(
    ("name", "num_processes", "schedule", "stages_per_rank"),
    first_of(
        [
            ("llama, tied", 3, "zb-h1", 1),
            ("qwen3", 2, "interleaved-1f1b", 2),
            ("llama, tied", 2, "zb-v", 2),
            ("llama", 2, "1f1b", 1),
            ("gpt2", 4, "gpipe", 1),
        ]
    ),
)
def test_processes_train_as_the_unsplit_model(
    name: str, num_processes: int, schedule: str, stages_per_rank: int
) -> None:
    ended = launch(num_processes, WORKER, "exact", name, schedule, str(stages_per_rank))
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.parametrize(("recompute", "offload"), first_of([("selective", "0.7"), ("full", "0")], 0))
def test_processes_recompute_and_offload(recompute: str, offload: str) -> None:
    ended = launch(2, WORKER, "exact", "llama, tied", "1f1b", "1", recompute, offload)
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_processes_share_layers_by_halves() -> None:
    """Each has the halves of two layers that the other doesn't; only what a process owns is in its memory."""
    ended = launch(2, WORKER, "exact", "llama, tied", "zb-v", "2", "none", "0", "0.5 1 1.5 1")
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.parametrize(
    ("what", "name"),
    [
        *first_of([(what, "llama, tied") for what in ("lengths", "ragged", "replicas")]),
        *first_of([(what, "gpt2") for what in ("lengths", "ragged", "replicas")], 0, "grid"),
    ],
)
def test_processes_run_microbatches_that_differ(what: str, name: str) -> None:
    """In rows and slices, and in length, also between replicas."""
    ended = launch(2, WORKER, what, name)
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_batches_of_different_shapes_are_found_out() -> None:
    ended = launch(2, WORKER, "mismatch")
    assert "rank 1 found the mismatch" in ended.stdout, ended.stderr[-3000:]
    assert "rank 0 found the mismatch" in ended.stdout, ended.stderr[-3000:]


@pytest.mark.parametrize("options", first_of([["pp"], ["dp"], ["tp"], ["pp", "1e9"]], 1), ids=" ".join)
def test_ranks_in_different_calls_are_told_which(options: list[str], tmp_path: Path) -> None:
    axis, *limit = options
    ended = launch(2, WORKER, "other calls", axis, tmp_path, *limit)
    assert all(f"rank {rank} found the other calls" in ended.stdout for rank in range(2)), ended.stderr[-3000:]


@pytest.mark.more
def test_ranks_that_call_other_pipelines_are_told_which() -> None:
    ended = launch(2, WORKER, "other pipelines")
    assert all(f"rank {rank} found the other pipeline" in ended.stdout for rank in range(2)), ended.stderr[-3000:]


@pytest.mark.parametrize(
    ("watched", "absent"), first_of([("watched", "2"), ("watched", "0"), ("watched", "12"), ("unwatched", "2")], 1)
)
def test_ranks_that_never_call_are_named_and_no_others(watched: str, absent: str, tmp_path: Path) -> None:
    """Rank 0 asks for the state and rank 1 saves, where they are there: they wait for the ones that have ended."""
    ended = launch(3, WORKER, "never called", tmp_path, watched, *absent)
    reported = [f"rank {rank} reported" in ended.stdout for rank in range(3)]
    assert reported == [str(rank) not in absent for rank in range(3)], ended.stderr[-3000:]


def test_a_rank_that_waits_in_vain_reports() -> None:
    ended = launch(2, WORKER, "absent")
    assert "rank 1 reported" in ended.stdout, ended.stderr[-3000:]


@pytest.mark.usefixtures("compiled_search")
@pytest.mark.parametrize("what", first_of(["buffers", "channels", "mesh", "auto"], 3))
def test_two_processes(what: str) -> None:
    ended = launch(2, WORKER, what)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.parametrize(
    "case",
    first_of(
        ["exact|llama, tied|zb-v|2|selective|0.7", "ragged|llama, tied", "buffers", "absent", "exact|gpt2|1f1b|1"], 1
    ),
)
def test_messages_by_way_of_host_memory(case: str) -> None:
    """As between ranks that share a GPU, here with memory of processors on both sides and copies that take a while."""
    ended = launch(2, WORKER, *f"staged {case}".split("|"))
    assert "rank 1 reported" in ended.stdout if case == "absent" else ended.returncode == 0, ended.stderr[-3000:]


def test_a_copy_that_fails_ends_both_ranks() -> None:
    ended = launch(2, WORKER, "staged failing", timeout=60)
    assert all(f"rank {rank} reported" in ended.stdout for rank in range(2)), ended.stderr[-3000:]
