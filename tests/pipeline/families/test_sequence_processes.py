"""An nn.Sequential over real processes changes no bit; its skips, slices and replicas travel as they should."""

from __future__ import annotations

import pytest

from support.forked import launch
from support.parameters import first_of
from support.paths import WORKERS

WORKER = WORKERS / "pipeline/sequence_processes.py"


@pytest.mark.parametrize(
    ("num_processes", "schedule", "recompute", "stages_per_rank"),
    first_of(
        [
            (2, "zb-v", "none", "2"),
            (3, "interleaved-1f1b", "selective", "2"),
            (2, "1f1b", "full", "1"),
            (3, "gpipe", "segments", "1"),
            (3, "zb-h1", "none", "1"),
        ],
        1,
    ),
)
def test_processes_change_no_bit(num_processes: int, schedule: str, recompute: str, stages_per_rank: str) -> None:
    ended = launch(num_processes, WORKER, "split", schedule, recompute, stages_per_rank)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.more
@pytest.mark.parametrize("shards", ["whole", "shards"])
def test_a_sparse_embedding_with_replicas(shards: str) -> None:
    ended = launch(2, WORKER, "sparse", shards)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.parametrize("what", first_of(["buffers", "straight"]))
def test_a_skip_goes_past_the_stages_between(what: str) -> None:
    ended = launch(3, WORKER, what)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.parametrize(
    ("num_processes", "name", "schedule", "recompute", "stages_per_rank"),
    first_of(
        [
            (2, "mixed", "interleaved-1f1b", "segments", "2"),
            (2, "transformer", "1f1b", "none", "1"),
            (3, "mixed", "zb-h1", "full", "1"),
            (3, "transformer", "zb-v", "none", "2"),
        ],
        1,
    ),
)
def test_token_slices(num_processes: int, name: str, schedule: str, recompute: str, stages_per_rank: str) -> None:
    ended = launch(num_processes, WORKER, "slices", name, schedule, recompute, stages_per_rank)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.parametrize(("num_processes", "what"), first_of([(4, "sliced_replicas"), (2, "sliced_bytes")]))
def test_slices_share_what_is_whole(num_processes: int, what: str) -> None:
    ended = launch(num_processes, WORKER, what)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.parametrize("over", first_of(["all", "own"]))
def test_replicas_share_a_batch_and_its_statistics(over: str) -> None:
    ended = launch(4, WORKER, "replicas", over)
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_weights_of_classes_are_added_up_over_replicas() -> None:
    """A loss function's own divisor is that of all rows, whatever the classes of each replica's weigh."""
    ended = launch(4, WORKER, "weighted")
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_every_rank_hears_that_nothing_is_trained() -> None:
    ended = launch(2, WORKER, "frozen")
    assert ended.stdout.count("nothing would be trained") == 2, ended.stderr[-3000:]
    assert ended.returncode == 0, ended.stderr[-3000:]  # of a step once one rank's layer is trained


def test_ranks_with_other_inputs_find_out() -> None:
    ended = launch(2, WORKER, "mismatch")
    for rank, shape in enumerate(["(4, 4, 4, 2)", "(4, 2, 4, 4)"]):
        assert f"rank {rank}: the ranks of one pipeline were given different batches" in ended.stdout, ended.stderr
        assert ended.stdout.count(f"rank {rank}: inputs {shape} float32") == 2
