"""Pipelines over real processes train as one process does, and ranks are told what the others do that differs.

What a case promises stands where it is written, in a program of tests/workers/pipeline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from support.examples import examples
from support.forked import launch
from support.parameters import first_of
from support.paths import WORKERS

PROGRAM, GROUP = WORKERS / "pipeline/processes.py", WORKERS / "pipeline/group.py"
Runs = Callable[[str, int], CompletedProcess[str]]
ROPES = ("llama, dynamic rope", "phi3, longrope")


def rows(
    program: str, num_processes: int, first: Sequence[str] = (), more: Sequence[str] = (), grid: Sequence[str] = ()
) -> list[Any]:
    """A row for each case of a program; `make test` runs the first ones, `make test-all` those of `more`."""
    marks: list[tuple[Sequence[str], list[Any]]] = [(first, []), (more, [pytest.mark.more]), (grid, [pytest.mark.grid])]
    return [
        pytest.param(program, num_processes, case, marks=mark, id=f"{program} {num_processes}-{case}")
        for names, mark in marks
        for case in names
    ]


CASES = [
    *rows(
        "processes",
        2,
        ["exact, halves", "timeline", "mismatch", "other calls, pp", "buffers", "channels", "mesh", "nothing given"],
        [
            *("exact, interleaved", "exact, selective, offloaded", "ragged, llama, tied"),
            *("other calls, dp", "other calls, pp, within a limit"),
        ],
        # Their orders, recomputation and plans are those of one process, their channels those of the others here.
        ["exact, zb-v", "exact, 1f1b", "exact, recomputed", "ragged, gpt2", "auto", "other calls, tp"],
    ),
    *rows("processes", 3, ["exact, zb-h1"]),
    *rows("processes", 4, more=["nothing given, dp", "nothing given, cp", "nothing given, tp"], grid=["exact, gpipe"]),
    *rows(
        "staged",
        2,
        ["exact, zb-v, selective, offloaded"],
        ["ragged, llama, tied", "buffers"],
        ["exact, gpt2"],
    ),
    *rows(
        "adapters",
        2,
        more=["stages, upper layers", "replicas, all layers", "sharded, upper layers"],
        grid=["stages, all layers", "replicas, upper layers", "sharded, all layers"],
    ),
    *rows(
        "collated_batches",
        2,
        ["a_replica_without_padding", "positions_beside_another_replicas_padding", "a_batch_that_a_replica_refuses"],
    ),
    *rows(
        "length_dependent_rope",
        2,
        [f"rows, {ROPES[0]}", f"padded, {ROPES[1]}"],
        [
            f"document lists, {ROPES[0]}",
            f"documents and positions, {ROPES[1]}",
        ],
        [
            *(f"{case}, {ROPES[1]}" for case in ("rows", "lists", "documents", "document lists")),
            *(f"{case}, {ROPES[0]}" for case in ("padded", "lists", "documents", "documents and positions")),
        ],
    ),
    *rows("loop_checkpoints", 2, ["other_meshes", "refusals", "buffers"]),
    *rows("spread_vocabulary", 2, ["1f1b, llama, tied"], ["zb-v, llama"], ["1f1b, llama", "zb-v, gemma3"]),
    *rows("spread_vocabulary", 3, more=["zb-h1, llama"], grid=["zb-h1, gpt2"]),
    *rows("spread_vocabulary", 4, more=["replicas, llama"], grid=["replicas, llama, tied"]),
    *rows(
        "ragged_meshes",
        2,
        ["stages", "ranks_that_plan_differently"],
        ["lone_replicas", "a_batch_that_one_replica_refuses"],
    ),
    *rows("ragged_meshes", 4, more=["replicas", "tensor_ranks", "preferences"]),
    *rows("token_outputs", 2, more=["stages_and_replicas", "tensor_ranks"]),
    *rows(
        "sequence_processes",
        2,
        ["split, zb-v", "slices, mixed, interleaved-1f1b", "frozen", "mismatch"],
        ["sliced_bytes", "sparse, whole", "sparse, shards"],
        ["split, 1f1b", "slices, transformer, 1f1b"],
    ),
    *rows(
        "sequence_processes",
        3,
        ["buffers"],
        ["straight", "split, interleaved-1f1b", "slices, transformer, zb-v"],
        ["split, gpipe", "split, zb-h1", "slices, mixed, zb-h1"],
    ),
    *rows("sequence_processes", 4, ["sliced_replicas", "norms of all", "weighted"], ["norms of own"]),
]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, compiled_search: None) -> Runs:
    """Runs the selected cases of all programs in one group of so many processes; the first case that fails ends it."""
    chosen: defaultdict[tuple[bool, int], list[str]] = defaultdict(list)
    for item in request.session.items:
        if item.path == request.path and "case" in item.fixturenames:
            given = item.callspec.params
            chosen[given["program"] == "staged", given["num_processes"]].append(f"{given['program']}/{given['case']}")

    @cache
    def run(is_staged: bool, num_processes: int) -> CompletedProcess[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLIPSTREAM_TESTS_RANDOM_CASES", str(examples(40, thin=5).max_examples))
            return launch(num_processes, GROUP, *chosen[is_staged, num_processes])

    return lambda program, num_processes: run(program == "staged", num_processes)


@pytest.mark.parametrize(("program", "num_processes", "case"), CASES)
def test_processes_keep_what_is_promised(runs: Runs, program: str, num_processes: int, case: str) -> None:
    ended = runs(program, num_processes)
    assert f"passed {program}/{case}\n" in ended.stdout, ended.stdout[-3000:] + ended.stderr[-4000:]


# --- what ends ranks, or counts what a process has made ---------------------------------------------------------------


@pytest.mark.more
def test_ranks_that_call_other_pipelines_are_told_which() -> None:
    ended = launch(2, PROGRAM, "other pipelines")
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.parametrize(
    ("watched", "absent"), first_of([("watched", "2"), ("watched", "0"), ("watched", "12"), ("unwatched", "2")], 1)
)
def test_ranks_that_never_call_are_named_and_no_others(watched: str, absent: str, tmp_path: Path) -> None:
    """Rank 0 asks for the state and rank 1 saves, where they are there: they wait for the ones that have ended."""
    ended = launch(3, PROGRAM, "never called", tmp_path, watched, *absent)
    reported = [f"rank {rank} reported" in ended.stdout for rank in range(3)]
    assert reported == [str(rank) not in absent for rank in range(3)], ended.stderr[-3000:]


@pytest.mark.parametrize("what", first_of(["absent", "staged absent"]))
def test_a_rank_that_waits_in_vain_reports(what: str) -> None:
    ended = launch(2, PROGRAM, what)
    assert "rank 1 reported" in ended.stdout, ended.stderr[-3000:]


def test_a_copy_that_fails_ends_both_ranks() -> None:
    ended = launch(2, PROGRAM, "staged failing", timeout=60)
    assert all(f"rank {rank} reported" in ended.stdout for rank in range(2)), ended.stderr[-3000:]
